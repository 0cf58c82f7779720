"""A real SGLang server of a speech model."""

from collections.abc import Iterator

import pytest

from tests.server.servers import Server

WHISPER = "whisper-base"
MAX_UPLOAD_MB = 24
JFK = "ask not what your country can do for you, ask what you can do for your country."
"""The end of what is said in jfk.flac."""


@pytest.fixture(scope="package")
def whisper_server() -> Iterator[Server]:
    """Whisper base on plain SGLang."""
    flags = ["--transcription-max-upload-mb", str(MAX_UPLOAD_MB)]
    # Else /v1/loads tells of every 15th step of decoding only: of a short transcript, of none.
    flags += ["--load-snapshot-publish-interval", "1"]
    with Server(WHISPER, flags, name="whisper") as server:
        yield server
