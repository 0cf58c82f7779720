"""Requests that Schemathesis makes of /openapi.json, right and wrong ones, and their answers."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from sglang_ext.api.openapi import TAG


@dataclass
class Answers:
    """What one operation answered.

    Attributes:
        statuses: how often each came.
        errors: answers that the server failed on (5xx).
        unexpected: answers that its schema does not describe.
    """

    operation: str
    statuses: Counter[int] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def fuzz(
    schema: Any, examples: int, known: Mapping[str, Sequence[str]] | None = None
) -> Iterator[Answers]:
    """Ask each of our operations so many times in the right and in a wrong way.

    Args:
        schema: Schemathesis's, of an application or an address.
        known: by path parameter, values of things that are there, which half of the requests name.
            Not asked for are events of these: they go on for ever.
    """
    from schemathesis import GenerationMode

    operations = [result.ok() for result in schema.include(tag=TAG).get_all_operations()]
    # Deletions last: the others need what is there.
    for operation in sorted(operations, key=lambda operation: operation.method == "delete"):
        answers = Answers(operation.label)
        names = {} if operation.path.endswith("/events") else known or {}
        for mode in GenerationMode:
            _ask(operation, operation.as_strategy(generation_mode=mode), names, examples, answers)
        yield answers


def _ask(
    operation: Any,
    cases: "st.SearchStrategy[Any]",
    known: Mapping[str, Sequence[str]],
    examples: int,
    answers: Answers,
) -> None:
    # What fails is noted, not raised: Hypothesis would ask again and again for a smaller request.
    @given(case=cases, data=st.data())
    @settings(
        max_examples=examples,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any, data: st.DataObject) -> None:
        for name in known.keys() & (case.path_parameters or {}).keys():
            if data.draw(st.booleans()):
                case.path_parameters[name] = data.draw(st.sampled_from(known[name]))
        _note(case, case.call(), answers)

    # Where every string is a right one, there is no wrong request.
    with contextlib.suppress(Unsatisfiable):
        ask()


def _note(case: Any, response: Any, answers: Answers) -> None:
    """Count an answer, and what is wrong with it."""
    from schemathesis.core.failures import FailureGroup
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    answers.statuses[response.status_code] += 1
    asked = f"{answers.operation}: {case.path_parameters} {case.query} {case.body!r:.300}"
    told = f"{asked}: {response.status_code} {response.text[:300]}"
    if response.status_code >= 500:
        answers.errors.append(told)
    checks = [status_code_conformance, content_type_conformance, response_schema_conformance]
    try:
        case.validate_response(response, checks=checks)
    except FailureGroup as wrong:
        answers.unexpected += [f"{told}: {one}" for one in wrong.exceptions]
