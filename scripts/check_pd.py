"""Prefill and decode on servers of their own, behind the router: tokens, speed, datastore, kills.

Parts, each with servers of its own (`--parts`):
- tokens: prompts through the router against a single plain server, token id by token id, with
  plain decoding and with SSSD (whose budget verifies all it drafts, and as users have it); then
  SSSD's decode speed over plain decoding's, in this set-up and on a single server, long prompts
  included, all at once by turns; and how long before a request's KV its drafter was ready.
- shared: two decode servers on one datastore; how long after one has served an output the other
  knows it, and whether it drafts from it.
- kills: each process in turn is killed under load (kill -9); what becomes of the requests.
- whisper: whether SGLang transcribes in this set-up.

    python -m scripts.check_pd [--prompts N] [--tokens N] [--long N] [--kills N] [--parts A,B]
        [--quick] [--docs DIR] [--json FILE]
"""

import argparse
import sys
from collections.abc import Callable

from scripts.lib import pd_kills, pd_shared, pd_tokens, pd_whisper
from scripts.lib.figures import parser, report
from scripts.lib.pd_page import write_page
from scripts.lib.result_page import add_docs_flag
from sglang_ext.disaggregation.transfer import check_transfer_backend
from sglang_ext.preflight import PreflightError

PARTS: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {
    "tokens": pd_tokens.check,
    "shared": pd_shared.check,
    "kills": pd_kills.check,
    "whisper": pd_whisper.check,
}


def main() -> int:
    args = parser(__doc__)
    args.add_argument("--prompts", type=int, default=100, help="prompts of Spec-Bench [100]")
    args.add_argument("--tokens", type=int, default=64, help="tokens per answer [64]")
    args.add_argument("--long", type=int, default=4, help="long prompts besides [4]")
    args.add_argument("--kills", type=int, default=20, help="kills, the processes in turn [20]")
    args.add_argument("--parts", default=",".join(PARTS), help="which ones [all]")
    add_docs_flag(args)
    options = args.parse_args()
    chosen = options.parts.split(",")
    if unknown := [name for name in chosen if name not in PARTS]:
        args.error(f"--parts {','.join(unknown)}: expected some of {', '.join(PARTS)}")
    if options.quick:
        options.prompts, options.long, options.kills = 8, 1, 4
    try:
        check_transfer_backend("mooncake")
    except PreflightError as error:
        print(f"check_pd: error: {error}", file=sys.stderr)
        return 2
    figures: dict[str, float] = {}
    for name in chosen:
        print(f"-- {name}", flush=True)
        figures |= PARTS[name](options)
    report(figures, options.json)
    if options.docs:
        write_page(options.docs, figures, options.model)
    bad = ("mismatches", "hangs", "wrong")
    return int(any(figures.get(name, 0) for name in bad))


if __name__ == "__main__":
    sys.exit(main())
