"""A folder at any address that fsspec knows (file, memory, s3, gs, hf, sftp, ...).

Every call answers within a time or raises DatastoreError, whatever the file system below does, and
failures that may pass are tried again. Nothing outside the folder is named.
"""

import contextlib
import io
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit, urlunsplit

from ..config import DatastoreError

TIMEOUT_S = 60.0
# Linux looks for pages as large as a write is, and 1 MiB at once may take twice as long.
WRITE_BYTES = 1 << 18
# A block may take longer than an answer: a slow line moves 16 MiB in minutes.
_BLOCK_TIMES = 5
_TRIES = 4
_FIRST_WAIT_S = 0.5
_HUB = "hf://"
_HUB_KINDS = ("datasets/", "models/", "spaces/", "buckets/")
# Of file systems that are no part of fsspec; pip names of those that differ.
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs"}
# No other attempt will find it otherwise.
_FINAL = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, ValueError)

T = TypeVar("T")


class RemoteFolder:
    """A folder at an address. Its methods raise DatastoreError, in one line, where they cannot."""

    def __init__(self, address: str, timeout: float = TIMEOUT_S) -> None:
        """timeout: seconds within which the address must answer; five times as many for a block.

        Raises DatastoreError: no file system takes such an address.
        """
        from fsspec.core import url_to_fs  # takes a moment, and few commands need it

        self.address = full_address(address)
        self.shown = shown_address(self.address)
        self.timeout = timeout
        self._block_timeout = _BLOCK_TIMES * timeout
        scheme = self.address.partition("://")[0]
        try:
            self.fs, root = self._wait(_Call(lambda: url_to_fs(self.address)))
        except ImportError:
            package = _PACKAGES.get(scheme, "its fsspec file system")
            raise DatastoreError(
                f"{self.shown}: addresses of {scheme}:// need a package: pip install {package}"
            ) from None
        except ValueError as error:
            raise DatastoreError(f"{self.shown} is no address: {_line(error)}") from None
        except DatastoreError:
            raise
        except Exception as error:
            raise self._failure("open it", error) from None
        self._root = root.rstrip("/")

    def _path(self, name: str) -> str:
        assert "/" not in name and name not in ("", ".", "..")
        return f"{self._root}/{name}"

    # -- small calls -----------------------------------------------------------------------

    def prepare(self) -> None:
        """Makes the folder; on the Hub its dataset, a private one, where there is none."""

        def make() -> None:
            hub = re.match(r"hf://datasets/([^/]+/[^/@]+)", self.address)
            if hub:
                from huggingface_hub import HfApi

                HfApi().create_repo(hub[1], repo_type="dataset", private=True, exist_ok=True)
            else:
                self.fs.makedirs(self._root, exist_ok=True)

        self._try("make it", make)

    def sizes(self) -> dict[str, int]:
        """Bytes by name of the files in the folder, none where there is no folder."""

        def look() -> dict[str, int]:
            self.fs.invalidate_cache()
            try:
                found = self.fs.ls(self._root, detail=True)
            except FileNotFoundError:
                return {}
            return {
                each["name"].rstrip("/").rpartition("/")[2]: int(each.get("size") or 0)
                for each in found
                if each["name"].rstrip("/") != self._root.rstrip("/")
            }

        return self._try("list it", look)

    def read(self, name: str, start: int, end: int) -> bytes:
        """Bytes from start to end, or to the file's end."""
        path = self._path(name)
        return self._try(f"read {name}", lambda: self.fs.cat_file(path, start=start, end=end))

    def read_if_there(self, name: str, most: int) -> bytes | None:
        """The whole of a small file; None: there is none."""
        path = self._path(name)

        def look() -> bytes | None:
            self.fs.invalidate_cache()
            try:
                return self.fs.cat_file(path, start=0, end=most)
            except FileNotFoundError:
                return None

        return self._try(f"read {name}", look)

    def write(self, name: str, content: bytes) -> None:
        """A small file, whole."""
        self._try(f"write {name}", lambda: self.fs.pipe_file(self._path(name), content))

    def remove(self, name: str) -> None:
        """Removes a file if it is there."""

        def remove() -> None:
            try:
                self.fs.rm_file(self._path(name))
            except FileNotFoundError:
                return
            except NotImplementedError:
                self.fs.rm(self._path(name))

        self._try(f"remove {name}", remove)

    # -- large files -----------------------------------------------------------------------

    def blocks(self, name: str, spans: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """The bytes of each span (start, end) of a file; one comes while the last is being used."""
        path, doing = self._path(name), f"read {name}"
        coming: _Call[bytes] | None = None
        for start, end in spans:
            # One at a time: not every file system bears two.
            block = None if coming is None else self._come(doing, coming)
            coming = _Call(partial(self.fs.cat_file, path, start=start, end=end))
            if block is not None:
                yield block
        if coming is not None:
            yield self._come(doing, coming)

    def _come(self, doing: str, begun: "_Call[bytes]") -> bytes:
        return self._try(doing, begun.function, self._block_timeout, begun)

    def write_blocks(self, name: str, blocks: Callable[[], Iterable[bytes | memoryview]]) -> None:
        """A large file; blocks() gives its bytes, again at each attempt."""
        for attempt in range(_TRIES):
            try:
                self._write_once(name, blocks)
                return
            except DatastoreError:
                raise
            except Exception as error:
                if attempt == _TRIES - 1 or isinstance(error, _FINAL):
                    raise self._failure(f"write {name}", error) from None
                time.sleep(_FIRST_WAIT_S * 2**attempt)

    def _write_once(self, name: str, blocks: Callable[[], Iterable[bytes | memoryview]]) -> None:
        beats = _Beats()

        def write() -> None:
            with self.fs.open(self._path(name), "wb") as file:
                for block in blocks():
                    beats.beat()
                    view = memoryview(block)
                    for at in range(0, len(view), WRITE_BYTES):
                        file.write(view[at : at + WRITE_BYTES])
                _sync(file)

        self._wait(_Call(write), self._block_timeout, beats)

    # -- what may fail -----------------------------------------------------------------------

    def _try(
        self,
        doing: str,
        function: Callable[[], T],
        timeout: float | None = None,
        begun: "_Call[T] | None" = None,
    ) -> T:
        """What a function returns, called up to four times; begun: its first call."""
        for attempt in range(_TRIES):
            call = begun if begun is not None and not attempt else _Call(function)
            try:
                return self._wait(call, timeout)
            except DatastoreError:
                raise
            except Exception as error:
                if attempt == _TRIES - 1 or isinstance(error, _FINAL):
                    raise self._failure(doing, error) from None
                time.sleep(_FIRST_WAIT_S * 2**attempt)
        raise AssertionError

    def _wait(
        self, call: "_Call[T]", timeout: float | None = None, beats: "_Beats | None" = None
    ) -> T:
        """What a call returns or raises; DatastoreError if it does neither in time.

        beats: the call may take longer, as long as it shows that it goes on.
        """
        timeout = self.timeout if timeout is None else timeout
        beats = beats or _Beats()
        while not call.done.wait(max(0.01, beats.last + timeout - time.monotonic())):
            if time.monotonic() >= beats.last + timeout:
                beats.given_up = True
                raise DatastoreError(f"{self.shown} did not answer within {timeout:.0f} s")
        return call.result()

    def _failure(self, doing: str, error: BaseException) -> DatastoreError:
        if isinstance(error, DatastoreError):
            return error
        return DatastoreError(f"{self.shown}: cannot {doing}: {_line(error)}")


class _Call(Generic[T]):
    """A call that has begun, in a thread of its own: one that never returns must not keep the
    process from ending."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.function = function
        self.done = threading.Event()
        self._value: T
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="datastore-remote", daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self.function()
        except BaseException as error:
            self._error = error
        self.done.set()

    def result(self) -> T:
        """What it returned, once it is done; or what it raised."""
        if self._error is not None:
            raise self._error
        return self._value


class _Beats:
    """When a long call last showed that it goes on."""

    def __init__(self) -> None:
        self.last = time.monotonic()
        self.given_up = False

    def beat(self) -> None:
        """ConnectionAbortedError if nobody waits for the call any more."""
        if self.given_up:
            raise ConnectionAbortedError("it took too long")
        self.last = time.monotonic()


def full_address(address: str) -> str:
    """The address, on the Hub that of the dataset: hf://OWNER/NAME is hf://datasets/OWNER/NAME."""
    if address.startswith(_HUB) and not address.startswith(tuple(_HUB + k for k in _HUB_KINDS)):
        return f"{_HUB}datasets/{address.removeprefix(_HUB)}"
    return address


def is_address(text: str) -> bool:
    """Whether it names a place by its scheme, and is no path of this machine."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)", text) is not None


def shown_address(address: str) -> str:
    """The address without what may be a secret in it."""
    try:
        parts = urlsplit(address)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return address.partition("?")[0]
    return urlunsplit((parts.scheme, host, parts.path, "", "")) if parts.netloc else address


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return text if text and isinstance(error, OSError) else f"{type(error).__name__}: {text}"


def _sync(file: Any) -> None:
    """Has what was written on the disk itself, where the file system is this machine's."""
    with contextlib.suppress(AttributeError, io.UnsupportedOperation):
        descriptor = file.fileno()
        file.flush()
        os.fsync(descriptor)
