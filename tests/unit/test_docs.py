"""The drafter in docs/drafters.md works as printed, in under 40 lines."""

import re
from pathlib import Path

from sglang_ext.drafters import Drafter, DrafterContext, DraftRequest
from sglang_ext.options import Options

PAGE = Path(__file__).parents[2] / "docs" / "drafters.md"


def test_the_example_drafts_what_followed_before():
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    assert len(code.splitlines()) < 40
    space: dict = {}
    exec(compile(code, str(PAGE), "exec"), space)
    drafter = space["PromptLookup"](DrafterContext(vocab_size=100, options=Options()))
    assert isinstance(drafter, Drafter)
    request = DraftRequest("r", prompt=[1, 2, 3, 4, 5, 6], output=[7])
    drafter.start(request)
    assert len(drafter.propose([request], 4)[0]) == 0
    request.output += [2, 3]
    drafter.observe(request, [2, 3])
    tree = drafter.propose([request], 3)[0]
    assert list(tree.tokens) == [4, 5, 6]
    request.output += [4, 9, 2, 3]
    drafter.observe(request, [4, 9, 2, 3])
    assert list(drafter.propose([request], 2)[0].tokens) == [4, 9]
    drafter.finish(request, completed=True)
