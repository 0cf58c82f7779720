"""What an engine asks SGLang for, and what it makes of the answer."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_ext.api.transcription.whisper_engine import WhisperEngine
from speech.audio import SAMPLE_RATE
from speech.chunks import Chunk, Piece
from speech.segments import Decoded, chunk_segments

SECONDS = 4.05


class Manager:
    """A TokenizerManager that says " so" and ends.

    Attributes:
        frames: of its tokens, as meta_info has them; None: it has none.
    """

    incremental_streaming_output = False

    def __init__(self, end: int, frames: list[int] | None) -> None:
        config = SimpleNamespace(
            vocab_size=51_864, max_target_positions=448, max_source_positions=1500
        )
        self.model_config = SimpleNamespace(hf_config=config)
        self.end, self.frames = end, frames
        self.asked: list[Any] = []

    async def generate_request(self, request: Any):
        self.asked.append(request.sampling_params["custom_params"])
        meta: dict[str, Any] = {"finish_reason": {"type": "stop"}}
        if self.frames is not None:
            meta["attended_frames"] = self.frames
        yield {"output_ids": [523, self.end, 523], "meta_info": meta}


def decoded(manager: Manager, params: dict[str, Any]) -> Decoded:
    async def run() -> Decoded:
        engine = WhisperEngine(manager)
        made = [d async for d in engine.decode(chunk(), engine.vocabulary.prompt(), 0.0, params)]
        return made[-1]

    return asyncio.run(run())


def chunk() -> Chunk:
    samples = np.zeros(round(SECONDS * SAMPLE_RATE), np.float32)
    return Chunk(0, samples, (Piece(0.0, 100.0, SECONDS),), ((0.5, SECONDS),))


END = 50_256


def test_frames_are_asked_about_as_far_as_there_is_audio_and_stay_beside_their_tokens():
    manager = Manager(END, [40, 202, -1])
    made = decoded(manager, {"attended_frames": 1500, "ingest": False})
    assert manager.asked == [{"attended_frames": 203, "ingest": False}]
    assert (made.tokens, made.frames) == ((523, 523), (40, -1))
    vocabulary = WhisperEngine(manager).vocabulary
    (segment,) = chunk_segments(chunk(), made, vocabulary)
    assert segment.looks == pytest.approx((100.8, float("nan")), nan_ok=True)


def test_a_token_that_looks_where_the_end_of_the_text_does_has_no_place():
    for frame in (201, 202, 203):
        assert decoded(Manager(END, [frame, 202, 40]), {"attended_frames": 9}).frames == (-1, 40)


@pytest.mark.parametrize("frames", [None, [40]])
def test_without_a_frame_for_each_token_there_are_none(frames):
    made = decoded(Manager(END, frames), {})
    assert (made.tokens, made.frames) == ((523, 523), ())
