"""Compiled code is made (or loaded) once, before tests that have deadlines."""

import pytest

from datastores import warm_up


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    warm_up()
