"""What operators ask of tenants, corpora, predictions, datastores, and servers that share one.

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
- ops: the operations pack (docs/operations.md). dashboard_queries_empty, alert_queries_empty: those
  that ask for a series or a label which a server's /metrics does not show. dashboard_problems,
  alert_problems, dockerfile_problems, compose_problems, kubernetes_problems, systemd_problems: what
  linters say of the files. openapi_5xx: of openapi_requests that Schemathesis made, by
  /openapi.json, on our routes; openapi_undescribed: answers that it does not describe;
  openapi_taken: requests that were a 200.
- fleet: two processes on one datastore, with the drafter and the datastore of a server.
  fleet_found_seconds: longest time from an output's acknowledgement by one to its being a draft on
  the other. Either is killed (kill -9) 50 times; fleet_lost: acknowledged outputs that are missing;
  fleet_corrupt: damage; fleet_failed_starts. Where the one that folds was killed,
  fleet_election_seconds: until the other one folds; fleet_ingest_gap_seconds: the longest time
  meanwhile in which the other one took nothing in.
- fleet_servers, only if asked for: the same of two SGLang servers, by HTTP, with fewer kills.
  fleet_servers_warm_gain: accept length of what the other one has served, over that before;
  _answer_gap_seconds: longest time between answers of the one that was left.
- ship: datastores that travel. snapshot_p99_ratio: 99th percentile of requests' seconds while a
  server's datastore is copied, over that without; snapshot_problems: what `verify` finds in the
  copies. push_speed_ratio, pull_speed_ratio: bytes per second over those of a plain copy, of 1 GB
  (--quick: 128 MiB). export_draft_mismatches: drafts that differ between a corpus and what its
  export was built into.

    python -m scripts.check_operators [--parts salts,fleet,ship] [--quick] [--json FILE]
"""

import sys

from scripts.lib import (
    operators_corpora,
    operators_fleet,
    operators_fleet_servers,
    operators_ops,
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
    "ops": operators_ops.check,
    "fleet": operators_fleet.check,
    "fleet_servers": operators_fleet_servers.check,
    "ship": operators_ship.check,
}
_DEFAULT_PARTS = "prediction,salts,corpora,ops,fleet,ship"
# Must be 0; figures of speed depend on the machine, and fail nothing.
_FAILURES = (
    "prediction_mismatches",
    "usage_errors",
    "leaks",
    "contradictions_accepted",
    "dashboard_queries_empty",
    "alert_queries_empty",
    "dashboard_problems",
    "alert_problems",
    "dockerfile_problems",
    "compose_problems",
    "kubernetes_problems",
    "systemd_problems",
    "openapi_5xx",
    "openapi_undescribed",
    *(f"{part}_{what}" for part in ("fleet", "fleet_servers") for what in ("lost", "corrupt")),
    "fleet_failed_starts",
    "snapshot_problems",
    "export_draft_mismatches",
)
_LEAST_ACCEPT_RATIO = 0.99
# Most seconds.
_LIMITS = {
    f"{part}_{what}_seconds": seconds
    for part in ("fleet", "fleet_servers")
    for what, seconds in (("found", 1.0), ("election", 5.0), ("ingest_gap", 5.0))
}


def main() -> int:
    args = parser(__doc__)
    args.add_argument("--edits", type=int, default=200, help="answers compared [%(default)s]")
    args.add_argument("--drafts", type=int, default=10_000, help="trees looked at [%(default)s]")
    options = parts_of(args, PARTS, _DEFAULT_PARTS)
    figures: dict[str, float] = {}
    shown = True
    for found in figures_of(options, PARTS):
        shown = shown and found is not None
        figures |= found or {}
    report(figures, options.json)
    wrong = any(figures.get(name, 0) for name in _FAILURES)
    worse = figures.get("corpora_accept_ratio", 1.0) < _LEAST_ACCEPT_RATIO
    late = any(figures.get(name, 0.0) > most for name, most in _LIMITS.items())
    return int(not shown or wrong or worse or late)


if __name__ == "__main__":
    sys.exit(main())
