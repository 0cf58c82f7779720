"""Live speech and its translation, by a real Whisper server and a real text server."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import jiwer
import pytest
from whisper.normalizers import EnglishTextNormalizer

from scripts.lib.live_translations import TranslatedRun, session_differences, translated
from scripts.speech_data import Clip, joined, read_audio
from sglang_ext.sweep.data_files import CARRIED
from tests.eventually import eventually
from tests.server.servers import Server

SETTINGS = {"source_language": "en", "target_language": "fr", "append_only": True}
SESSION = {
    "audio": {"input": {"transcription": {}}, "output": {"language": "fr"}},
    "sglang_ext": {"step_ms": 500},
}

normalized = EnglishTextNormalizer()


@dataclass
class Pair:
    """Both servers."""

    whisper: Server
    text: Server


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Whisper tiny.en, translated by SmolLM2 (whose French is poor, and its own each time)."""
    flags = ["--speculative-algorithm", "SSSD", "--drafters", "ssbd"]
    with (
        Server("smollm2-135m-instruct", flags, name="text") as text,
        Server(
            "whisper-tiny.en", ["--translate-with", text.base_url], name="translated"
        ) as whisper,
    ):
        yield Pair(whisper, text)


# One long sentence: of short ones, all may be heard before anything is translated.
SAID = (
    "printing, in the only sense with which we are at present concerned, differs from most if not "
    "from all the arts and crafts represented in the exhibition"
)


@pytest.fixture(scope="module")
def clip() -> Clip:
    return joined([read_audio(CARRIED / "LJ001-0001.flac")], 24_000, 1.0)[0]


def right(source: str) -> bool:
    """Whether a transcript is what was said."""
    return jiwer.wer(normalized(SAID), normalized(source)) < 0.2


def test_translations_are_those_of_sessions_and_nothing_is_taken_back(pair, clip):
    async def run():
        url, whole = pair.whisper.base_url, {"step_ms": 500, "finished_only": True}
        # However busy the machine is, what is said is translated before its end.
        live = translated(url, "none", clip, SESSION, waits_at_s=clip.seconds / 2)
        return await asyncio.gather(
            live, translated(url, "none", clip, SESSION | {"sglang_ext": whole})
        )

    live, finished = asyncio.run(run())
    for made in (live, finished):
        assert not made.errors and made.code == 1000
        assert right(made.source), made.source
        assert made.text.strip() and made.erasure.words == len(made.text.split())
        different = session_differences(pair.text.base_url, "none", made, SETTINGS)
        assert not different, "\n".join([*different, f"of {made.sources}"])
    assert finished.erasure.erased == 0
    assert any(len(sources) > 1 for sources in live.sources.values())
    assert all(len(sources) == 1 for sources in finished.sources.values())


def test_transcription_outlives_its_text_server(pair, clip):
    """The last test: the text server ends with it."""

    async def run():
        made = TranslatedRun()
        playing = asyncio.create_task(
            translated(pair.whisper.base_url, "none", clip, SESSION, made)
        )
        await asyncio.to_thread(eventually, lambda: made.source, what="something was heard")
        await asyncio.to_thread(pair.text.stop)
        return await playing

    made = asyncio.run(run())
    assert right(made.source), made.source
    assert len(made.errors) == 1 and "goes on" in made.errors[0]
    assert made.code == 1000
