"""What operators ask of tenants, corpora, predictions and datastores.

Parts (`--parts`):
- prediction: OpenAI's `prediction`, by chat completions of a server beside plain SGLang.
  prediction_mismatches: of --edits answers with an edited, an unrelated or a right prediction,
  those that are not plain SGLang's token for token. usage_errors: answers whose counts are missing
  or do not add up. prediction_speedup: output tokens per second where 95% of 300 tokens stay, over
  plain SGLang's; prediction_unrelated_ratio: the same with a text that has nothing to do with it.
- salts: no server's drafts cross tenants. leaks: tokens of another tenant in --drafts draft trees,
  with tenants by `cache_salt` and with corpora that are bound to them; own_text_drafts: trees with
  a tenant's own. contradictions_accepted: requests with a salt and another namespace, on every
  route, that are no 400.
- corpora: nine corpora of which a request chooses the right one. corpora_accept_ratio and
  corpora_time_ratio: accept length and seconds of drafting over those with that corpus alone;
  corpora_unchosen_ratio: the accept length over it where all nine are read.
- ship: datastores that travel. snapshot_p99_ratio: 99th percentile of requests' seconds while a
  server's datastore is copied, over that without; snapshot_problems: what `verify` finds in the
  copies. push_speed_ratio, pull_speed_ratio: bytes per second over those of a plain copy, of 1 GB
  (--quick: 128 MiB). export_draft_mismatches: drafts that differ between a corpus and what its
  export was built into.

    python -m scripts.check_operators [--parts salts,corpora,ship] [--quick] [--json FILE]
"""

import sys

from scripts.lib import (
    operators_corpora,
    operators_prediction,
    operators_salts,
    operators_ship,
)
from scripts.lib.check_parts import Part, figures_of, parts_of
from scripts.lib.figures import parser, report

PARTS: dict[str, Part] = {
    "prediction": operators_prediction.check,
    "salts": operators_salts.check,
    "corpora": operators_corpora.check,
    "ship": operators_ship.check,
}
# Must be 0; figures of speed depend on the machine, and fail nothing.
_FAILURES = (
    "prediction_mismatches",
    "usage_errors",
    "leaks",
    "contradictions_accepted",
    "snapshot_problems",
    "export_draft_mismatches",
)
_LEAST_ACCEPT_RATIO = 0.99


def main() -> int:
    args = parser(__doc__)
    args.add_argument("--edits", type=int, default=200, help="answers compared [%(default)s]")
    args.add_argument("--drafts", type=int, default=10_000, help="trees looked at [%(default)s]")
    options = parts_of(args, PARTS, ",".join(PARTS))
    figures: dict[str, float] = {}
    shown = True
    for found in figures_of(options, PARTS):
        shown = shown and found is not None
        figures |= found or {}
    report(figures, options.json)
    wrong = any(figures.get(name, 0) for name in _FAILURES)
    worse = figures.get("corpora_accept_ratio", 1.0) < _LEAST_ACCEPT_RATIO
    return int(not shown or wrong or worse)


if __name__ == "__main__":
    sys.exit(main())
