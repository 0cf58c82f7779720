"""The section of docs/performance.md on other engines, from what scripts.bench_cpu_peers wrote."""

import re
from pathlib import Path

NAME = "cpu-peers"
_PAGE, _MEASURED = "performance.md", "measured"
_BEGIN, _END = "<!-- other engines -->", "<!-- end of other engines -->"
_BEFORE = "## By category\n"


def section(docs: Path) -> str:
    """The section, with the tables of DOCS/measured/cpu-peers.md; "" where there are none."""
    page = docs / _MEASURED / f"{NAME}.md"
    if not page.is_file():
        return ""
    _, _, results = page.read_text(encoding="utf-8").partition("## Results\n")
    return (
        f"{_BEGIN}\n## Beside llama.cpp and faster-whisper\n\n"
        f"[How it was measured, and where]({_MEASURED}/{NAME}.md).\n\n{results.strip()}\n\n{_END}\n"
    )


def put_section(docs: Path) -> None:
    """Put the section into DOCS/performance.md, in the place of an older one."""
    page = docs / _PAGE
    if not page.is_file():
        return
    text = page.read_text(encoding="utf-8")
    text = re.sub(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}\n\n?", "", text, flags=re.DOTALL)
    head, before, rest = text.partition(_BEFORE)
    new = section(docs)
    if not before:
        page.write_text(f"{text.rstrip()}\n\n{new}" if new else text, encoding="utf-8")
        return
    page.write_text(head + (new and f"{new}\n") + before + rest, encoding="utf-8")
