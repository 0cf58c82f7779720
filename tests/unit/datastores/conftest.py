"""Compiled code is made (or loaded) once, before tests that have deadlines."""

import threading

import pytest

from datastores import warm_up
from datastores.live import LiveCollection


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    warm_up()


@pytest.fixture
def may_sort(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing that is queued is sorted until this is set: else a queue is full by luck only."""
    event = threading.Event()
    run = LiveCollection._run

    def run_later(collection: LiveCollection) -> None:
        event.wait(60)  # a test that fails before it sets it must end all the same
        run(collection)

    monkeypatch.setattr(LiveCollection, "_run", run_later)
    return event
