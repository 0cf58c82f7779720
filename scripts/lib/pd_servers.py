"""`sglang-ext pd` for checks and tests: start, wait, find its servers, ask one pair of them."""

import random
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from scripts.lib.http_client import HTTP
from scripts.lib.server import KV_POOL
from sglang_ext.servers.processes import free_port
from sglang_ext.servers.server_process import ServerProcess

# It has servers of its own to stop.
_GRACE_S = 90
_READY = re.compile(r"^sglang-ext pd: (.+) is ready: (\S+) \(process (\d+)\)$", re.MULTILINE)


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode server that a request is sent to without the router."""

    prefill_url: str
    bootstrap_port: int
    decode_url: str

    def generate(self, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """What the decode server answers to /generate; the prefill server gets the same request.

        Raises:
            httpx.HTTPError: one of them refused it or is gone.
        """
        room = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": random.getrandbits(62),
        }
        with ThreadPoolExecutor(2) as pool:
            prefill, decode = (
                pool.submit(HTTP.post, url + "/generate", json={**body, **room}, timeout=timeout_s)
                for url in (self.prefill_url, self.decode_url)
            )
            for answer in (prefill.result(), decode.result()):
                answer.raise_for_status()
        return decode.result().json()


class Disaggregated:
    """One `sglang-ext pd` process on the loopback interface.

    Args:
        model: path, hub id or a name of `sglang-ext models list`.
        args: further flags.
        name: what to call it in messages.
        env: further environment variables.
    """

    def __init__(
        self,
        model: str,
        args: Sequence[str] = (),
        *,
        name: str = "pd",
        env: Mapping[str, str] | None = None,
    ):
        port = free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        self.folder = Path(tempfile.mkdtemp(prefix=f"sglang-{name}-"))
        command = [
            sys.executable, "-m", "sglang_ext.cli", "pd", "--model", model, "--port", str(port),
            "--log-dir", str(self.folder), *KV_POOL, *args,
        ]  # fmt: skip
        self._process = ServerProcess(
            name, command, self.base_url, self.folder / "pd.log", env=env, grace_s=_GRACE_S,
            ready=lambda: "sglang-ext pd: ready:" in self.output(),
        )  # fmt: skip

    def __enter__(self) -> "Disaggregated":
        self._process.start().wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def output(self) -> str:
        """What the command itself has printed."""
        return self._process.output()

    def server_log(self, member: str) -> str:
        """What one of its servers ("decode 1") has printed."""
        path = self.folder / f"{member.replace(' ', '-')}.log"
        return path.read_text(errors="replace")

    def stop(self) -> None:
        """End all of it."""
        self._process.stop()

    @property
    def urls(self) -> dict[str, str]:
        """Addresses by name: "prefill 1", "decode 1", "router"."""
        return {name: url for name, url, _ in _READY.findall(self.output())}

    def pid(self, member: str) -> int:
        """The process of a server when it was last ready."""
        return {name: int(pid) for name, _, pid in _READY.findall(self.output())}[member]

    def pair(self, decode: int = 1) -> Pair:
        """The first prefill server with one of the decode servers."""
        command = psutil.Process(self.pid("prefill 1")).cmdline()
        bootstrap = int(command[command.index("--disaggregation-bootstrap-port") + 1])
        return Pair(self.urls["prefill 1"], bootstrap, self.urls[f"decode {decode}"])

    def kill(self, member: str) -> None:
        """kill -9 of a server and all that it started; the command starts it again."""
        process = psutil.Process(self.pid(member))
        for victim in [process, *process.children(recursive=True)]:
            victim.kill()

    def ready_count(self, member: str) -> int:
        """How often a server was reported ready."""
        return sum(name == member for name, *_ in _READY.findall(self.output()))

    def wait_until_ready_again(self, member: str, times: int) -> None:
        """Returns when it was reported ready more than `times` times.

        Raises:
            ServerError: that takes too long, or the command ended.
        """
        self._process.wait_for(member, lambda: self.ready_count(member) > times)
