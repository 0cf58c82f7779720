"""What pydantic refuses is told with the field, what was expected and what came."""

from typing import Annotated

import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from sglang_ext.api.fields import Text, Unexpected, explain


def even(number: int) -> int:
    if number % 2:
        raise Unexpected("an even number", code="odd")
    return number


class Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    share: float = Field(0.5, ge=0, le=1, allow_inf_nan=False)
    count: int | None = Field(None, ge=2)
    few: int = Field(0, ge=0, le=9)
    on: bool = False
    name: Text | None = None
    pair: Annotated[int, AfterValidator(even)] = 0
    words: dict[str, Text] | None = Field(None, description="an object of texts")


class Open(Model):
    model_config = ConfigDict(extra="ignore")


def refusal_of(given, model=Model, **more):
    with pytest.raises(ValidationError) as raised:
        model.model_validate(given)
    return explain(raised.value, model, given, **more)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"share": 2}, "share must be a number from 0 to 1, got 2"),
        ({"share": True}, "share must be a number from 0 to 1, got True"),
        ({"share": float("nan")}, "share must be a number from 0 to 1, got nan"),
        ({"share": "0.5"}, "share must be a number from 0 to 1, got '0.5'"),
        ({"count": 1}, "count must be a whole number of at least 2, got 1"),
        ({"few": False}, "few must be a whole number of at least 0 and at most 9, got False"),
        ({"few": 1.0}, "few must be a whole number of at least 0 and at most 9, got 1.0"),
        ({"on": 1}, "on must be true or false, got 1"),
        ({"name": 1}, "name must be text (valid Unicode), got 1"),
        ({"name": "\ud800"}, "name must be text (valid Unicode), got '\\ud800'"),
        ({"words": {"a": "\ud800"}}, "words must be an object of texts, got {'a': '\\ud800'}"),
        ({"words": []}, "words must be an object of texts, got []"),
    ],
)
def test_a_field_its_bounds_and_its_value_are_named(given, message):
    error = refusal_of(given)
    assert str(error) == message
    assert (error.status, error.param, error.code) == (400, next(iter(given)), "invalid_value")


def test_a_validator_says_what_it_expected_and_the_code():
    error = refusal_of({"pair": 3})
    assert (str(error), error.code) == ("pair must be an even number, got 3", "odd")


@pytest.mark.parametrize(("name", "param"), [("shar", "shar"), ("a b", None), ("\ud800", None)])
def test_an_unknown_field_is_told_before_all_others_with_what_is_known(name, param):
    error = refusal_of({"share": 2, name: None})
    assert f"unknown field {name!r}; known: share, count, few" in str(error)
    assert (error.param, error.code) == (param, "unknown_parameter")


def test_where_unknown_fields_are_taken_the_known_one_is_told():
    assert refusal_of({"shar": 2, "few": 10}, Open).param == "few"


def test_a_field_within_another_has_its_path_and_the_others_param():
    error = refusal_of({"few": 10}, within="outer")
    assert str(error).startswith("outer.few must be") and error.param == "outer"
