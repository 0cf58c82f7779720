"""Fields of a request that pydantic has refused, as OpenAI's API would say it."""

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ValidationError
from pydantic.fields import FieldInfo

from sglang_ext.api.http import ApiError
from sglang_ext.request_options import shown

TEXT = "text (valid Unicode)"
# By pydantic's error types (docs.pydantic.dev/latest/errors/validation_errors); others are told
# by the field's description or its bounds.
_EXPECTED = {"string_type": TEXT, "string_unicode": TEXT, "bool_type": "true or false"}


class Unexpected(ValueError):
    """A validator's refusal of a field.

    Args:
        expected: what the field must be.
        code: OpenAI's code for it, or one like them.
    """

    def __init__(self, expected: str, code: str | None = "invalid_value"):
        super().__init__(expected)
        self.code = code


def _encodable(text: str) -> str:
    """The text; JSON may escape half a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Unexpected(TEXT) from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
"""Text that has an encoding; pydantic takes half a surrogate pair as well."""


def explain(
    error: ValidationError, model: type[BaseModel], given: Mapping[str, Any], within: str = ""
) -> ApiError:
    """The refusal that names the first field at fault, what was expected and what came.

    Args:
        model: refused `given`. A field's description says what it must be, where its type and
            bounds do not.
        within: the field that `given` is the value of; "": it is the whole body.
    """
    known = model.model_fields
    if model.model_config.get("extra") == "forbid":
        for name in given:
            if name not in known:
                return _unknown(name, list(known))
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    refused = first.get("ctx", {}).get("error")
    code = refused.code if isinstance(refused, Unexpected) else "invalid_value"
    if len(first["loc"]) > 1:  # what is wrong within a field is told of the whole
        expected = _expected(known[name])
    elif isinstance(refused, Unexpected):
        expected = str(refused)
    else:
        expected = _EXPECTED.get(first["type"]) or _expected(known[name])
    path = f"{within}.{name}" if within else name
    message = f"{path} must be {expected}, got {shown(given.get(name))}"
    return ApiError(message, 400, within or name, code)


def _unknown(name: str, known: list[str]) -> ApiError:
    return ApiError(
        f"unknown field {shown(name)}; known: {', '.join(known)}",
        param=name if name.isascii() and name.isidentifier() else None,
        code="unknown_parameter",
    )


def _expected(field: FieldInfo) -> str:
    """What a field must be: its description, or a number within its bounds."""
    if field.description is not None:
        return field.description
    bounds = {
        name: getattr(m, name) for m in field.metadata for name in ("ge", "le") if hasattr(m, name)
    }
    if float in (field.annotation, *get_args(field.annotation)):
        return f"a number from {bounds['ge']:g} to {bounds['le']:g}"
    most = f" and at most {bounds['le']}" if "le" in bounds else ""
    return f"a whole number of at least {bounds['ge']}{most}"
