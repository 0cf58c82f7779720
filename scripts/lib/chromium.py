"""A headless Chromium with a microphone that plays a file, driven over its debugging protocol."""

import contextlib
import json
import shutil
import tempfile
import time
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from websockets.sync.client import ClientConnection, connect

from scripts.lib.http_client import HTTP
from sglang_ext.servers import processes

NAMES = ("chromium", "chromium-browser", "google-chrome")
_START_S = 60.0
_POLL_S = 0.1


class Page:
    """One page.

    Args:
        socket: of its debugging target.
    """

    def __init__(self, socket: ClientConnection):
        self._socket = socket
        self._last = 0
        self.events: list[dict[str, Any]] = []
        """What it told: requests, and what its console said."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command's result.

        Raises:
            RuntimeError: the browser refuses it.
        """
        self._last += 1
        self._socket.send(json.dumps({"id": self._last, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=_START_S))
            if message.get("id") == self._last:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self.events.append(message)

    def run(self, script: str) -> Any:
        """The value of an expression in the page.

        Raises:
            RuntimeError: it throws.
        """
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True,
            userGesture=True,
        )  # fmt: skip
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, script: str, seconds: float) -> None:
        """Until an expression is true.

        Raises:
            TimeoutError: it is not, after so long.
        """
        deadline = time.monotonic() + seconds
        while not self.run(script):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true in {seconds:g} s: {script}")
            time.sleep(_POLL_S)

    def hosts(self) -> set[str]:
        """All that it sent requests to."""
        urls = [
            event["params"].get("request", event["params"]).get("url", "")
            for event in self.events
            if event.get("method") in ("Network.requestWillBeSent", "Network.webSocketCreated")
        ]
        return {url.split("/")[2] for url in urls if url.startswith(("http", "ws"))}


def find_chromium() -> str | None:
    """The browser's program; None: it is not installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextlib.contextmanager
def opened(url: str, samples: np.ndarray, rate: int) -> Iterator[Page]:
    """A page, in a browser that ends with it.

    Args:
        samples: float32[n] that the microphone plays once.

    Raises:
        FileNotFoundError: there is no Chromium.
    """
    if (program := find_chromium()) is None:
        raise FileNotFoundError("no Chromium: install the package chromium (Debian)")
    with tempfile.TemporaryDirectory(prefix="chromium-") as folder:
        microphone = Path(folder) / "microphone.wav"
        _write(microphone, samples, rate)
        port = processes.free_port()
        command = [
            program, "--headless=new", "--no-sandbox", "--no-first-run", "--disable-gpu",
            "--window-size=1000,1000",
            f"--remote-debugging-port={port}", f"--user-data-dir={folder}/profile",
            "--remote-allow-origins=*", "--use-fake-ui-for-media-stream",
            "--use-fake-device-for-media-stream", "--autoplay-policy=no-user-gesture-required",
            f"--use-file-for-fake-audio-capture={microphone}%noloop", "about:blank",
        ]  # fmt: skip
        with (Path(folder) / "log").open("wb") as log:
            browser = processes.start(command, stdout=log, stderr=log)
            try:
                with connect(_target(port), max_size=None) as socket:
                    page = Page(socket)
                    page.call("Page.navigate", url=url)
                    page.wait("document.readyState === 'complete'", _START_S)
                    yield page
            finally:
                processes.stop_group(browser)


def _target(port: int) -> str:
    """Where the first page is driven from, once the browser is there."""
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(Exception):  # not there yet
            targets = HTTP.get(f"http://127.0.0.1:{port}/json/list", timeout=5).json()
            for target in targets:
                if target["type"] == "page":
                    return target["webSocketDebuggerUrl"]
        if time.monotonic() > deadline:
            raise TimeoutError(f"Chromium did not start in {_START_S:g} s")
        time.sleep(_POLL_S)


def _write(path: Path, samples: np.ndarray, rate: int) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
