"""What a request may set in `custom_params` for speculation, and how its mistakes are told."""

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from datastores import DEFAULT_NAMESPACE

NO_DRAFTER = "none"
"""A request's or a server's drafter of this name: plain decoding."""

MOST_TOP_BETA, MOST_TAU = 32, 10.0
"""Bounds of a relaxed rule: past them, drafts would be written whatever the target says."""
MOST_FRAMES = 1500
"""Frames that Whisper's encoder makes of its window of 30 s."""
NESTED = "sglang_ext"
"""The key of custom_params that may hold all of ours."""

_NAMESPACE = r"[A-Za-z0-9._:@-]{1,128}"
# What a file name, a log line and a URL can all carry; request ids are shorter.
_INGEST_NAME = r"[!-~]{1,256}"
_MOST_CORPORA = 32
_LONGEST_CORPUS = 512
LONGEST_PREDICTION = 1 << 18
"""Characters."""
_EXPECTED = {
    "draft_length": "a whole number of at least 0",
    "budget": "auto or fixed",
    "datastore": "true or false",
    "ingest": "true or false",
    "namespace": "1 to 128 characters of A-Z a-z 0-9 . _ : @ -",
    "ingest_name": "1 to 256 visible ASCII characters",
    "relaxed": "an object with top_beta, tau and by, each of which may be left out",
    "relaxed.top_beta": f"a whole number of 1 to {MOST_TOP_BETA}",
    "relaxed.tau": f"a number from 0 to {MOST_TAU:g}",
    "relaxed.by": "target or drafter",
    "corpora": f"a list of at most {_MOST_CORPORA} names of corpora",
    "attended_frames": f"a whole number of 1 to {MOST_FRAMES}",
    "prediction": f"text of at most {LONGEST_PREDICTION} characters",
}


_CorpusName = Annotated[str, StringConstraints(min_length=1, max_length=_LONGEST_CORPUS)]


class RequestOptionError(ValueError):
    """A request's custom_params ask for something that is not there; the message names it."""


class RelaxedRule(BaseModel):
    """SpecDec++'s acceptance (arXiv 2203.16487, Eqs. 6 and 7): what of a draft is good enough.

    Attributes:
        top_beta: a drafted token passes if its log-probability is at least that of the target's
            so-many-th best token (Eq. 6),
        tau: and at most so much below that of the target's best one (Eq. 7), in nats.
        by: whose log-probability of the token that is: the target's own, or the drafter's as the
            paper prints it (the target's for tokens of which the drafter gives none).
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    top_beta: Annotated[int, Field(ge=1, le=MOST_TOP_BETA)] = 3
    tau: Annotated[float, Field(ge=0, le=MOST_TAU)] = 1.0
    by: Literal["target", "drafter"] = "target"


class RequestOptions(BaseModel):
    """What one request may set in `custom_params`; other keys there are its drafter's own.

    Attributes:
        drafter: name of a loaded drafter, or "none" for plain decoding; None: the server's.
        draft_length: most nodes drafted per step, 0 for plain decoding; None: the server's.
        budget: "fixed" to verify all that is drafted, whether it pays or not (for measurements);
            "auto" or None: the server's rule.
        datastore: whether drafts may come from the datastore as well; else from the request's own
            tokens alone.
        ingest: whether its finished output may join the datastore.
        namespace: whose served outputs it reads and joins, beside the shared corpora.
        ingest_name: the name under which its output can be deleted; None: the request's id.
        relaxed: which drafted tokens are accepted beside the target's own; None: none, the output
            is the target's.
        corpora: names of the corpora that it drafts from, of the shared ones and its namespace's;
            none of them: it drafts from no corpus. None: all that it may read.
        prediction: what it will write, as the client expects; a draft. Schedulers get its tokens
            instead (admission/predictions.py). None: nothing.
        attended_frames: of a Whisper on the CPU: its answer says to which of the encoder's first so
            many frames each token attends most (step/attended_frames.py). None: it does not.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    drafter: str | None = None
    draft_length: Annotated[int, Field(ge=0)] | None = None
    budget: Literal["auto", "fixed"] | None = None
    datastore: bool = True
    ingest: bool = True
    namespace: Annotated[str, StringConstraints(pattern=f"^{_NAMESPACE}$")] = DEFAULT_NAMESPACE
    ingest_name: Annotated[str, StringConstraints(pattern=f"^{_INGEST_NAME}$")] | None = None
    relaxed: RelaxedRule | None = None
    corpora: Annotated[tuple[_CorpusName, ...], Field(max_length=_MOST_CORPORA)] | None = None
    prediction: Annotated[str, StringConstraints(max_length=LONGEST_PREDICTION)] | None = None
    attended_frames: Annotated[int, Field(ge=1, le=MOST_FRAMES)] | None = None

    @field_validator("drafter", mode="before")
    @classmethod
    def _is_loaded(cls, drafter: Any, info: ValidationInfo) -> Any:
        if drafter is not None and info.context is not None and drafter not in info.context:
            raise ValueError("not loaded")
        return drafter

    @field_validator("namespace", mode="before")
    @classmethod
    def _default_where_none(cls, namespace: Any) -> Any:
        return DEFAULT_NAMESPACE if namespace is None else namespace

    @field_validator("corpora", mode="before")
    @classmethod
    def _as_json_has_them(cls, corpora: Any) -> Any:
        return tuple(corpora) if isinstance(corpora, list) else corpora

    @classmethod
    def parse(cls, params: Mapping[str, Any] | None, drafters: Collection[str]) -> "RequestOptions":
        """Read a request's `custom_params`; keys that are not ours are left alone.

        Args:
            drafters: names of the drafters that the server has loaded.

        Raises:
            RequestOptionError: a value is of the wrong type or names no loaded drafter.
        """
        names = [NO_DRAFTER, *drafters]
        try:
            return cls.model_validate(dict(params or {}), context=names)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(part for part in first["loc"] if isinstance(part, str))
        value = first["input"]
        if first["type"] == "extra_forbidden":
            known = ", ".join(RelaxedRule.model_fields)
            raise RequestOptionError(
                f"custom_params.relaxed has no field {shown(first['loc'][-1])}; known: {known}"
            )
        expected = f"one of {', '.join(names)}" if name == "drafter" else _EXPECTED[name]
        raise RequestOptionError(f"custom_params.{name} must be {expected}, got {shown(value)}")


class DrafterOptions(BaseModel):
    """Base of what a request may set for one drafter: an object in `custom_params`.

    Attributes:
        parameter: the object's key.
        expected: what each field must be, for messages; "true or false" where it is not named.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    parameter: ClassVar[str]
    expected: ClassVar[Mapping[str, str]]

    @classmethod
    def parse(cls, params: Any) -> Self:
        """Read the object; what is None counts as left out.

        Raises:
            ValueError: an unknown name, or a value of the wrong kind; the message names it.
        """
        if params is None:
            return cls()
        if not isinstance(params, Mapping):
            raise ValueError(f"{cls.parameter} must be an object, got {shown(params)}")
        known = cls.model_fields
        for name in params:
            if name not in known:
                known_names = ", ".join(known)
                raise ValueError(f"{cls.parameter}.{shown(name)} is unknown; known: {known_names}")
        # Strict tuples are no lists, which is what JSON has.
        given = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in params.items()
            if value is not None
        }
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            wrong = str(error.errors(include_url=False, include_context=False)[0]["loc"][0])
        expected = cls.expected.get(wrong, "true or false")
        raise ValueError(f"{cls.parameter}.{wrong} must be {expected}, got {shown(params[wrong])}")


def flattened(params: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A request's `custom_params`, with the keys of its object `sglang_ext` beside the others.

    `custom_params` is a bag that custom logit processors use as well; who wants ours apart from
    theirs puts them into an object of this name.

    Raises:
        RequestOptionError: it is no object, or a key stands in both with different values.
    """
    nested = (params or {}).get(NESTED)
    if params is None or NESTED not in params:
        return params
    flat = {key: value for key, value in params.items() if key != NESTED}
    if nested is None:
        return flat
    if not isinstance(nested, Mapping):
        raise RequestOptionError(f"custom_params.{NESTED} must be an object, got {shown(nested)}")
    for key, value in nested.items():
        if key in flat and flat[key] != value:
            raise RequestOptionError(
                f"custom_params.{NESTED}.{shown(key)[1:-1]} contradicts custom_params."
                f"{shown(key)[1:-1]}: send one of them"
            )
    return {**flat, **nested}


def check_namespace(name: Any, field: str) -> str:
    """`name`, if it can name a namespace.

    Args:
        field: what to call it in the message.

    Raises:
        RequestOptionError: it cannot.
    """
    if isinstance(name, str) and re.fullmatch(_NAMESPACE, name):
        return name
    raise RequestOptionError(f"{field} must be {_EXPECTED['namespace']}, got {shown(name)}")


def shown(value: Any) -> str:
    """A client's value for a message: quoted, and not longer than a line."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
