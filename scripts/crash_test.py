"""kill -9 at random instants while outputs are ingested, folded and merged: nothing may be lost.

Two kinds of process are killed. Most kills hit a drafting process: SGLang-free, with the drafter
and the durable datastore that a server has, fed as fast as it takes; it acknowledges an output
when the drafter has taken it, as a server answers after that. With --server-kills, real SGLang
servers under concurrent requests are killed too, all their processes at once; an output is
acknowledged when its HTTP response has arrived. After each kill the folder is verified, every
acknowledged output is looked for, and the next process must open it and draft from it.

    python -m scripts.crash_test [--kills N] [--server-kills N] [--quick] [--json FILE]
"""

import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import IO

import numpy as np
import psutil
from tqdm import tqdm

from datastores import verify_folder
from datastores.segment import document_digest
from scripts.lib.client import generate
from scripts.lib.figures import parser, report
from scripts.lib.known_outputs import (
    drafter_on,
    drafts_from,
    is_stored,
    name_of,
    serve,
    stored_documents,
)
from scripts.lib.server import Server
from scripts.lib.spec_bench import spec_bench
from sglang_ext.servers import processes

KILLS, QUICK_KILLS = 200, 20
LONGEST_LIFE_S = 1.5


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, help=f"kills of the drafting process [{KILLS}]")
    options.add_argument("--server-kills", type=int, default=0, help="kills of SGLang servers [0]")
    options.add_argument("--seed", type=int, default=0, help="of the instants [0]")
    options.add_argument("--child", nargs=2, metavar=("FOLDER", "FIRST"), help="(internal)")
    args = options.parse_args()
    if args.child:
        serve_documents(args.child[0], int(args.child[1]))
    kills = args.kills if args.kills is not None else (QUICK_KILLS if args.quick else KILLS)
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="crash-test-") as folder:
        totals = kill_drafting_processes(os.path.join(folder, "drafting"), kills, rng)
        if args.server_kills:
            by_servers = kill_servers(
                args.model, os.path.join(folder, "server"), args.server_kills, rng
            )
            totals = {name: totals[name] + by_servers[name] for name in totals}
    report(totals, args.json)
    return 1 if totals["lost"] or totals["corrupt"] or totals["failed_restarts"] else 0


# -- the drafting process ------------------------------------------------------------------


def serve_documents(folder: str, first: int) -> None:
    """The process that is killed: ingests for ever, a number a line on stdout when it has one."""
    drafter = drafter_on(folder)
    drafted = all(drafts_from(drafter, k) for k in range(max(0, first - 20), first))
    print("serves" if drafted else "does not draft", flush=True)
    k = first
    while True:
        serve(drafter, k)
        print(k, flush=True)
        k += 1
        time.sleep(0.001)


def kill_drafting_processes(folder: str, kills: int, rng: random.Random) -> dict[str, int]:
    lost = corrupt = failed = acknowledged = tokens = 0
    for _ in tqdm(range(kills), desc="kills", disable=None):
        supervisor = processes.start(
            [sys.executable, "-m", "scripts.crash_test", "--child", folder, str(acknowledged)],
            stdout=subprocess.PIPE,
        )
        assert supervisor.stdout is not None
        if supervisor.stdout.readline() != b"serves\n":
            failed += 1
        numbers: list[int] = []
        reader = threading.Thread(target=_read_numbers, args=(supervisor.stdout, numbers))
        reader.start()
        time.sleep(rng.uniform(0, LONGEST_LIFE_S))
        for child in psutil.Process(supervisor.pid).children():  # none: it ended by itself
            child.kill()
        supervisor.wait()  # until what the child started, which folds, has ended too
        reader.join()
        acknowledged = max([acknowledged, *(k + 1 for k in numbers)])
        corrupt += len(verify_folder(folder)) if os.path.isdir(folder) else 0
        gone, acknowledged, tokens = _missing(folder, acknowledged)
        lost += gone
    print(f"drafting process: {kills} kills, {acknowledged} outputs, {tokens} tokens in the store")
    return {"kills": kills, "lost": lost, "corrupt": corrupt, "failed_restarts": failed}


def _read_numbers(stream: IO[bytes], numbers: list[int]) -> None:
    for line in stream:
        if line.endswith(b"\n"):
            numbers.append(int(line))


def _missing(folder: str, acknowledged: int) -> tuple[int, int, int]:
    """(acknowledged outputs that are not there whole, the number to go on from, tokens)."""
    if not os.path.exists(os.path.join(folder, "MANIFEST")):
        return acknowledged, acknowledged, 0
    found = stored_documents(folder)
    missing = sum(not is_stored(found, k) for k in range(acknowledged))
    # The kill may have come between the log and the acknowledgement.
    following = acknowledged + (document_digest(name_of(acknowledged)) in found)
    return missing, following, sum(map(len, found.values()))


# -- SGLang servers ------------------------------------------------------------------------


def kill_servers(model: str, folder: str, kills: int, rng: random.Random) -> dict[str, int]:
    prompts = [list(prompt.input_ids) for prompt in spec_bench(model, max_prompt_tokens=128)]
    flags = ["--speculative-algorithm", "SSSD", "--datastore", folder]
    flags += ["--datastore-fold-tokens", "200"]
    outputs: dict[bytes, list[int]] = {}
    lost = corrupt = failed = 0
    for kill in tqdm(range(kills), desc="server kills", disable=None):
        server = Server(model, flags, name=f"crash-{kill}")
        with ThreadPoolExecutor(4) as pool:
            try:
                server.start().wait()
            except RuntimeError as error:
                print(error, file=sys.stderr)
                failed += 1
                continue
            stop = threading.Event()
            for worker in range(4):
                pool.submit(_ask, server.base_url, prompts[worker::4], outputs, stop)
            time.sleep(rng.uniform(2.0, 15.0))
            server.kill()
            stop.set()
        corrupt += len(verify_folder(folder))
        found = stored_documents(folder)
        lost += sum(
            not np.array_equal(found.get(name, np.empty(0))[-len(output) :], output)
            for name, output in outputs.items()
        )
    print(f"servers: {kills} kills, {len(outputs)} answers acknowledged over HTTP")
    return {"kills": kills, "lost": lost, "corrupt": corrupt, "failed_restarts": failed}


def _ask(
    url: str, prompts: list[list[int]], outputs: dict[bytes, list[int]], stop: threading.Event
) -> None:
    for prompt in prompts:
        if stop.is_set():
            return
        try:
            answer = generate(url, prompt, max_new_tokens=random.randint(4, 24), ignore_eos=True)
        except (OSError, ValueError):
            return  # the server has been killed
        outputs[document_digest(answer.rid)] = answer.token_ids


if __name__ == "__main__":
    sys.exit(main())
