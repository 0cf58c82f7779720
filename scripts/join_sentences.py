"""More sources to distil from: the beginning of one sentence joined with the end of another.

They are joined behind a frequent word that both have, near the middle of the first one, so that
most are sentences again, of the same words in other company. A drafter that has learned from
them as well drafts more of sentences that it has not seen (docs/specdec.md). The same command
writes the same sentences. None is a sentence of the file, and none is shorter or longer than nine
in ten of these.

    python -m scripts.join_sentences --sources FILE --count N --out FILE [--seed N]
"""

import argparse
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.lib.ssbd_streams import read_lines

# Words at which sentences are joined: the most frequent ones.
_PIVOTS = 64
# Sentences tried as the end for each beginning, and rounds over all beginnings.
_TRIES, _MOST_ROUNDS = 8, 32
# So many words about the middle decide by lot where a beginning ends.
_SPREAD = 4.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sources", type=Path, required=True, metavar="FILE", help="a sentence a line, .gz too")
    add("--count", type=int, required=True, metavar="N", help="sentences to write")
    add("--out", type=Path, required=True, metavar="FILE")
    add("--seed", type=int, default=1, metavar="N", help="[%(default)s]")
    options = parser.parse_args()
    try:
        sentences = read_lines(options.sources)
    except (OSError, ValueError) as error:
        parser.error(f"--sources {options.sources}: {error}")
    made = list(joined(sentences, options.count, options.seed))
    options.out.write_text("".join(f"{line}\n" for line in made), encoding="utf-8")
    print(f"{options.out}: {len(made):,} sentences of parts of {len(sentences):,}")
    if len(made) < options.count:
        print(f"no more than {len(made):,} different ones were found", file=sys.stderr)
    return int(len(made) < options.count)


def joined(sentences: Sequence[str], count: int, seed: int = 1) -> Iterator[str]:
    """Up to `count` different sentences of two parts each."""
    rng = random.Random(seed)
    words = [line.split() for line in dict.fromkeys(sentences) if line]
    if not words:
        return
    lengths = sorted(map(len, words))
    shortest, longest = lengths[len(lengths) // 20], lengths[len(lengths) * 19 // 20]
    pivots = {word for word, _ in Counter(w for line in words for w in line).most_common(_PIVOTS)}
    ends = _ends_behind(words, pivots)
    known, made = set(sentences), 0
    order = list(range(len(words)))
    for _ in range(_MOST_ROUNDS):
        rng.shuffle(order)
        for number in order:
            if made == count:
                return
            begin = _beginning(words[number], pivots, rng)
            for _ in range(_TRIES if begin else 0):
                whole = [*begin, *rng.choice(ends[begin[-1]])]
                text = " ".join(whole)
                if shortest <= len(whole) <= longest and text not in known:
                    known.add(text)
                    made += 1
                    yield text
                    break


def _inner(line: Sequence[str], pivots: set[str]) -> list[int]:
    """Where a sentence may be cut: behind these words, none of them at its beginning or end."""
    return [place for place in range(1, len(line) - 2) if line[place] in pivots]


def _ends_behind(words: Sequence[list[str]], pivots: set[str]) -> dict[str, list[list[str]]]:
    """The ends of sentences behind each word."""
    found = defaultdict(list)
    for line in words:
        for place in _inner(line, pivots):
            found[line[place]].append(line[place + 1 :])
    return found


def _beginning(line: list[str], pivots: set[str], rng: random.Random) -> list[str]:
    """Up to a word about the middle; empty: there is none."""
    places = _inner(line, pivots)
    if not places:
        return []
    middle = len(line) / 2
    place = min(places, key=lambda place: abs(place - middle) + _SPREAD * rng.random())
    return line[: place + 1]


if __name__ == "__main__":
    sys.exit(main())
