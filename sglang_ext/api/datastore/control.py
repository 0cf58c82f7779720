"""The scheduler's end of the control socket: threads that work on the datastore.

Nothing here runs in the scheduler's own thread, and whatever a client sends costs it an error
reply at most.
"""

import dataclasses
import json
import logging
import os
import socketserver
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from datastores import Datastore, DatastoreError, DatastoreInUse, DeletionPending
from sglang_ext.api.datastore import protocol
from sglang_ext.drafters import Drafter
from sglang_ext.drafters.named_corpora import Corpora
from sglang_ext.request_options import RequestOptionError, check_namespace

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 8
# A client that stays silent for so long is hung up on.
IDLE_S = 10.0
_LONGEST_FLUSH_S = 300.0


class ControlError(ValueError):
    """A request that cannot be served; `status` is the HTTP status to answer with."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


class Operations:
    """What can be asked of a datastore, and of all drafters that keep corpora or outputs.

    Args:
        drafters: all of the server's; each is told of deletions.
    """

    def __init__(self, datastore: Datastore, drafters: Collection[Drafter]):
        self._datastore = datastore
        self._corpora = Corpora(drafters)
        self._drafters = drafters
        self._operations: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "info": self._info,
            "namespaces": lambda _: self._datastore.namespaces(),
            "flush": self._flush,
            "delete_namespace": self._delete_namespace,
            "delete_request": self._delete_request,
            "corpora": self._list_corpora,
            "add_corpus": self._add_corpus,
            "remove_corpus": self._remove_corpus,
        }

    def __call__(self, request: Any) -> Any:
        """Do what a request asks for.

        Raises:
            ControlError: it asks for something that is not there.
            DatastoreError: the datastore refuses.
        """
        if not isinstance(request, dict) or request.get("op") not in self._operations:
            known = ", ".join(self._operations)
            raise ControlError(f"expected a JSON object with op one of {known}")
        return self._operations[request["op"]](request)

    def _info(self, _request: Mapping[str, Any]) -> dict[str, Any]:
        return dataclasses.asdict(self._datastore.info())

    def _flush(self, request: Mapping[str, Any]) -> dict[str, Any]:
        seconds = request.get("timeout", 30.0)
        if not isinstance(seconds, int | float) or not 0 < seconds <= _LONGEST_FLUSH_S:
            raise ControlError(
                f"timeout must be a number of seconds up to {_LONGEST_FLUSH_S:.0f}, got {seconds!r}"
            )
        try:
            self._datastore.flush(seconds)
        except TimeoutError as error:
            raise ControlError(f"not all is searchable after {seconds} s: {error}", 504) from None
        return {"tokens": self._datastore.num_tokens}

    def _delete_namespace(self, request: Mapping[str, Any]) -> dict[str, int]:
        namespace = check_namespace(request.get("namespace"), "namespace")
        self._forget_in_drafters(namespace, None)
        return {"tokens": self._datastore.delete_namespace(namespace)}

    def _delete_request(self, request: Mapping[str, Any]) -> dict[str, int]:
        name, namespace = request.get("rid"), request.get("namespace")
        if not isinstance(name, str) or not name:
            raise ControlError("rid must be the id that the response carried")
        if namespace is not None:
            check_namespace(namespace, "namespace")
        self._forget_in_drafters(namespace, name)
        return {"tokens": self._datastore.delete_document(name, namespace)}

    def _forget_in_drafters(self, namespace: str | None, name: str | None) -> None:
        """First: a request that ends meanwhile asks its drafter, then feeds the datastore."""
        for drafter in self._drafters:
            drafter.forget(namespace, name)

    def _add_corpus(self, request: Mapping[str, Any]) -> dict[str, int]:
        """Documents from a file that the HTTP process wrote: tokens and their ends (.npz)."""
        path = Path(str(request.get("file")))
        if path.parent != protocol.folder():
            raise ControlError("file must be in the control socket's folder")
        with np.load(path) as file:
            documents: list[Any] = np.split(file["tokens"], file["ends"][:-1])
        namespace = request.get("namespace")
        if namespace is not None:
            check_namespace(namespace, "namespace")
        return {"tokens": self._corpora.add(str(request.get("corpus")), documents, namespace)}

    def _list_corpora(self, _request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Each corpus of the datastore: its namespace (null: everybody's) and name."""
        names = self._datastore.corpus_names()
        return [{"namespace": namespace, "name": name} for namespace, name in names]

    def _remove_corpus(self, request: Mapping[str, Any]) -> dict[str, int]:
        name = str(request.get("corpus"))
        tokens = self._corpora.tokens_by_name().get(name, 0)
        self._corpora.remove(name)
        return {"tokens": tokens}


class ControlServer(socketserver.ThreadingUnixStreamServer):
    """Answers requests on a Unix socket, a few connections at a time, until the process ends."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, path: Path, operations: Callable[[Any], Any]):
        self.operations = operations
        self.free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        path.unlink(missing_ok=True)
        mask = os.umask(0o177)
        try:
            super().__init__(str(path), _Handler)
        finally:
            os.umask(mask)

    def start(self) -> "ControlServer":
        """Serve in a thread of its own."""
        threading.Thread(target=self.serve_forever, name="sglang-ext-control", daemon=True).start()
        return self

    def server_close(self) -> None:
        super().server_close()
        Path(str(self.server_address)).unlink(missing_ok=True)

    def process_request(self, request: Any, client_address: Any) -> None:
        # One too many waits here and with it all that come later: the client's timeout tells it.
        self.free.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.warning("a control connection failed", exc_info=True)


class _Handler(socketserver.StreamRequestHandler):
    timeout = IDLE_S
    server: ControlServer

    def handle(self) -> None:
        try:
            for line in self._lines():
                self.wfile.write(json.dumps(reply(self.server.operations, line)).encode() + b"\n")
        except (TimeoutError, ConnectionError):
            return

    def _lines(self) -> Iterator[bytes]:
        while line := self.rfile.readline(protocol.MAX_LINE + 1):
            yield line
            if len(line) > protocol.MAX_LINE:
                return


def reply(operations: Callable[[Any], Any], line: bytes) -> dict[str, Any]:
    """The reply to one request line, whatever it holds."""
    try:
        if len(line) > protocol.MAX_LINE:
            raise ControlError(f"a request is longer than {protocol.MAX_LINE} bytes", 413)
        return {"ok": True, "result": operations(json.loads(line))}
    except ControlError as error:
        return {"ok": False, "error": str(error), "status": error.status}
    except DeletionPending as error:
        return {"ok": False, "error": str(error), "status": 503}
    except DatastoreInUse as error:  # another server's business, of those that share the folder
        return {"ok": False, "error": str(error), "status": 409}
    except (DatastoreError, RequestOptionError) as error:
        return {"ok": False, "error": str(error), "status": 400}
    except ValueError as error:
        return {"ok": False, "error": f"expected one JSON object a line: {error}", "status": 400}
    except Exception as error:
        logger.exception("a control request failed")
        return {"ok": False, "error": f"{type(error).__name__}: {error}", "status": 500}


def serve(drafters: Collection[Drafter], rank: int = 0) -> ControlServer | None:
    """Serve the datastore of the first drafter that has one, and the corpora of all.

    None where no drafter has a datastore.

    Args:
        rank: of data parallelism; all share one datastore (shared_ranks.py).
    """
    for drafter in drafters:
        if drafter.datastore is not None:
            protocol.make_folder()
            operations = Operations(drafter.datastore, drafters)
            return ControlServer(protocol.socket_path(rank), operations).start()
    return None
