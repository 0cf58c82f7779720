"""What servers that are started find in their environment."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Environment variables for the servers that start within it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def one_thread() -> AbstractContextManager[None]:
    """Servers compute with one thread: two of them share the machine."""
    return environment(OMP_NUM_THREADS="1")
