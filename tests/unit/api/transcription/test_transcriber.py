"""The work of one request, with an engine that says what the test wants."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, cast

import numpy as np
import pytest

from scripts.speech_data import Clip, encode
from sglang_ext.api.http import ApiError
from sglang_ext.api.transcription import transcriber
from sglang_ext.api.transcription.transcriber import Delta, Limits, Progress, Transcription
from sglang_ext.api.transcription.transcription_request import TranscriptionRequest
from sglang_ext.api.transcription.whisper_engine import WhisperEngine
from speech.audio import AudioError
from speech.chunks import Chunk, Piece
from speech.prompts import WhisperVocabulary
from speech.segments import Decoded, Transcript

VOCABULARY = WhisperVocabulary(51_865)
Say = Callable[[int, float], Decoded]


def said(text: str, logprob: float = -0.1, no_speech: float = 0.0) -> Decoded:
    tokens = tuple(VOCABULARY.tokenizer.encode(text))
    return Decoded(tokens, (logprob,) * (len(tokens) + 1), no_speech)


class Engine:
    """Stands in for the served model.

    Args:
        say: what it writes, by chunk and temperature.
        delay: seconds that a chunk takes.
    """

    vocabulary = VOCABULARY
    context = 448

    def __init__(self, say: Say, delay: Callable[[int], float] = lambda _: 0.0):
        self.say, self.delay = say, delay
        self.running = self.most = self.detected = 0
        self.prompts: list[list[int]] = []
        self.temperatures: list[float] = []

    async def detect_language(self, chunk: Chunk, custom_params: Mapping[str, Any]) -> str:
        self.detected += 1
        return "fr"

    async def decode(
        self, chunk: Chunk, prompt: list[int], temperature: float, custom_params: Any,
        stream: bool = False, most_tokens: int | None = None,
    ) -> AsyncIterator[Decoded]:  # fmt: skip
        self.running += 1
        self.most = max(self.most, self.running)
        self.prompts.append(prompt)
        self.temperatures.append(temperature)
        try:
            await asyncio.sleep(self.delay(chunk.index))
            whole = self.say(chunk.index, temperature)
            if stream:
                for end in range(1, len(whole.tokens)):
                    yield Decoded(whole.tokens[:end], whole.logprobs[:end], whole.no_speech_prob)
            yield whole
        finally:
            self.running -= 1


@pytest.fixture(autouse=True)
def six_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cutting is tested elsewhere: here every audio has six chunks of a second."""

    def cut(blocks: Any, _options: Any) -> Any:
        for _ in blocks:
            pass
        for i in range(6):
            yield Chunk(i, np.zeros(16_000, np.float32), (Piece(0.0, float(i), 1.0),), ((0, 1),))

    monkeypatch.setattr(transcriber, "chunks", cut)


def run(engine: Engine, seconds: float = 6.0, data: bytes | None = None, parallel: int = 4, **more):
    """All events of a request."""
    clip = Clip("x", np.zeros((1, int(seconds * 16_000)), np.float32), 16_000)
    file = io.BytesIO(encode(clip) if data is None else data)
    fields: dict[str, Any] = {"language": "en", **more}
    request = TranscriptionRequest(file=file, task="transcribe", **fields)

    async def collect() -> list[Any]:
        work = Transcription(cast(WhisperEngine, engine), request, Limits(3600, parallel, 0.5))
        return [event async for event in work.run()]

    return asyncio.run(collect())


def numbered(index: int, _temperature: float) -> Decoded:
    return said(f" Chunk {index}.")


WHOLE = "Chunk 0. Chunk 1. Chunk 2. Chunk 3. Chunk 4. Chunk 5."


def test_chunks_are_joined_in_order_whoever_is_first():
    engine = Engine(numbered, delay=lambda i: 0.05 if i % 2 == 0 else 0.0)
    *progress, last = run(engine)
    assert isinstance(last, Transcript)
    assert (last.text, last.language, last.duration) == (WHOLE, "en", 6.0)
    assert [p.seconds for p in progress if isinstance(p, Progress)] == [1, 2, 3, 4, 5, 6]
    assert engine.detected == 0


def test_no_more_chunks_at_once_than_allowed():
    engine = Engine(numbered, delay=lambda _: 0.02)
    run(engine, parallel=3)
    assert engine.most == 3


def test_the_language_is_detected_once():
    engine = Engine(numbered)
    last = run(engine, language=None)[-1]
    assert (engine.detected, last.language) == (1, "fr")
    assert {tuple(p) for p in engine.prompts} == {tuple(VOCABULARY.prompt("fr", timestamps=True))}


def test_timestamps_and_the_prompt_are_asked_for_in_every_chunk():
    engine = Engine(numbered)
    last = run(engine, response_format="srt", prompt="Ada")[-1]
    assert all(p[-1] == VOCABULARY.first_timestamp for p in engine.prompts)
    assert all(p[0] == VOCABULARY.tokenizer.sot_prev for p in engine.prompts)
    assert [s.id for s in last.segments] == list(range(6))
    assert [s.start for s in last.segments] == [0, 1, 2, 3, 4, 5]


def test_what_looks_invented_is_decoded_again():
    def say(index: int, temperature: float) -> Decoded:
        if index == 2 and temperature < 0.4:
            return said(" again and again" * 40)
        return numbered(index, temperature)

    engine = Engine(say)
    assert run(engine)[-1].text == WHOLE
    assert sorted(engine.temperatures) == [0.0] * 6 + [0.2, 0.4]
    engine = Engine(say)
    assert "again and again" in run(engine, temperature_fallback=False)[-1].text
    assert engine.temperatures == [0.0] * 6


def test_a_loop_that_stays_is_cut_but_its_tokens_are_told():
    loop = said(" Words that stay. " + " la" * 100)
    last = run(Engine(lambda *_: loop))[-1]
    assert last.text.count(" la") == 6
    assert set(last.token_ids) == {loop.tokens}


def test_what_was_left_out_is_decoded_after_all():
    seconds = 20.0

    def say(_index: int, _temperature: float) -> Decoded:
        # The first pass stops at 10 s, and the second one reads the rest.
        if len(engine.prompts) == 1:
            half = VOCABULARY.first_timestamp + round(seconds / 2 / 0.02)
            text = said(" The first half of it, to the end of a sentence, and no more than that.")
            return Decoded((*text.tokens, half, half), (*text.logprobs, -0.1, -0.1))
        return said(" And the second half of it, which was said too, and is heard after all.")

    def cut(blocks: Any, _options: Any) -> Any:
        list(blocks)
        samples = np.zeros(int(seconds * 16_000), np.float32)
        yield Chunk(0, samples, (Piece(0.0, 5.0, seconds),), ((0, 9.8), (10.2, 20)))

    engine = Engine(say)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transcriber, "chunks", cut)
        last = run(engine, response_format="srt")[-1]
        assert "no more than that. And the second half" in last.text
        assert [(s.id, s.start, s.end) for s in last.segments] == [(0, 5, 15), (1, 15.2, 25)]
        assert len(last.token_ids) == 2
        engine.prompts.clear()
        *events, last = run(engine, stream=True)
        assert "".join(e.text for e in events if isinstance(e, Delta)) == last.text


def test_no_speech_after_all_is_no_text():
    last = run(Engine(lambda *_: said(" Thanks for watching!", -1.5, 0.9)))[-1]
    assert last.text == ""


def test_streaming_gives_the_same_text_in_order():
    engine = Engine(numbered, delay=lambda i: 0.03 if i % 2 == 0 else 0.0)
    *events, last = run(engine, stream=True)
    deltas = [e.text for e in events if isinstance(e, Delta)]
    assert len(deltas) > 12
    assert "".join(deltas) == last.text == WHOLE


def test_streams_hold_back_characters_that_are_not_whole():
    *events, _ = run(Engine(lambda *_: said(" 𝄞𝄞")), stream=True)
    assert "\ufffd" not in "".join(e.text for e in events if isinstance(e, Delta))


def test_streams_stop_at_a_loop():
    *events, last = run(Engine(lambda *_: said(" One." + " la" * 200)), stream=True)
    deltas = "".join(e.text for e in events if isinstance(e, Delta))
    assert deltas.count(" la") < 6 * 60
    assert last.text.count(" la") == 6


def test_an_error_ends_all_of_it():
    def say(index: int, temperature: float) -> Decoded:
        if index == 1:
            raise ApiError("no room", 503)
        return numbered(index, temperature)

    engine = Engine(say, delay=lambda i: 0.0 if i == 1 else 0.2)
    with pytest.raises(ApiError, match="no room"):
        run(engine)
    assert engine.running == 0


@pytest.mark.parametrize(("seconds", "data"), [(0.05, None), (1.0, b"no audio")])
def test_bad_audio_is_told(seconds, data):
    with pytest.raises((ApiError, AudioError), match=r"too short|not supported"):
        run(Engine(numbered), seconds, data)
