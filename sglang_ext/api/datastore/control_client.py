"""The HTTP process's end of the control socket."""

import json
import socket
from pathlib import Path
from typing import Any

from sglang_ext.api.datastore import protocol
from sglang_ext.api.datastore.control import ControlError

TIMEOUT_S = 60.0
_LEFT_TO_ANOTHER = 409


def call_all(op: str, timeout_s: float = TIMEOUT_S, **arguments: Any) -> list[Any]:
    """The results of an operation from the datastores of the data-parallel ranks.

    One by one. A rank that leaves it to another one, which folds for all, is left out.

    Raises:
        ControlError: there is no datastore, it does not answer, or it refuses.
    """
    paths = sorted(protocol.folder().glob("scheduler-*.sock"))
    if not paths:
        raise ControlError("this server has no datastore; start it with --drafter sssd", 404)
    results: list[Any] = []
    refused: ControlError | None = None
    for path in paths:
        try:
            results.append(call(path, op, timeout_s, **arguments))
        except ControlError as error:
            if error.status != _LEFT_TO_ANOTHER:
                raise
            refused = error
    if refused is not None and not results:
        raise refused
    return results


def call(path: Path, op: str, timeout_s: float = TIMEOUT_S, **arguments: Any) -> Any:
    """The result of one operation.

    Raises:
        ControlError: as in call_all.
    """
    request = json.dumps({"op": op} | arguments).encode() + b"\n"
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(request)
            with connection.makefile("rb") as replies:
                line = replies.readline()
    except TimeoutError:
        raise ControlError(f"the datastore did not answer {op} in {timeout_s:.0f} s", 504) from None
    except OSError as error:
        raise ControlError(f"the datastore cannot be reached: {error}", 503) from None
    if not line:
        raise ControlError("the datastore hung up", 503)
    reply = json.loads(line)
    if not reply["ok"]:
        raise ControlError(reply["error"], reply["status"])
    return reply["result"]
