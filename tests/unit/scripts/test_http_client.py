"""The HTTP client of checks and benchmarks."""

import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from scripts.lib.http_client import HTTP, lines

EVENTS = 'data: {"text": "a\u2028b\x85c"}\n\ndata: [DONE]\nlast'.encode()


@pytest.mark.parametrize("size", [1, 3, len(EVENTS)])
def test_lines_end_at_line_feeds_alone_however_they_come(size):
    parts = [EVENTS[i : i + size] for i in range(0, len(EVENTS), size)]
    found = list(lines(httpx.Response(200, content=iter(parts))))
    assert found == ['data: {"text": "a\u2028b\x85c"}'.encode(), b"", b"data: [DONE]", b"last"]


def test_each_of_many_requests_at_once_has_a_connection_of_its_own():
    connections, all_there = [], threading.Barrier(120, timeout=60)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            connections.append(self.client_address)
            super().setup()

        def do_GET(self) -> None:
            all_there.wait()
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 240

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    with ThreadPoolExecutor(120) as pool:
        answers = list(pool.map(lambda _: HTTP.get(url).status_code, range(240)))
    server.shutdown()
    server.server_close()
    assert answers == [200] * 240 and len(connections) == 240
