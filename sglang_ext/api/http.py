"""Errors as OpenAI's API gives them."""

from typing import Any


def error_body(
    message: str, status: int, param: str | None = None, code: str | int | None = None
) -> dict[str, Any]:
    """OpenAI's error object.

    Args:
        status: HTTP status.
        param: the field at fault.
        code: OpenAI's code for it, or one like them.
    """
    kind = "invalid_request_error" if status < 500 else "server_error"
    # Lone surrogates, which a client may send, are in no encoding.
    message = message.encode(errors="replace").decode()
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
