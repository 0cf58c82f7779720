"""Part `llm` of scripts.bench_cpu_peers: SmolLM2 here and in llama.cpp, the same 4-bit weights."""

import argparse
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from scripts.lib.client import generate
from scripts.lib.cpu_peers_asr import turned
from scripts.lib.cpu_peers_common import Taken, ratio_figures, weights_flags
from scripts.lib.data_folder import data_folder
from scripts.lib.peer_process import PeerProcess
from scripts.lib.peer_weights import gguf_of
from scripts.lib.server import Server
from scripts.lib.spec_bench import tokenizer
from sglang_ext.cpu.install import usable_cores
from sglang_ext.sweep.data_files import CARRIED
from sglang_ext.sweep.items import Item, Workload
from sglang_ext.sweep.methods import METHODS, SERVERS
from sglang_ext.sweep.servers import COMMON_FLAGS, RunningServer
from sglang_ext.sweep.workloads import load_workload

WORKLOADS = ("mt-bench", "gsm8k")
PEER, LOOKUP = "llama.cpp", "llama.cpp lookup"
PLAIN, COLD, WARM = "plain", "sssd_cold", "sssd_warm"
# Methods of `sglang-ext sweep` by our rows' names.
OURS = {PLAIN: METHODS["ar"], COLD: METHODS["sssd-cold"], WARM: METHODS["sssd-live"]}
BATCHES = (1, 8)
# Prompts that an engine has before the next one's turn, where it is asked one by one: a host's
# speed was seen to change by 40% within a minute.
TURN = 2
# Outputs have 48 tokens at least, unless the model ends them (half of the most, by chance).
MOST_TOKENS = 96
# llama-cpp-python's documentation recommends 2 where there is no GPU, and has 10 by default.
LOOKUP_TOKENS = 2
PEER_CONTEXT = 2048
_SEED = 0


@dataclass(frozen=True)
class Size:
    """Prompts of each workload, those whose answers were served before, and repeats of each run.

    In full all is served that a sweep serves before: 64 prompts of MT-Bench, 128 of GSM8K.
    """

    prompts: int
    served: int
    repeats: int


FULL, QUICK = Size(16, 128, 2), Size(8, 16, 1)


@dataclass
class Cell:
    """What one engine took for one workload at one batch size, repeat by repeat."""

    taken: list[Taken] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)


Cells = dict[tuple[str, str, int], Cell]
# Items, how many are in flight, and the namespace that they are served in: what that took, and the
# outputs by the items' ids.
Run = Callable[[Sequence[Item], int, str], tuple[Taken, dict[str, list[int]]]]


def llm_figures(options: argparse.Namespace) -> dict[str, float]:
    """The figures; see scripts.bench_cpu_peers.

    Raises:
        UsageError, PeerError, ModelError, WorkloadError: it cannot be measured; says why.
    """
    flags = weights_flags(options.llm_weights, "--llm-weights")
    size = QUICK if options.quick else FULL
    loaded = [workload(name, options.model, size) for name in WORKLOADS]
    with engines(options.model, flags, options.peers, loaded, size) as runs:
        cells = measure(runs, loaded, size.repeats)
    return figures_of(cells)


def workload(name: str, model: str, size: Size) -> Workload:
    """Prompts that are measured, and others that were served before."""
    folder = data_folder("text")
    return load_workload(
        name, tokenizer(model), data=folder if folder.is_dir() else CARRIED, prompts=size.prompts,
        max_tokens=MOST_TOKENS, seed=_SEED, context_len=PEER_CONTEXT,
    )  # fmt: skip


@contextmanager
def engines(
    model: str, flags: Sequence[str], python: Path, workloads: Sequence[Workload], size: Size
) -> Iterator[dict[str, Run]]:
    """All rows' engines, up together."""
    ends = list(tokenizer(model).convert_tokens_to_ids(["<|im_end|>"]))
    args = [str(gguf_of(model)), "--threads", str(usable_cores()), "--context", str(PEER_CONTEXT)]
    with ExitStack() as stack:
        peer = stack.enter_context(PeerProcess("peer_llama.py", args, python))
        lookup = stack.enter_context(
            PeerProcess("peer_llama.py", [*args, "--lookup", str(LOOKUP_TOKENS)], python)
        )
        servers = {
            key: stack.enter_context(started(model, key, flags)) for key in ("plain", "sssd")
        }
        served = [serve_before(servers["plain"], w, size.served) for w in workloads]
        servers["sssd"].add_corpus("peers", [text for texts in served for text in texts(model)])
        yield {
            PEER: lambda items, rows, _: by_peer(peer, items, rows, ends),
            LOOKUP: lambda items, rows, _: by_peer(lookup, items, rows, ends),
            **{name: partial(by_server, servers, name) for name in OURS},
        }


@contextmanager
def started(model: str, key: str, flags: Sequence[str]) -> Iterator[RunningServer]:
    """A server of `sglang-ext sweep`'s kind `key`."""
    all_flags = [*SERVERS[key], *COMMON_FLAGS, *flags]
    with Server(model, all_flags, name=key) as process:
        yield RunningServer(process.url, all_flags, process)


def serve_before(server: RunningServer, loaded: Workload, count: int) -> Callable[[str], list[str]]:
    """Answers to other prompts, as texts: what a warm datastore holds."""
    outputs = answered(server, loaded.served_before[:count], max(BATCHES))

    def texts(model: str) -> list[str]:
        decode = tokenizer(model).decode
        return [decode(ids, skip_special_tokens=True) for ids in outputs.values()]

    return texts


def answered(
    server: RunningServer,
    items: Sequence[Item],
    in_flight: int,
    params: Mapping[str, Any] | None = None,
) -> dict[str, list[int]]:
    """Outputs by the items' ids; whole, not streamed: llama.cpp's loop streams to nobody either.

    Raises:
        httpx.HTTPError: a request failed.
    """

    def ask(item: Item) -> list[int]:
        tokens = item.max_tokens
        return generate(server.url, item.input_ids, params=params, max_new_tokens=tokens).token_ids

    with ThreadPoolExecutor(in_flight) as pool:
        outputs = pool.map(ask, items)
        return {item.id: ids for item, ids in zip(items, outputs, strict=True)}


def by_peer(
    peer: PeerProcess, items: Sequence[Item], rows: int, ends: Sequence[int]
) -> tuple[Taken, dict[str, list[int]]]:
    """A run in llama.cpp."""
    answer = peer.ask(
        prompts=[list(item.input_ids) for item in items],
        limits=[item.max_tokens for item in items],
        ends=list(ends),
        in_flight=rows,
    )
    outputs = {item.id: ids for item, ids in zip(items, answer["outputs"], strict=True)}
    return Taken(answer["seconds"], answer["cpu_s"], sum(map(len, outputs.values()))), outputs


def by_server(
    servers: Mapping[str, RunningServer],
    name: str,
    items: Sequence[Item],
    rows: int,
    namespace: str,
) -> tuple[Taken, dict[str, list[int]]]:
    """A run of one of our methods, from an empty prefix cache."""
    method = OURS[name]
    server = servers[method.server]
    params: dict[str, Any] = dict(method.params)
    if method.fresh_namespace:
        params["namespace"] = namespace
    server.flush_cache()
    cpu, begin = server.cpu_seconds() or 0.0, time.perf_counter()
    outputs = answered(server, items, rows, params)
    seconds = time.perf_counter() - begin
    tokens = sum(map(len, outputs.values()))
    taken = Taken(seconds, (server.cpu_seconds() or 0.0) - cpu, tokens)
    return taken, outputs


def measure(runs: Mapping[str, Run], workloads: Sequence[Workload], repeats: int) -> Cells:
    """Each workload at each batch size in each engine, the engines taking turns."""
    cells: Cells = {}
    for run in runs.values():  # kernels and caches of each
        for rows in BATCHES:
            run(workloads[0].measured[:rows], rows, "peers-first")
    for repeat in range(repeats):
        for loaded in workloads:
            for rows in BATCHES:
                # llama-cpp-python's lookup decodes one sequence.
                names = [name for name in runs if rows == 1 or name != LOOKUP]
                order = {name: runs[name] for name in turned(names, repeat)}
                found = in_turns(order, loaded.measured, rows)
                for name, (taken, outputs) in found.items():
                    cell = cells.setdefault((name, loaded.name, rows), Cell(outputs=outputs))
                    cell.taken.append(taken)
                    print(
                        f"repeat {repeat + 1}  {loaded.name} batch {rows}  {name:18}"
                        f"{taken.tokens_per_s:8.1f} tokens/s, {taken.cpu_s:.1f} CPU s",
                        flush=True,
                    )
    return cells


def in_turns(
    runs: Mapping[str, Run], items: Sequence[Item], rows: int
) -> dict[str, tuple[Taken, dict[str, list[int]]]]:
    """What all items took each engine, in one piece, and the outputs."""
    size = TURN if rows == 1 else len(items)
    # What a method learns of an item serves it for the next; of another method's, nothing does.
    spaces = {name: f"peers-{uuid.uuid4().hex[:12]}" for name in runs}
    taken: dict[str, list[Taken]] = {name: [] for name in runs}
    outputs: dict[str, dict[str, list[int]]] = {name: {} for name in runs}
    for turn, first in enumerate(range(0, len(items), size)):
        for name in turned(list(runs), turn):
            took, made = runs[name](items[first : first + size], rows, spaces[name])
            taken[name].append(took)
            outputs[name] |= made
    return {name: (together(taken[name]), outputs[name]) for name in runs}


def together(taken: Sequence[Taken]) -> Taken:
    """What several pieces took, one after the other."""
    return Taken(
        sum(t.seconds for t in taken), sum(t.cpu_s for t in taken), sum(t.tokens for t in taken)
    )


def figures_of(cells: Cells) -> dict[str, float]:
    """Ratios of tokens/s to llama.cpp's plain decoding, over both workloads."""
    figures: dict[str, float] = {}
    for rows in BATCHES:
        end = "" if rows == 1 else f"_batch{rows}"
        theirs = speeds(cells, PEER, rows)
        figures[f"llamacpp_tokens_per_s{end}"] = sum(theirs) / len(theirs)
        for name in (*OURS, *([LOOKUP] if rows == 1 else [])):
            known = "llamacpp_lookup_ratio" if name == LOOKUP else f"llm_ratio_vs_llamacpp_{name}"
            ours = speeds(cells, name, rows)
            figures[f"{label(name)}_tokens_per_s{end}"] = sum(ours) / len(ours)
            figures |= ratio_figures(known + end, ours, theirs)
    figures["llm_mismatches"] = sum(
        cells[name, loaded, rows].outputs != cells[PLAIN, loaded, rows].outputs
        for name in (COLD, WARM)
        for loaded in WORKLOADS
        for rows in BATCHES
    )
    figures["llamacpp_equal_outputs_percent"] = equal_percent(cells)
    return figures


def label(name: str) -> str:
    """An engine's name within a figure's."""
    return name.replace(".", "").replace(" ", "_")


def speeds(cells: Cells, name: str, rows: int) -> list[float]:
    """Tokens/s of each run, workload by workload."""
    return [t.tokens_per_s for loaded in WORKLOADS for t in cells[name, loaded, rows].taken]


def equal_percent(cells: Cells) -> float:
    """Outputs of llama.cpp that are plain SGLang's at batch 1, in percent."""
    pairs = [
        (cells[PLAIN, loaded, 1].outputs[name], output)
        for loaded in WORKLOADS
        for name, output in cells[PEER, loaded, 1].outputs.items()
    ]
    return 100.0 * sum(a == b for a, b in pairs) / len(pairs)
