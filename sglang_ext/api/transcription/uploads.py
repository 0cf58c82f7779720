"""Multipart forms with files, read within a size limit."""

import asyncio
from typing import Any

from fastapi import Request
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException

from sglang_ext.api.http import ApiError

# Fields and part headers beside the file.
_FORM_BYTES = 2 << 20
# A client that is still sending reads no answer, so a refused upload is taken in and thrown away.
_DRAIN_S = 30.0


async def read_form(request: Request, max_bytes: int) -> FormData:
    """The fields of a multipart form; files lie in unnamed temporary files, close the form.

    Args:
        max_bytes: of the file.

    Raises:
        ApiError: it is no multipart form, damaged, or too large (413).
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError("the body must be multipart/form-data with the audio in the field 'file'")
    limit = max_bytes + _FORM_BYTES
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        if "100-continue" not in request.headers.get("expect", "").lower():
            await _drain(request)
        raise _too_large(max_bytes)
    received = 0

    async def receive() -> Any:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > limit:
            await _drain(request)
            raise _too_large(max_bytes)
        return message

    try:
        return await Request(request.scope, receive).form(max_files=8, max_fields=100)
    except (HTTPException, MultiPartException, UnicodeError) as error:  # the last: of a charset
        detail = getattr(error, "detail", None) or getattr(error, "message", error)
        raise ApiError(f"the multipart form cannot be read: {detail}") from None


async def _drain(request: Request) -> None:
    """Take in the rest of the body without keeping it, for so long at most."""
    try:
        async with asyncio.timeout(_DRAIN_S):
            while True:
                message = await request.receive()
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
    except TimeoutError:
        return


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        f"the file is larger than the {max_bytes / (1 << 20):g} MiB that this server accepts "
        "(--transcription-max-upload-mb)",
        413,
        "file",
        "file_too_large",
    )
