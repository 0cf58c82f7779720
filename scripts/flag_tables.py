"""The docs' tables of a server's options, written from `sglang_ext.options.Options`.

    python -m scripts.flag_tables --write    # between the markers of each page
    python -m scripts.flag_tables --check    # exit code 1 where a page differs

A table stands between `<!-- flags:begin NAME -->` and `<!-- flags:end -->`. The meaning is the
option's help text, with a link where another page says more (PAGES), and on the page itself with
what that page adds (ASIDES).
"""

import argparse
import os
import re
import sys
from collections.abc import Callable
from dataclasses import Field, dataclass, fields

from scripts.lib.import_layers import ROOT
from sglang_ext.options import Options

# Option -> the page that says more of it.
PAGES = {
    "datastore": "docs/datastore.md",
    "datastore_shared": "docs/disaggregation.md",
    "bigram_seconds": "docs/bigrams.md",
    "budget_knee": "docs/budget.md",
    "mirror_retrieval": "docs/mirror.md",
    "cpu_weights": "docs/cpu.md",
    "cuda_widths": "docs/cuda.md",
    "draft_model": "docs/specasr.md",
    "relaxed_acceptance": "docs/relaxed.md",
    "specdec_branches": "docs/specdec.md",
    "record_states": "docs/specdec.md",
    "ssbd_beta": "docs/ssbd.md",
    "translation_sessions": "docs/translation.md",
}
# Option -> what its page adds to the help text.
ASIDES = {
    "namespace_share": (
        "beyond it, a 429: a namespace that takes all it can has 500 sessions of 1000, the next "
        "one 250, and there is room for others still"
    ),
    "ssbd_beta": "for requests that set none",
    "ssbd_sessions": (
        "of 16.8 million tokens in all; where there are too many, the namespace with the most of "
        "them loses its oldest"
    ),
    "transcription_max_upload_mb": (
        "a larger one gets a 413; three hours of 16-bit 16 kHz WAV take 330"
    ),
    "audio_decoder_seconds": "for each ten minutes, begun",
    "vad_threshold": "raise it where noise passes for speech",
    "translation_sessions": "of all namespaces; finished ones make room, then a 429",
    "translation_idle_seconds": "listening to `/events` or a silent WebSocket is no use",
    "translation_max_source_chars": "beyond it a 413, and the session stays as it was",
}


@dataclass(frozen=True)
class Table:
    """A table of options.

    Attributes:
        page: the page that it stands on, relative to the repository.
        has: whether an option, by its name, is in it.
    """

    page: str
    has: Callable[[str], bool]


def _begins(*starts: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(starts)


_of_transcription = _begins("transcription_", "audio_", "vad_", "word_aligner")
_of_realtime = _begins("realtime_", "live_p", "alignatt_", "translate_")
_of_security = _begins(
    "max_choices",
    "max_answers",
    "max_logprobs",
    "max_body",
    "max_streams",
    "grammar_",
    "websocket_",
)
# Of these the first alone stands in README.
_of_mirror = _begins("mirror_")
TABLES = {
    "realtime": Table("docs/realtime.md", _of_realtime),
    "serve": Table(
        "README.md",
        lambda n: (
            not (
                _of_transcription(n)
                or _of_security(n)
                or _of_realtime(n)
                or (_of_mirror(n) and n != "mirror_retrieval")
            )
        ),
    ),
    "specdec": Table("docs/specdec.md", _begins("specdec_", "record_")),
    "mirror": Table("docs/mirror.md", _of_mirror),
    "ssbd": Table("docs/ssbd.md", _begins("ssbd_")),
    "transcription": Table("docs/transcription.md", _of_transcription),
    "translation": Table("docs/translation.md", _begins("translation_", "namespace_share")),
}


def main() -> int:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = made.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="write the tables into their pages")
    what.add_argument("--check", action="store_true", help="say which pages differ")
    options = made.parse_args()
    differ = False
    for name, table in TABLES.items():
        path = ROOT / table.page
        text = path.read_text()
        wanted = with_table(text, name)
        if text == wanted:
            continue
        differ = True
        print(f"{table.page}: the table {name} " + ("was written" if options.write else "differs"))
        if options.write:
            path.write_text(wanted)
    return 1 if differ and options.check else 0


def with_table(text: str, name: str) -> str:
    """A page's text with the table of that name as it should be.

    Raises:
        ValueError: the page has no such markers, or several.
    """
    parts = re.split(rf"(<!-- flags:begin {name} -->\n).*?(<!-- flags:end -->)", text, flags=re.S)
    if len(parts) != 4:
        raise ValueError(f"{TABLES[name].page} must have the markers of the table {name} once")
    before, begin, end, after = parts
    return f"{before}{begin}{table_of(name)}{end}{after}"


def table_of(name: str) -> str:
    """The table of that name, in Markdown."""
    table = TABLES[name]
    rows = [_row(option, table.page) for option in fields(Options) if table.has(option.name)]
    return "\n".join(["| flag | default | meaning |", "| --- | --- | --- |", *rows, ""])


def _row(option: "Field[object]", page: str) -> str:
    flag = "--" + option.name.replace("_", "-")
    default = f"`{shown(option.default)}`" if shown(option.default) else ""
    meaning = option.metadata["help"]
    if option.name in ASIDES and page != "README.md":
        meaning += f" ({ASIDES[option.name]})"
    more = PAGES.get(option.name, page)
    if more != page:
        link = os.path.relpath(ROOT / more, (ROOT / page).parent)
        meaning += f" ([{link}]({link}))"
    return f"| `{flag}` | {default} | {meaning} |".replace("|  |", "| |")


def shown(default: object) -> str:
    """A default as it is given on the command line; "" for an empty one."""
    if isinstance(default, bool):
        return str(int(default))
    return f"{default:g}" if isinstance(default, float) else str(default)


if __name__ == "__main__":
    sys.exit(main())
