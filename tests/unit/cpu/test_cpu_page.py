"""docs/cpu.md lists what the CPU engine is made of."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_has_every_part():
    parts = {path.name for path in (ROOT / "sglang_ext" / "cpu").glob("*.py")} - {"__init__.py"}
    named = set(re.findall(r"`(\w+\.py)`", (ROOT / "docs" / "cpu.md").read_text()))
    assert parts <= named, parts - named
