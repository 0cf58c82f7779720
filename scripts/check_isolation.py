"""Isolation of tenants: in drafts, on a server, and behind both routers.

Parts (`--parts`):
- drafts: every draft tree of the server's own drafters, in this process (isolation_drafts.py).
- server: one server over HTTP: whether another client's session changes an answer, what comes back
  after deletions, whether one tenant takes what belongs to all (isolation_server.py).
- pd: tenants, keys and deletions through the mini load balancer and SGLang's Rust router, with
  prefill and decode servers behind them (isolation_pd.py; needs what `sglang-ext pd` needs).

Figures: leaks, deletion_leftovers (over memory, disk and sessions), cross_session_changes and
starved_tenants should be 0, pd_isolated_mini and pd_isolated_rust 1.

    python -m scripts.check_isolation [--parts drafts,server,pd] [--quick] [--json FILE]
"""

import sys

from scripts.lib import isolation_drafts, isolation_pd, isolation_server
from scripts.lib.check_parts import Part, figures_of, parts_of
from scripts.lib.figures import parser, report

PARTS: dict[str, Part] = {
    "drafts": isolation_drafts.check,
    "server": isolation_server.check,
    "pd": isolation_pd.check,
}
# Two parts look for it, each elsewhere.
_SUMMED = "deletion_leftovers"
_FAILURES = ("leaks", _SUMMED, "cross_session_changes", "starved_tenants")


def main() -> int:
    args = parser(__doc__)
    args.add_argument("--contexts", type=int, default=60, help="texts per tenant and round [60]")
    options = parts_of(args, PARTS, "drafts,server")
    figures: dict[str, float] = {}
    shown = True
    for found in figures_of(options, PARTS):
        if found is None:
            shown = False
            continue
        if _SUMMED in found and _SUMMED in figures:
            found[_SUMMED] += figures[_SUMMED]
        figures |= found
    report(figures, options.json)
    apart = all(value for name, value in figures.items() if name.startswith("pd_isolated"))
    return int(not shown or not apart or any(figures.get(name, 0) for name in _FAILURES))


if __name__ == "__main__":
    sys.exit(main())
