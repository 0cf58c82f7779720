"""Chunks hold all speech once, fit the window, are cut in silence, and know where they were."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

from speech.audio import BLOCK_SAMPLES, SAMPLE_RATE
from speech.chunks import WINDOW_S, Chunk, ChunkOptions, Piece, chunks, shorten_silence
from speech.vad import FRAME_SAMPLES, SpeechDetector


class LoudIsSpeech:
    """Stands in for the detector: what is louder than 0.05 is speech."""

    def __init__(self) -> None:
        self.rest = np.empty(0, np.float32)

    def stream(self) -> "LoudIsSpeech":
        return LoudIsSpeech()

    def push(self, samples: np.ndarray, last: bool = False) -> np.ndarray:
        samples = np.concatenate([self.rest, samples])
        if last:
            samples = np.pad(samples, (0, -len(samples) % FRAME_SAMPLES))
        count = len(samples) // FRAME_SAMPLES
        self.rest = samples[count * FRAME_SAMPLES :]
        frames = samples[: count * FRAME_SAMPLES].reshape(-1, FRAME_SAMPLES)
        return (np.abs(frames).max(axis=1, initial=0) > 0.05).astype(np.float32)


def audio(parts: Sequence[tuple[str, float]]) -> np.ndarray:
    """("s" or "-", seconds): speech whose samples tell their place, and silence."""
    samples = np.concatenate(
        [np.full(int(sec * SAMPLE_RATE), 1.0 if kind == "s" else 0.0) for kind, sec in parts]
    ).astype(np.float32)
    place = 0.1 + 0.8 * np.arange(len(samples)) / max(1, len(samples))
    return (samples * place).astype(np.float32)


def cut(samples: np.ndarray, options: ChunkOptions | None = None) -> list[Chunk]:
    blocks = [samples[i : i + BLOCK_SAMPLES] for i in range(0, len(samples), BLOCK_SAMPLES)]
    return list(chunks(blocks, options, cast(SpeechDetector, LoudIsSpeech())))


def check(samples: np.ndarray, made: Sequence[Chunk]) -> None:
    """What must hold of any chunks."""
    speech = samples[np.abs(samples) > 0.05]
    held = [c.samples[np.abs(c.samples) > 0.05] for c in made]
    np.testing.assert_array_equal(np.concatenate([*held, speech[:0]]), speech)
    for number, chunk in enumerate(made):
        assert chunk.index == number
        assert 0 < chunk.duration <= WINDOW_S
        assert sum(p.duration for p in chunk.pieces) == pytest.approx(chunk.duration)
        for piece in chunk.pieces:
            there = round(piece.source_start * SAMPLE_RATE)
            here = round(piece.start * SAMPLE_RATE)
            length = round(piece.duration * SAMPLE_RATE)
            np.testing.assert_array_equal(
                chunk.samples[here : here + length], samples[there : there + length]
            )


def test_short_audio_is_left_as_it_is():
    samples = audio([("-", 1), ("s", 5), ("-", 1.5), ("s", 8.3), ("-", 1.7)])
    (chunk,) = cut(samples)
    np.testing.assert_array_equal(chunk.samples, samples)
    assert chunk.pieces == (Piece(0.0, 0.0, len(samples) / SAMPLE_RATE),)


def test_silence_makes_no_chunk():
    assert cut(audio([("-", 100)])) == []
    assert cut(np.empty(0, np.float32)) == []


def test_long_audio_is_cut_in_its_silences():
    samples = audio([("s", 4), ("-", 0.7)] * 30)
    made = cut(samples)
    check(samples, made)
    assert len(made) == 5
    for chunk in made:
        assert abs(chunk.samples[0]) < 0.05 or chunk.index == 0
        assert abs(chunk.samples[-1]) < 0.05


def test_the_longest_silence_of_the_later_half_is_chosen():
    samples = audio([("s", 19), ("-", 0.5), ("s", 8), ("-", 0.2), ("s", 20)])
    first, _ = cut(samples)
    assert first.duration == pytest.approx(19.25, abs=0.1)


def test_speech_without_a_pause_is_cut_where_it_is_quietest():
    samples = audio([("s", 70)])
    dip = int(24.3 * SAMPLE_RATE)
    samples[dip : dip + 3200] = 0.06
    made = cut(samples)
    check(samples, made)
    assert made[0].duration == pytest.approx(24.4, abs=0.2)


def test_long_silence_is_shortened_and_times_are_kept():
    samples = audio([("-", 10), ("s", 3), ("-", 6), ("s", 3), ("-", 5)])
    (chunk,) = cut(samples)
    check(samples, [chunk])
    assert chunk.duration < 3 + 3 + 3.5
    start, end = chunk.speech[1]
    assert chunk.source_time(start) == pytest.approx(19, abs=0.05)
    assert chunk.source_time(end, end=True) == pytest.approx(22, abs=0.05)


def test_speech_far_apart_makes_chunks_of_its_own():
    samples = audio([("s", 2), ("-", 60)] * 4)
    made = cut(samples)
    check(samples, made)
    assert [round(c.source_time(c.speech[0][0])) for c in made] == [0, 62, 124, 186]


@pytest.mark.parametrize("seed", range(8))
def test_random_audio_loses_and_doubles_nothing(seed):
    rng = np.random.default_rng(seed)
    parts = [
        (("s", "-")[i % 2], float(rng.uniform(0.2, 12 if rng.random() < 0.2 else 3)))
        for i in range(60)
    ]
    samples = audio(parts)
    check(samples, cut(samples))


def test_a_seam_belongs_to_both_sides():
    chunk = Chunk(0, np.zeros(2 * SAMPLE_RATE, np.float32), (Piece(0, 5, 1), Piece(1, 20, 1)), ())
    assert chunk.source_time(1.0) == 20
    assert chunk.source_time(1.0, end=True) == 6
    assert chunk.source_time(9.0) == 21
    assert chunk.source_end == 21


def test_parts_keep_their_place():
    samples = np.arange(4 * SAMPLE_RATE, dtype=np.float32)
    chunk = Chunk(3, samples, (Piece(0, 5, 2), Piece(2, 20, 2)), ((0.5, 1.5), (2.5, 3.5)))
    part = chunk.part(1.0, 3.0)
    np.testing.assert_array_equal(part.samples, samples[SAMPLE_RATE : 3 * SAMPLE_RATE])
    assert part.index == 3
    assert part.pieces == (Piece(0.0, 6.0, 1.0), Piece(1.0, 20.0, 1.0))
    assert part.speech == ((0.0, 0.5), (1.5, 2.0))
    for time in (1.0, 1.7, 2.4, 2.9):
        assert part.source_time(time - 1.0) == pytest.approx(chunk.source_time(time))
    assert chunk.part(2.5).pieces == (Piece(0.0, 20.5, 1.5),)


def test_only_long_silence_is_shortened():
    speech = np.array([True] * 10 + [False] * 62 + [True] * 10 + [False] * 200 + [True])
    kept = shorten_silence(speech, ChunkOptions())
    assert kept[:82].all()
    assert (~kept).sum() == 200 - 2 * 12
