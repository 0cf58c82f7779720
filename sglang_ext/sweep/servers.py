"""The servers of a sweep: started here, or running elsewhere."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from sglang_ext.servers.flags import flag_value
from sglang_ext.servers.server_process import ServerError, ServerProcess, is_ready
from sglang_ext.servers.started_server import started

KV_FLAG = "--max-total-tokens"
# The same for all, so that none pays for what another does not do.
COMMON_FLAGS = ("--enable-metrics", "--incremental-streaming-output")
_CONTROL_TIMEOUT_S = 660.0  # a large corpus takes a while
_WIDTH = "sglang_ext:verify_width"

# A server on a CPU, besides weights and KV pool: about what its processes' imports take.
_PROCESS_BYTES = 2.6e9
# Prepacked for oneDNN they are there twice while they load.
_WEIGHT_COPIES = 2.0
_MEMORY_SHARE = 0.9
_KV_STEP = 4096
_FEWEST_KV_TOKENS, _MOST_KV_TOKENS = 16_384, 131_072


@dataclass(frozen=True)
class Room:
    """How servers find room.

    Attributes:
        together: whether all run at once.
        kv_tokens: of each one's KV pool; None: its own default.
    """

    together: bool
    kv_tokens: int | None


def plan_room(
    servers: int, needed: int, longest: int, weights: float, kv_bytes: float, available: float
) -> Room:
    """Room for servers on a CPU: all at once with a smaller KV pool, before one by one.

    Args:
        servers: how many there are to start.
        needed: tokens of the largest batch; with fewer its requests queue, for all methods alike.
        longest: tokens of the longest request, output included.
        weights, kv_bytes, available: bytes of the model, of a token's K and V, of free memory.
    """
    least = _rounded_up(2 * longest)
    fewest = max(least, min(_FEWEST_KV_TOKENS, _rounded_up(needed)))
    wanted = min(max(fewest, _rounded_up(needed)), max(fewest, _MOST_KV_TOKENS))
    fixed = _PROCESS_BYTES + _WEIGHT_COPIES * weights

    def affordable(count: int) -> int:
        each = _MEMORY_SHARE * available / count - fixed
        return int(each / kv_bytes) // _KV_STEP * _KV_STEP

    if affordable(servers) >= fewest:
        return Room(True, min(wanted, affordable(servers)))
    return Room(servers == 1, max(fewest, min(wanted, affordable(1))))


def _rounded_up(tokens: int) -> int:
    return -(-tokens // _KV_STEP) * _KV_STEP


def find_room(model_path: str, servers: int, needed: int, longest: int) -> Room:
    """Room for servers of a model on this machine; see `plan_room`. On a GPU it is for one."""
    from sglang_ext.cpu.defaults import kv_bytes_per_token
    from sglang_ext.cpu.install import wants_cpu_engine

    if not wants_cpu_engine():
        # SGLang takes most of a GPU's memory for the KV pool, and shares none.
        return Room(servers == 1, None)
    folder = Path(model_path)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kv_bytes = kv_bytes_per_token(config)
    except (OSError, ValueError, KeyError, TypeError):
        return Room(servers == 1, None)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    available = psutil.virtual_memory().available
    return plan_room(servers, needed, longest, weights, kv_bytes, available)


class ControlError(Exception):
    """A server refused what was asked of it; the message holds its answer."""


class RunningServer:
    """A server that answers.

    Attributes:
        url: its address.
        flags: it was started with; empty where it was not started here.
        width: s_q where it is always the same: 1 for plain decoding; None: its metrics tell.
    """

    def __init__(self, url: str, flags: Sequence[str], process: ServerProcess | None = None):
        self.url = url
        self.flags = tuple(flags)
        self.width: float | None = None
        self._process = process
        # No connection is kept: servers close idle ones, perhaps just as they are used again.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(limits=limits, follow_redirects=True, timeout=_CONTROL_TIMEOUT_S)

    @property
    def is_own(self) -> bool:
        """Whether it was started here, below this process."""
        return self._process is not None

    def answers(self) -> bool:
        """Whether it is there."""
        return (self._process is None or self._process.is_running()) and is_ready(self.url)

    def last_words(self) -> str:
        """The last lines that it printed; "" where it was not started here."""
        return "" if self._process is None else self._process.tail()

    def cpu_seconds(self) -> float | None:
        """CPU time that its processes have used so far."""
        if self._process is not None:
            with contextlib.suppress(psutil.Error):
                return self._process.cpu_seconds()
        return None

    def memory_mb(self) -> float | None:
        """Memory of its processes in MiB, what they share counted once (PSS)."""
        if self._process is not None:
            with contextlib.suppress(psutil.Error):
                return self._process.memory_bytes() / (1 << 20)
        return None

    def widths(self) -> tuple[float, float]:
        """Sum of s_q over its steps, and their number, since it started; 0, 0: no such metric."""
        found = {f"{_WIDTH}_sum": 0.0, f"{_WIDTH}_count": 0.0}
        with contextlib.suppress(ControlError):  # one without --enable-metrics
            for family in text_string_to_metric_families(self.call("GET", "/metrics").text):
                for sample in family.samples:
                    if sample.name in found:
                        found[sample.name] += sample.value
        return found[f"{_WIDTH}_sum"], found[f"{_WIDTH}_count"]

    def info(self) -> dict[str, Any]:
        """Its configuration."""
        return self.call("GET", "/server_info").json()

    def flush_cache(self) -> None:
        """Empty the radix cache, and SGLang's NGRAM trie."""
        self.call("POST", "/flush_cache?timeout=60")

    def add_corpus(self, name: str, texts: Sequence[str]) -> None:
        """Load a corpus, in the place of one of the same name."""
        with contextlib.suppress(ControlError):
            self.remove_corpus(name)
        self.call("POST", "/add_external_corpus", corpus_id=name, documents=list(texts))

    def remove_corpus(self, name: str) -> None:
        self.call("POST", "/remove_external_corpus", corpus_id=name)

    def delete_namespace(self, name: str) -> None:
        """Forget what was served in a namespace of ours, all that is on its way there included."""
        self.call("POST", "/datastore/flush")
        self.call("DELETE", f"/datastore/namespaces/{name}")

    def call(self, method: str, path: str, **body: Any) -> httpx.Response:
        """An HTTP request.

        Raises:
            ControlError: it was refused.
            httpx.HTTPError: the server is gone.
        """
        response = self._http.request(method, self.url + path, json=body or None)
        if not response.is_success:
            text = " ".join(response.text.split())[:300]
            raise ControlError(f"{method} {path}: HTTP {response.status_code}: {text}")
        return response


class Servers:
    """A sweep's servers by key. They are stopped when the block ends.

    Args:
        flags: of `sglang-ext serve` by key, see methods.SERVERS.
        extra_flags: further ones for all.
        urls: those that run already.
        say: shows a line.
        logs: folder that keeps what the servers print, in server-KEY.log.

    Attributes:
        together: whether all may run at once; else one is stopped before another starts.
    """

    def __init__(
        self,
        model: str,
        flags: Mapping[str, Sequence[str]],
        extra_flags: Sequence[str] = (),
        urls: Mapping[str, str] | None = None,
        say: Callable[[str], None] | None = None,
        logs: Path | None = None,
    ):
        self.together = True
        self._logs = logs
        self._model = model
        self._flags = flags
        self._extra = tuple(extra_flags)
        self._urls = dict(urls or {})
        self._say = say or (lambda line: print(line, file=sys.stderr, flush=True))
        self._kv_tokens: int | None = None
        self._running: dict[str, tuple[RunningServer, contextlib.ExitStack]] = {}

    def prepare(self, keys: Iterable[str], model_path: str, needed: int, longest: int) -> None:
        """Find room for these servers; see `plan_room`."""
        to_start = [key for key in keys if key not in self._urls]
        if not to_start:
            return
        room = find_room(model_path, len(to_start), needed, longest)
        self.together, self._kv_tokens = room.together, room.kv_tokens
        if not room.together:
            self._say(
                f"{', '.join(to_start)} do not fit into memory together: one server at a time, "
                "so methods of different servers do not take turns within a repeat"
            )

    def get(self, key: str) -> RunningServer:
        """The server of a key, started if it does not run.

        Raises:
            ServerError: it did not start, or the one at the URL given is not usable.
        """
        if key in self._running:
            return self._running[key][0]
        if not self.together and key not in self._urls:
            self.stop_started()
        with contextlib.ExitStack() as stack:
            server = self._given(key) if key in self._urls else self._started(key, stack)
            self._running[key] = (server, stack.pop_all())
        return server

    def is_started_here(self, key: str) -> bool:
        """Whether it can be started again."""
        return key not in self._urls

    def stop(self, key: str) -> None:
        """End a server; one that was not started here is only let go."""
        if key in self._running:
            self._running.pop(key)[1].close()

    def stop_started(self) -> None:
        """End all that were started here."""
        for key in [key for key in self._running if self.is_started_here(key)]:
            self.stop(key)

    def describe(self) -> dict[str, Any]:
        """The servers that run, for environment.json."""
        return {
            key: {"url": self._urls.get(key), "flags": list(server.flags)}
            for key, (server, _) in self._running.items()
        }

    def _started(self, key: str, stack: contextlib.ExitStack) -> RunningServer:
        flags = [*self._flags[key], *COMMON_FLAGS]
        if self._kv_tokens is not None and flag_value(self._extra, KV_FLAG) is None:
            flags += [KV_FLAG, str(self._kv_tokens)]
        flags += self._extra
        self._say(f"server {key!r}: {' '.join(flags)}")
        log_file = None if self._logs is None else self._logs / f"server-{key}.log"
        process = stack.enter_context(started(self._model, flags, log_file))
        # One after the other: each measures at its start what forward passes cost.
        server = RunningServer(process.wait().url, flags, process)
        return self._checked(key, server)

    def _given(self, key: str) -> RunningServer:
        server = RunningServer(self._urls[key].rstrip("/"), ())
        if not server.answers():
            raise ServerError(f"--url {key}={self._urls[key]}: no SGLang server answers there")
        return self._checked(key, server)

    def _checked(self, key: str, server: RunningServer) -> RunningServer:
        """Raises ServerError where it does not decode as the key says."""
        expected = flag_value(self._flags[key], "--speculative-algorithm")
        try:
            info = server.info()
        except (httpx.HTTPError, ControlError) as error:
            raise ServerError(f"the server {key!r} at {server.url}: {error}") from None
        found = info.get("speculative_algorithm")
        if found != expected:
            raise ServerError(
                f"the server {key!r} at {server.url} has --speculative-algorithm "
                f"{found or 'none'}, expected {expected or 'none'}"
            )
        if found is None:
            server.width = 1.0
        elif found == "NGRAM":
            server.width = info.get("speculative_num_draft_tokens")
        return server

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._running):
            self.stop(key)
