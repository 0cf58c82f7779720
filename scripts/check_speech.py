"""SpecASR's output against plain SGLang Whisper's, token id by token id.

Plain SGLang transcribes all clips of a folder and 20 minutes of audio derived from them
(scripts/speech_data.py) at batch 1 and 8; a server with SpecASR then does so in every mode. Where
they differ, plain SGLang is asked again: a clip on which it contradicts itself at that batch size
is shown and not counted. At most one server is up at a time.

With `--cpu-weights int8` all these have their weights in that format, and one in float32
transcribes the clips with references too: wer_points_lost is how many points of word error rate the
format costs, at most 0.3.

    python -m scripts.check_speech [--target T] [--draft D] [--audio DIR] [--cpu-weights FORMAT]
        [--quick] [--json FILE]
"""

import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from scripts.lib.figures import parser, report
from scripts.lib.server import Server
from scripts.lib.speech_client import AUTOREGRESSIVE, MODES, Speech, Transcript, transcribe_all
from scripts.lib.word_errors import WordErrors
from scripts.speech_data import DERIVED_S, FOLDER, Clip, derive, read_clips, windows

BATCH_SIZES = (1, 8)
ASKED_AGAIN = 2  # times that plain SGLang may contradict itself
EXACT_WEIGHTS = "fp32"
MOST_POINTS_LOST = 0.3
QUICK_CLIPS, QUICK_DERIVED_S = 6, 60.0
# Every mode of drafting, and plain steps by the speculating worker.
DRAFTING = {
    name: {"budget": "fixed", **params}  # all drafts are verified, whether that pays or not
    for name, params in MODES.items()
    if name != AUTOREGRESSIVE
}
CHECKED = {**DRAFTING, "no drafts": MODES[AUTOREGRESSIVE]}
# Clips, output and the widest trees of 8 requests.
SPECULATION = ["--speculative-algorithm", "SSSD", "--speculative-num-draft-tokens", "64"]

# Transcripts of all clips, by mode and batch size.
Answers = dict[tuple[str, int], list[Transcript]]


def main() -> int:
    args = parser(__doc__, model=False)
    args.add_argument("--target", default="whisper-base", metavar="T", help="[%(default)s]")
    args.add_argument("--draft", default="whisper-tiny.en", metavar="D", help="[%(default)s]")
    args.add_argument("--audio", type=Path, default=FOLDER, metavar="DIR", help="[%(default)s]")
    args.add_argument(
        "--minutes", type=float, default=DERIVED_S / 60, help="of derived audio [%(default)g]"
    )
    args.add_argument(
        "--cpu-weights", default=EXACT_WEIGHTS, metavar="FORMAT", help="[%(default)s]"
    )
    options = args.parse_args()
    weights = ["--cpu-weights", options.cpu_weights]
    sources = read_clips(options.audio)
    seconds = QUICK_DERIVED_S if options.quick else options.minutes * 60
    used = sources[:: max(1, len(sources) // QUICK_CLIPS)] if options.quick else sources
    clips = list(itertools.chain(*map(windows, used), derive(sources, seconds)))
    speech = [Speech.of(clip) for clip in clips]
    print(f"{len(clips)} clips, {sum(c.seconds for c in clips) / 60:.1f} minutes", flush=True)

    with Server(options.target, weights, name="plain") as server:
        plain = {batch: ask(server, speech, "plain", None, batch) for batch in BATCH_SIZES}
    flags = [*weights, *SPECULATION, "--draft-model", options.draft]
    with Server(options.target, flags, name="specasr") as server:
        answers = {
            (mode, batch): ask(server, speech, mode, params, batch)
            for mode, params in CHECKED.items()
            for batch in BATCH_SIZES
        }
    unstable: dict[int, set[int]] = {batch: set() for batch in BATCH_SIZES}
    if any(differing(plain, answers).values()):
        with Server(options.target, weights, name="plain") as server:
            for batch, _ in itertools.product(BATCH_SIZES, range(ASKED_AGAIN)):
                again = ask(server, speech, "plain again", None, batch)
                unstable[batch] |= unequal(plain[batch], again)
    figures = compare(clips, plain, answers, unstable)
    if options.cpu_weights != EXACT_WEIGHTS:
        with Server(options.target, name="exact") as server:
            exact = ask(server, speech, "exact weights", None, BATCH_SIZES[-1])
        figures |= word_error_figures(clips, exact, plain[BATCH_SIZES[-1]])
    report(figures, options.json)
    idle = undrafted(answers)
    if idle:
        print(f"nothing was drafted in {', '.join(idle)}: the check shows nothing there")
    lost = figures.get("wer_points_lost", 0.0) > MOST_POINTS_LOST
    return int(figures["mismatches"] > 0 or bool(idle) or lost)


def word_error_figures(
    clips: Sequence[Clip], exact: Sequence[Transcript], plain: Sequence[Transcript]
) -> dict[str, float]:
    """Word error rates of two servers' transcripts, of the clips with references.

    Args:
        exact: of float32 weights; plain: of those checked.

    Raises:
        ValueError: no clip has a reference.
    """
    told = [i for i, clip in enumerate(clips) if clip.reference]
    if not told:
        raise ValueError("no clip has a reference: word errors cannot be counted (--audio)")
    errors = WordErrors([clips[i].reference or "" for i in told])
    before, after = (errors.rate(made[i].text for i in told) for made in (exact, plain))
    return {
        "wer_fp32": before,
        "wer": after,
        "wer_points_lost": 100 * (after - before),
        "clips_with_reference": len(told),
    }


def ask(
    server: Server,
    speech: Sequence[Speech],
    mode: str,
    params: Mapping[str, object] | None,
    batch: int,
) -> list[Transcript]:
    """All clips in one mode at one batch size."""
    print(f"{mode}, batch {batch}", flush=True)
    return transcribe_all(server.base_url, speech, params, in_flight=batch, label=mode)


def unequal(some: Iterable[Transcript], others: Iterable[Transcript]) -> set[int]:
    """The rows whose tokens differ."""
    pairs = zip(some, others, strict=True)
    return {i for i, (a, b) in enumerate(pairs) if a.token_ids != b.token_ids}


def differing(
    plain: Mapping[int, Sequence[Transcript]], answers: Answers
) -> dict[tuple[str, int], set[int]]:
    """For each mode and batch size, the clips that plain SGLang transcribes otherwise."""
    return {
        (mode, batch): unequal(plain[batch], transcripts)
        for (mode, batch), transcripts in answers.items()
    }


def undrafted(answers: Answers) -> list[str]:
    """The drafting modes in which no draft was ever accepted: equal output proves nothing there."""
    return [
        f"{mode}, batch {batch}"
        for (mode, batch), transcripts in answers.items()
        if mode in DRAFTING and accept_length(transcripts) <= 1
    ]


def accept_length(transcripts: Sequence[Transcript]) -> float:
    """Mean over the clips."""
    return sum(t.accept_length for t in transcripts) / len(transcripts)


def compare(
    clips: Sequence[Clip],
    plain: Mapping[int, Sequence[Transcript]],
    answers: Answers,
    unstable: Mapping[int, set[int]],
) -> dict[str, float]:
    """Print a line per configuration, and where it differs; return the figures."""
    print(f"\n{'configuration':24} {'clips':>6} {'differ':>7} {'accept':>7} {'seconds':>8}")
    for batch, transcripts in plain.items():
        print(
            f"{f'plain, batch {batch}':24} {len(clips):>6} {len(unstable[batch]):>7} {'':>7} "
            f"{sum(t.seconds for t in transcripts) / batch:>8.0f}   (with itself)"
        )
    mismatches = compared = 0
    for (mode, batch), rows in differing(plain, answers).items():
        counted = rows - unstable[batch]
        mismatches += len(counted)
        compared += len(clips) - len(unstable[batch])
        transcripts = answers[mode, batch]
        print(
            f"{f'{mode}, batch {batch}':24} {len(clips):>6} {len(counted):>7} "
            f"{accept_length(transcripts):>7.2f} "
            f"{sum(t.seconds for t in transcripts) / batch:>8.0f}"
        )
        for row in sorted(counted)[:5]:
            expected, got = plain[batch][row].token_ids, transcripts[row].token_ids
            print(f"    {clips[row].name} from token {first_difference(expected, got)}")
    return {
        "clips": len(clips),
        "minutes": sum(clip.seconds for clip in clips) / 60,
        "tokens": sum(len(t.token_ids) for t in plain[BATCH_SIZES[0]]),
        "transcripts_compared": compared,
        "mismatches": mismatches,
        "plain_mismatches": sum(map(len, unstable.values())),
    }


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int:
    """Where two sequences part: the shorter one's length if it begins the longer one."""
    pairs = enumerate(zip(expected, got, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(expected), len(got)))


if __name__ == "__main__":
    sys.exit(main())
