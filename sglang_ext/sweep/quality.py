"""What outputs are worth beside their speed: word errors of transcripts, erasure of updates.

Both are ratios whose parts are kept by request, [part, whole], and summed over a run before they
are divided.

Word errors: after Whisper's English normalizer (Whisper paper, section 4.4); only where jiwer is
installed. Normalized erasure: Arivazhagan et al. 2020, "Re-translation versus Streaming
for Simultaneous Translation": words that an update takes back from the output before it, by the
words of the last output.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from sglang_ext.sweep.items import Item, streams

WORD_ERRORS, ERASURE = "word_error_percent", "normalized_erasure"
# Columns, and what their ratios are multiplied by.
QUALITIES: Mapping[str, float] = {WORD_ERRORS: 100.0, ERASURE: 1.0}
Ratios = dict[str, list[int]]
"""[part, whole] by column."""


def qualities(
    items: Sequence[Item],
    outputs: Mapping[str, Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> dict[str, Ratios]:
    """What a run's outputs are worth, by the items' ids; only of items that tell.

    Args:
        outputs: token ids by the items' ids, of the requests that did not fail.
        decode: their text.
    """
    found: dict[str, Ratios] = {}
    for stream in streams(items):
        if not all(item.id in outputs for item in stream):
            continue  # what its updates take back is not known
        before: list[str] = []
        for item in stream:
            ratios: Ratios = {}
            text = decode(outputs[item.id]) if item.reference or item.stream else ""
            if item.reference and (errors := word_errors(item.reference, text)):
                ratios[WORD_ERRORS] = errors
            if item.stream:
                words = text.split()
                whole = len(words) if item is stream[-1] else 0
                ratios[ERASURE] = [_erased(before, words), whole]
                before = words
            if ratios:
                found[item.id] = ratios
    return found


def word_errors(reference: str, text: str) -> list[int] | None:
    """[wrong words, words of the reference]; None: there are no words, or there is no jiwer."""
    try:
        import jiwer
    except ImportError:
        return None
    normalize = _normalizer()
    said = normalize(reference).strip()
    if not said:
        return None
    found = jiwer.process_words(said, normalize(text).strip())
    missed = found.substitutions + found.deletions
    return [missed + found.insertions, missed + found.hits]


@cache
def _normalizer() -> Callable[[str], str]:
    from whisper.normalizers import EnglishTextNormalizer

    return EnglishTextNormalizer()


def _erased(before: Sequence[str], after: Sequence[str]) -> int:
    """How many words of an output the next one does not begin with."""
    shorter = min(len(before), len(after))
    return len(before) - next((i for i in range(shorter) if before[i] != after[i]), shorter)
