"""Whether sampling while Mirror drafts keeps the target's distribution, as check_sampling tests."""

from collections.abc import Sequence

from scripts.check_sampling import CASES, compare, exact_distribution, sample
from scripts.lib.mirror_rows import Row
from scripts.lib.mirror_runs import Client
from scripts.lib.spec_bench import Prompt

_NAMES = {
    "tv_distance": "distribution_tv", "tv_noise": "distribution_tv_noise",
    "smallest_p": "distribution_smallest_p", "rejected": "distribution_rejected",
    "samples": "distribution_samples",
}  # fmt: skip


class Sampled:
    """What plain SGLang writes, to be compared with what others do.

    Args:
        plain: a plain server.
        prompts: one for each of check_sampling's cases.
        each: outputs of each case.
    """

    def __init__(self, plain: Client, prompts: Sequence[Prompt], each: int) -> None:
        self._cases = list(zip(prompts, CASES, strict=True))
        self._each = each
        print(f"plain SGLang's distributions, then {2 * each} outputs of each case", flush=True)
        self._exact = [exact_distribution(plain.url, *case) for case in self._cases]
        self._plain = [[sample(plain.url, *case, each) for case in self._cases] for _ in range(2)]

    def figures(self, client: Client, row: Row) -> dict[str, float]:
        """How far the row's outputs are from plain ones, and how many nodes were drafted."""
        name = "spec_decode_num_draft_tokens_total"
        print(f"{self._each} outputs of each case by {row.name}", flush=True)
        before = client.counts()[name]
        counts = [sample(client.url, *case, self._each, row.params) for case in self._cases]
        drafted = client.counts()[name] - before
        found = compare(self._exact, self._plain, {row.name: counts})
        made = {mine: found[theirs] for theirs, mine in _NAMES.items()}
        return {**made, "distribution_drafted": drafted}


def prompts_of(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first short prompts, one for each case."""
    return [p for p in prompts if len(p.input_ids) <= 80][: len(CASES)]
