"""What is left of a server's speed on cores that other programs use too.

Busy processes (loops that never wait) are started beside a server: as many as the cores, then four
times as many. It is asked for the same greedy output alone, beside the ones and beside the others,
by turns, each time once it has seen who is there: shared_core_ratio_N_busy is the median over the
rounds of the speed there by the speed alone. What a fair share is, the kernel says (Linux's
autogroups divide cores between sessions, and each busy process has one of its own), so what the
server did with its share is told apart: cpu_per_token_N_busy is its processor time per token there
by that alone. Above 1 it was wasted.

--spins compares servers by how long OpenMP's threads spin at a barrier (GOMP_SPINCOUNT, see
docs/cpu.md) before they let go of their core; "never" is a server that does not look whether others
want the cores (SGLANG_EXT_CPU_SHORT_WAITS=never). All are up together. The figures without a name
are of the first one in the list; alone_ratio_spin_NAME is another's speed alone by the first's.

    python -m scripts.bench_shared_cores [--spins default,never,N] [--tokens N] [--quick]
        [--model M] [--json FILE]
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from scripts.lib.client import generate
from scripts.lib.figures import parser, report
from scripts.lib.server import Server
from scripts.lib.spec_bench import spec_bench
from sglang_ext.cpu.install import usable_cores
from sglang_ext.cpu.shared_cores import WAITS_VARIABLE
from sglang_ext.servers import processes

DEFAULT, NEVER = "default", "never"
ROUNDS, QUICK_ROUNDS = 5, 2
TOKENS = 256
# Of work, until a server has seen that others want the cores, or do no more (cpu/shared_cores.py).
SETTLED_S = 4.0
_BUSY = "while True: pass"


@dataclass(frozen=True)
class Run:
    """One output: its speed, and the server's processor seconds per token, prefill included."""

    tokens_per_s: float
    cpu_s: float


def main() -> int:
    made = parser(__doc__)
    made.add_argument(
        "--spins", default=DEFAULT, help="of each server: GOMP_SPINCOUNT, never, or [%(default)s]"
    )
    made.add_argument("--tokens", type=int, default=TOKENS, help="of an output [%(default)s]")
    options = made.parse_args()
    figures = shared_core_figures(
        options.model, options.spins.split(","), options.tokens, quick=options.quick
    )
    report(figures, options.json)
    return 0


def shared_core_figures(
    model: str,
    spins: Sequence[str] = (DEFAULT,),
    tokens: int = TOKENS,
    *,
    quick: bool,
    args: Sequence[str] = (),
) -> dict[str, float]:
    """Measure, and return the figures.

    Args:
        spins: of each server, see above.
        tokens: of an output.
        args: further flags of the servers.
    """
    rounds = QUICK_ROUNDS if quick else ROUNDS
    prompts = spec_bench(model, max_prompt_tokens=120)[:rounds]
    cores = usable_cores()
    neighbours = (0, cores, 4 * cores)
    with ExitStack() as stack:
        servers = {name: stack.enter_context(server_with(model, name, args)) for name in spins}
        for server in servers.values():
            generate(server.base_url, prompts[0].input_ids, max_new_tokens=8)
        runs: dict[tuple[str, int], list[Run]] = {}
        for number, prompt in enumerate(prompts):
            for busy in neighbours:
                with busy_processes(busy):
                    for name, server in servers.items():
                        run = measured(server, prompt.input_ids, tokens)
                        runs.setdefault((name, busy), []).append(run)
                        print(
                            f"round {number + 1} of {rounds}, {busy} busy, spins {name}: "
                            f"{run.tokens_per_s:.2f} tokens/s, {run.cpu_s:.3f} CPU s a token",
                            flush=True,
                        )
    return figures_of(runs, list(servers), neighbours)


@contextmanager
def server_with(model: str, spins: str, args: Sequence[str] = ()) -> Iterator[Server]:
    """A plain server whose threads spin so many times."""
    server = Server(model, args, name=f"spins-{spins}")
    if spins == NEVER:
        server.env[WAITS_VARIABLE] = NEVER
    elif spins != DEFAULT:
        server.env["GOMP_SPINCOUNT"] = spins
    with server:
        yield server


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that take all of the processor that they get."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        started += [processes.start([sys.executable, "-c", _BUSY]) for _ in range(count)]
        yield
    finally:
        for process in started:
            processes.stop_group(process)


def measured(server: Server, input_ids: Sequence[int], tokens: int) -> Run:
    """One greedy output, whole, once the server knows who is there.

    Not streamed: beside busy processes its tokens reach this one in bunches, when it runs.
    """
    begin = time.monotonic()
    while time.monotonic() < begin + SETTLED_S:
        generate(server.base_url, input_ids, max_new_tokens=tokens, ignore_eos=True)
    before = server.cpu_seconds()
    answer = generate(server.base_url, input_ids, max_new_tokens=tokens, ignore_eos=True)
    count = len(answer.token_ids)
    return Run(count / answer.seconds, (server.cpu_seconds() - before) / count)


def figures_of(
    runs: dict[tuple[str, int], list[Run]], spins: Sequence[str], neighbours: Sequence[int]
) -> dict[str, float]:
    """The figures, from a run each round by server and number of busy processes."""

    def ratio(of: tuple[str, int], to: tuple[str, int], what: str) -> float:
        pairs = zip(runs[of], runs[to], strict=True)
        return statistics.median(getattr(a, what) / getattr(b, what) for a, b in pairs)

    first = spins[0]
    figures = {"tokens_per_s_alone": statistics.median(r.tokens_per_s for r in runs[first, 0])}
    for name in spins:
        label = "" if name == first else f"_spin_{name}"
        if label:
            figures[f"alone_ratio{label}"] = ratio((name, 0), (first, 0), "tokens_per_s")
        for busy in neighbours[1:]:
            at, alone = (name, busy), (name, 0)
            figures[f"shared_core_ratio_{busy}_busy{label}"] = ratio(at, alone, "tokens_per_s")
            figures[f"cpu_per_token_{busy}_busy{label}"] = ratio(at, alone, "cpu_s")
    return figures


if __name__ == "__main__":
    sys.exit(main())
