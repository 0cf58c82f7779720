"""Speech that the model left out is found, and only that."""

import numpy as np
import pytest

from speech.audio import SAMPLE_RATE
from speech.chunks import Chunk, Piece
from speech.coverage import left_out, longest_silence, nearest_silence
from speech.prompts import WhisperVocabulary
from speech.segments import Decoded

VOCABULARY = WhisperVocabulary(51_865)
SENTENCE = " This takes about four seconds to say, as sentences go."  # 55 characters


def chunk(*speech: tuple[float, float], seconds: float = 20.0) -> Chunk:
    samples = np.zeros(int(seconds * SAMPLE_RATE), np.float32)
    return Chunk(0, samples, (Piece(0.0, 0.0, seconds),), speech)


def decoded(*parts: str | float) -> Decoded:
    """Text and timestamps."""
    tokens: list[int] = []
    for part in parts:
        if isinstance(part, str):
            tokens += VOCABULARY.tokenizer.encode(part)
        else:
            tokens.append(VOCABULARY.first_timestamp + round(part / 0.02))
    return Decoded(tuple(tokens), (-0.1,) * len(tokens))


SENTENCES = chunk((0.3, 4.0), (5.0, 9.0), (10.0, 14.0), (15.0, 19.5))


@pytest.mark.parametrize(
    "said",
    [
        decoded(SENTENCE, 4.5, 4.5, SENTENCE, 9.5, 9.5, SENTENCE, 14.5, 14.5, SENTENCE, 19.5),
        decoded(SENTENCE * 4),
        decoded(SENTENCE, 4.5, SENTENCE * 3),
        decoded(SENTENCE * 4, 19.0, 19.0),
        decoded(SENTENCE * 4, 5.0),  # a wrong timestamp: nobody speaks so fast
        decoded(),
        decoded(3.0, 3.0),
    ],
)
def test_nothing_is_left_out(said):
    assert left_out(SENTENCES, said, VOCABULARY, "en") == (said, [])


@pytest.mark.parametrize("pair", [(9.0, 9.0), (9.6,), (10.2, 10.2)])
def test_what_follows_the_last_timestamp(pair):
    said = decoded(SENTENCE, 4.5, 4.5, SENTENCE, *pair)
    kept, (rest,) = left_out(SENTENCES, said, VOCABULARY, "en")
    assert kept is said
    # From the silence between 9 and 10 s on, wherever the timestamp was.
    assert rest.source_time(0.0) == pytest.approx(9.5)
    assert rest.speech[0] == pytest.approx((0.5, 4.5))


def test_a_text_that_breaks_off_is_decoded_again_in_two_parts():
    said = decoded(SENTENCE, 4.5, 4.5, " Then")
    kept, parts = left_out(SENTENCES, said, VOCABULARY, "en")
    assert VOCABULARY.decode(kept.tokens) == SENTENCE
    assert len(kept.logprobs) == len(kept.tokens)
    assert [p.source_time(0.0) for p in parts] == pytest.approx([4.5, 9.5])
    assert sum(len(p.samples) for p in parts) == 15.5 * SAMPLE_RATE


def test_a_whole_chunk_with_hardly_a_word():
    kept, parts = left_out(SENTENCES, decoded(" So!"), VOCABULARY, "en")
    assert kept.tokens == ()
    assert [p.source_time(0.0) for p in parts] == pytest.approx([0.0, 9.5])


def test_speech_without_silence_is_not_divided():
    said = decoded(" So!")
    assert left_out(chunk((0, 20)), said, VOCABULARY, "en") == (said, [])


def test_writing_without_spaces_has_fewer_characters():
    said = decoded("\u4eca" * 45)  # two and a half a second
    assert left_out(SENTENCES, said, VOCABULARY, "zh") == (said, [])
    assert left_out(SENTENCES, said, VOCABULARY, "en")[1]


def test_silences():
    assert nearest_silence(SENTENCES, 4.2) == 4.5
    assert nearest_silence(SENTENCES, 7.0) == 7.0
    assert longest_silence(SENTENCES, 0.0) == 9.5
    assert longest_silence(chunk((0, 20)), 0.0) is None
