"""The draft executor as its server sees it: started, watched, started again when it ends.

Nothing here waits for it but `wait`, and nothing that happens to it reaches the caller: without an
executor `connection` is None, and drafting goes on when there is one again.
"""

import contextlib
import logging
import subprocess
import threading
import time
from dataclasses import dataclass

from sglang_ext.mirror.channel import Channel
from sglang_ext.mirror.executor_settings import ExecutorSettings
from sglang_ext.mirror.messages import Kind
from sglang_ext.mirror.shared_ring import ChannelError, Record
from sglang_ext.servers import processes

logger = logging.getLogger(__name__)

# Between an executor's end and the next one's start: twice as long each time, up to the last.
_FIRST_BACK_OFF_S, _MOST_BACK_OFF_S = 0.5, 60.0
# One that has worked so long is started again as if it were the first.
_STEADY_S = 60.0
_LOOK_S = 0.05
_START_S = 600.0
_STOP_GRACE_S = 1.0


class ExecutorError(RuntimeError):
    """The executor's process cannot be used; the message says why."""


@dataclass(eq=False)
class Connection:
    """An executor that is ready.

    Attributes:
        channel: to it; for one thread.
        vocab_size: tokens that its model knows.
        broken: set by whoever finds that it is of no more use; it is then started again.
    """

    channel: Channel
    vocab_size: int
    broken: str = ""


class ExecutorClient:
    """Keeps an executor running, in a thread of its own.

    Attributes:
        restarts: executors that were started after the first.

    Args:
        settings: how to run it.
    """

    def __init__(self, settings: ExecutorSettings) -> None:
        self._settings = settings
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.restarts = 0

    @property
    def connection(self) -> Connection | None:
        """The executor, where one is ready."""
        connection = self._connection
        return None if connection is None or connection.broken else connection

    @property
    def pid(self) -> int | None:
        """The process id of its supervisor, where it runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the first executor, and wait until it is ready.

        Raises:
            ExecutorError: it did not start.
        """
        self._connection = self._started()
        self._thread = threading.Thread(target=self._watch, name="mirror-executor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the executor, and start none again."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        back_off = _FIRST_BACK_OFF_S
        while not self._ended.is_set():
            since = time.monotonic()
            reason = self._wait_for_end()
            self._let_go()
            if self._ended.is_set():
                return
            if time.monotonic() - since > _STEADY_S:
                back_off = _FIRST_BACK_OFF_S
            logger.warning(
                "the draft executor %s: decoding goes on without it; it is started again in %g s",
                *(reason, back_off),
            )
            while not self._ended.wait(back_off) and self._connection is None:
                back_off = min(2 * back_off, _MOST_BACK_OFF_S)
                try:
                    self._connection = self._started()
                except ExecutorError as error:
                    logger.warning("%s; the next try is in %g s", error, back_off)
            if self._connection is not None:
                self.restarts += 1
                logger.info("the draft executor is ready again")

    def _wait_for_end(self) -> str:
        """Returns when it has ended or is to be ended, and why."""
        assert self._process is not None and self._connection is not None
        while not self._ended.wait(_LOOK_S):
            if self._process.poll() is not None:
                return f"has ended ({_status(self._process.returncode)})"
            if self._connection.broken:
                return self._connection.broken
        return "is stopped"

    def _started(self) -> Connection:
        channel = Channel.create()
        try:
            self._process = processes.start(self._settings.command(channel.path))
            ready = self._ready(channel)
        except (OSError, ChannelError, ExecutorError) as error:
            self._end_process()
            channel.close()
            raise ExecutorError(f"the draft executor did not start: {error}") from None
        return Connection(channel, ready.items)

    def _ready(self, channel: Channel) -> Record:
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and not self._ended.is_set():
            if channel.wait(_LOOK_S):
                for record in channel.receive():
                    if record.kind == Kind.READY:
                        return record
            if self._process.poll() is not None:
                status = _status(self._process.returncode)
                raise ExecutorError(f"{status}; its own words are in the log above")
        raise ExecutorError(f"it was not ready within {_START_S:g} s")

    def _let_go(self) -> None:
        """Forget the connection, and end the process. The channel ends with its last user."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.broken = connection.broken or "has ended"
        self._end_process()

    def _end_process(self) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):
                processes.stop_group(self._process, _STOP_GRACE_S)
            self._process = None


def _status(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"
