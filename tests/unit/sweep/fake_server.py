"""An HTTP server with as much of SGLang's surface as a sweep uses, and servers made of it."""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sglang_ext.servers.flags import flag_value
from sglang_ext.sweep.servers import RunningServer, Servers


class FakeServer(ThreadingHTTPServer):
    """Answers a prompt that begins with p with the tokens 100 p, 100 p + 1, ...; of audio, p is 7.

    Attributes:
        calls: (path, body) of every request but /health, in order.
        steps: tokens of each chunk of a stream, in turn.
        refuse: gives the HTTP status of a /generate request, or None to answer it.
        fate: gives "error", "abort", "break" (the stream ends early), "die" (so does the server),
            or None, for a /generate request.
        most_at_once: how many requests were under way together, at most.
    """

    daemon_threads = True

    def __init__(self, algorithm: str | None = None, incremental: bool = True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.algorithm = algorithm
        self.incremental = incremental
        self.calls: list[tuple[str, Any]] = []
        self.steps = (1, 2)
        self.refuse: Callable[[Any], int | None] = lambda body: None
        self.fate: Callable[[Any], str | None] = lambda body: None
        self.most_at_once = 0
        self.pause_s = 0.0
        self.dead = False
        self.corpora: dict[str, list[str]] = {}
        self.width_sum = self.width_count = 0
        self._under_way = 0
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def die(self) -> None:
        """Nothing is answered any more."""
        if not self.dead:
            self.dead = True
            self.shutdown()
            self.server_close()

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def generated(self) -> list[Any]:
        """The bodies of the /generate requests."""
        return [body for path, body in self.calls if path == "/generate"]

    @contextlib.contextmanager
    def under_way(self):
        with self.lock:
            self._under_way += 1
            self.most_at_once = max(self.most_at_once, self._under_way)
        try:
            yield
        finally:
            with self.lock:
                self._under_way -= 1


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FakeServer

    def do_GET(self):
        if self.server.dead:
            self.close_connection = True
            return
        if self.path == "/health":
            return self.answer(200, {})
        self.server.calls.append((self.path, None))
        if self.path == "/server_info":
            return self.answer(
                200,
                {
                    "speculative_algorithm": self.server.algorithm,
                    "speculative_num_draft_tokens": 12,
                },
            )
        if self.path == "/metrics" and self.server.algorithm == "SSSD":
            text = "".join(
                f'sglang_ext:verify_width_{name}{{model_name="m, \\"x\\"}} 7"}} {value}\n'
                for name, value in (
                    ("sum", float(self.server.width_sum)),
                    ("count", float(self.server.width_count)),
                )
            )
            return self.answer(200, text)
        return self.answer(404, {"error": self.path})

    def do_DELETE(self):
        self.server.calls.append((self.path, None))
        self.answer(200, {"deleted_tokens": 1})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.server.dead:
            self.close_connection = True
            return None
        content = json.loads(body) if body else None
        path = self.path.partition("?")[0]
        self.server.calls.append((path, content))
        if path == "/generate":
            return self.generate(content)
        if path == "/add_external_corpus":
            if content["corpus_id"] in self.server.corpora:
                return self.answer(400, {"success": False, "message": "exists already"})
            self.server.corpora[content["corpus_id"]] = content["documents"]
        if path == "/remove_external_corpus":
            known = self.server.corpora.pop(content["corpus_id"], None) is not None
            return self.answer(200 if known else 400, {"success": known})
        return self.answer(200, {"success": True})

    def generate(self, body):
        status = self.server.refuse(body)
        if status is not None:
            return self.answer(status, {"error": {"message": "provoked"}})
        with self.server.under_way():
            self.stream(body, self.server.fate(body))

    def stream(self, body, fate):
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        prompt = body["input_ids"] if "audio_data" not in body else [7]
        first, count = prompt[0], body["sampling_params"]["max_new_tokens"]
        output = [100 * first + i for i in range(count)]
        done, verify = 0, 0
        while done < count:
            step = self.server.steps[verify % len(self.server.steps)]
            end = min(count, done + step)
            verify += 1
            self.server.width_sum += 4
            self.server.width_count += 1
            meta = {
                "id": "r", "prompt_tokens": len(prompt), "completion_tokens": end,
                "finish_reason": {"type": "length"} if end == count else None,
            }  # fmt: skip
            if self.server.algorithm:
                meta["spec_verify_ct"] = verify
            if fate == "abort" and end == count:
                meta["finish_reason"] = {"type": "abort", "message": "no room"}
            ids = output[done:end] if self.server.incremental else output[:end]
            self.event({"text": "t", "output_ids": ids, "meta_info": meta})
            done = end
            if fate == "error":
                self.event({"error": {"message": "provoked", "code": 400}})
                break
            if fate in ("die", "break"):
                if fate == "die":
                    self.server.die()
                self.close_connection = True
                return
            time.sleep(self.server.pause_s)
        self.chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, content):
        self.chunk(b"data: " + json.dumps(content).encode() + b"\n\n")

    def chunk(self, content):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))

    def answer(self, status, content):
        body = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class FakeServers(Servers):
    """Starts FakeServers in the place of SGLang's.

    Attributes:
        started: (key, server) in the order of their starts.
        set_up: called with each.
    """

    def __init__(self, flags, together=True, set_up=lambda key, server, nth: None):
        self.said: list[str] = []
        super().__init__("model", flags, say=self.said.append)
        self.together = together
        self.started: list[tuple[str, FakeServer]] = []
        self.set_up = set_up

    def prepare(self, keys, model_path, needed, longest):
        self.prepared = list(keys), needed, longest

    def _started(self, key, stack):
        fake = FakeServer(flag_value(self._flags[key], "--speculative-algorithm"))
        self.set_up(key, fake, sum(k == key for k, _ in self.started))
        self.started.append((key, fake))
        stack.callback(fake.die)
        return self._checked(key, RunningServer(fake.url, self._flags[key]))

    def server(self, key):
        """The last one of a key."""
        return [server for k, server in self.started if k == key][-1]
