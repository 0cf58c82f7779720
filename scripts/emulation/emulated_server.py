"""A real SGLang server on the CPU that takes the CUDA path, against plain SGLang on the CPU.

The emulated server has overlap scheduling on, FlashInfer's backend over emulated wrappers, and our
worker as on a device (device_path.py). Plain SGLang is the CPU server that users have: attention
backend tree_cpu, no overlap. Answers are compared token by token; jobs join and leave batches of
up to eight, features and drafters mixed. Where an answer differs, plain SGLang is asked again,
alone: if it contradicts itself, the answer proves nothing, and is counted as excluded.

    python -m scripts.emulation.emulated_server [--quick] [--json FILE]
"""

import re
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from scripts.emulation import cases
from scripts.emulation.cuda_environment import environment, one_thread
from scripts.emulation.traffic import Job, ask, difference, first_difference, run
from scripts.lib.figures import parser, report
from scripts.lib.http_client import HTTP
from scripts.lib.server import Server
from scripts.lib.spec_bench import MODEL, spec_bench

IN_FLIGHT = 8
_CHUNKS = ["--chunked-prefill-size", str(cases.CHUNK)]
# SGLang's own test switch: at every so many passes a request is retracted, whatever it asked for.
_RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
_SSSD = ["--speculative-algorithm", "SSSD", "--enable-metrics"]
_IDLE_S = 120
_RUNNING = re.compile(r"^sglang:num_running_reqs\{.*\} (\S+)$", re.M)


class EmulatedServer(Server):
    """One server process group that takes the CUDA path; arguments as Server's.

    Without --speculative-algorithm it is plain SGLang over the same attention, overlap on.
    """

    def __init__(self, model: str, args: Sequence[str] = (), **options: Any):
        super().__init__(model, args, **options)
        ours = "scripts.emulation.serve"
        self.command = [ours if word == "sglang_ext.cli" else word for word in self.command]


def plain_server(name: str = "plain") -> Server:
    """Plain SGLang on the CPU, prefills in the same chunks; not started."""
    return Server(MODEL, _CHUNKS, name=name)


def emulated_server(oracle: Path | None = None, *more: str) -> EmulatedServer:
    """The emulated server with every drafter of cases.py, a tight KV pool; not started."""
    drafters = ["--drafters", "random,ssbd"]
    if oracle is not None:
        drafters = ["--drafters", "random,ssbd,oracle", "--oracle-file", str(oracle)]
    return EmulatedServer(MODEL, [*_SSSD, *drafters, *_CHUNKS, *more], name="emulated")


def retracting() -> AbstractContextManager[None]:
    """Servers that start within it retract requests all the time."""
    return environment(**_RETRACTING)


def emulated_figures(quick: bool) -> dict[str, float]:
    """Ask the servers everything, print what differs, and count.

    Returns:
        emulated_prompts (different ones, without those of features), emulated_answers,
        emulated_mismatches (all of them), emulated_mismatches_FEATURE for each feature, "prompts"
        among them, emulated_excluded (plain SGLang contradicts itself), emulated_retractions,
        emulated_stuck (requests that run on after all have ended).
    """
    prompts = spec_bench(MODEL, max_prompt_tokens=80 if quick else 120)[: 21 if quick else 104]
    jobs = cases.make_cases(prompts, 16 if quick else 32, 1 if quick else 3, not quick)
    with one_thread(), plain_server() as plain, tempfile.TemporaryDirectory() as folder:
        expected = _timed("plain", plain, jobs, drafted=False)
        oracle = Path(folder) / "truth.jsonl"
        oracle.write_text("\n".join(cases.oracle_lines(jobs, expected)))
        with retracting(), emulated_server(oracle) as emulated:
            check_settings(emulated)
            got = _timed("emulated", emulated, jobs, drafted=True)
            stuck = left_running(emulated)
            retracted = retractions(emulated)
        figures = _count(plain, jobs, got, expected)
    return {
        "emulated_prompts": len(prompts),
        **figures,
        "emulated_retractions": retracted,
        "emulated_stuck": stuck,
    }


def check_settings(server: Server) -> None:
    """Make sure that it is what it is to emulate.

    Raises:
        RuntimeError: overlap scheduling is off, or another backend serves attention.
    """
    settings = HTTP.get(f"{server.base_url}/server_info", timeout=60).json()
    if settings["disable_overlap_schedule"] or settings["attention_backend"] != "flashinfer":
        raise RuntimeError(
            f"the emulated server runs with {settings['attention_backend']}, overlap "
            f"{'off' if settings['disable_overlap_schedule'] else 'on'}"
        )


def left_running(server: Server) -> float:
    """Requests that still run although every client has its answer or has gone."""
    deadline = time.monotonic() + _IDLE_S
    while (running := _running(server)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return running


def _running(server: Server) -> float:
    text = HTTP.get(f"{server.base_url}/metrics", timeout=60).text
    return sum(float(value) for value in _RUNNING.findall(text))


def retractions(server: Server) -> int:
    """How many requests it took out of the batch, to come back later."""
    counts = re.findall(r"#retracted_reqs: (\d+)", server.log.read_text(errors="replace"))
    return sum(map(int, counts))


def _timed(label: str, server: Server, jobs: Sequence[Job], *, drafted: bool) -> list[Any]:
    start = time.perf_counter()
    answers = run(server.base_url, jobs, drafted=drafted, in_flight=IN_FLIGHT)
    print(f"{label}: {len(jobs)} jobs, {time.perf_counter() - start:.0f} s", flush=True)
    return answers


def _count(
    plain: Server, jobs: Sequence[Job], got: Sequence[Any], expected: Sequence[Any]
) -> dict[str, float]:
    """Mismatches by feature; a job that differs is asked of plain SGLang again, alone."""
    counts = {name: 0 for name in dict.fromkeys(job.feature for job in jobs)}
    excluded = 0
    for number, (job, ours, theirs) in enumerate(zip(jobs, got, expected, strict=True)):
        wrong = difference(job, ours, theirs)
        if wrong is None:
            continue
        if not _same_ids(ask(plain.base_url, job, drafted=False), theirs):
            excluded += 1
            print(f"    #{number} {job.name} {wrong}: excluded, so does plain SGLang")
            continue
        counts[job.feature] += 1
        print(f"    #{number} {job.name} {wrong}")
    return {
        "emulated_answers": len(jobs),
        "emulated_mismatches": sum(counts.values()),
        **{f"emulated_mismatches_{name}": count for name, count in counts.items()},
        "emulated_excluded": excluded,
    }


def _same_ids(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return all(_same_ids(x, y) for x, y in zip(a, b, strict=True))
    return first_difference(a["output_ids"], b["output_ids"]) is None


def main() -> int:
    options = parser(__doc__).parse_args()
    figures = emulated_figures(options.quick)
    report(figures, options.json)
    return int(any(value for name, value in figures.items() if "mismatches" in name))


if __name__ == "__main__":
    sys.exit(main())
