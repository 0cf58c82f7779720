"""SGLang in this process (sgl.Engine), started with flags as a server is, and probed."""

import asyncio
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.gpu_kit import probe
from scripts.gpu_kit.kit import Kit
from sglang_ext import options
from sglang_ext.cpu.install import wants_cpu_engine

# A bare machine's defaults: everything that the phases need, nothing kept between requests.
COMMON = [
    "--disable-radix-cache",
    "--max-running-requests", "64",
    "--random-seed", "0",
    "--log-level", "error",
]  # fmt: skip
# flag -> its values. By default SGLang captures 58 sizes of prefill graphs and 27 of decode graphs
# a width, which takes longer than what is measured with them.
ON_GPU = {
    "--cuda-graph-bs-decode": ["1", "2", "4", "8", "16", "32", "48", "64"],
    "--cuda-graph-bs-prefill": ["64", "256", "512"],
    "--context-length": ["16384"],
    # All that the phases fill, so that two engines that start at once find memory.
    "--max-total-tokens": ["131072"],
}
# What the dry run's machine can spare; its other flags are those of a server on a CPU.
ON_CPU = ["--max-total-tokens", "16384"]
# Logprobs per token that `best_logprobs` keeps.
BEST = 4
# Taken from `env_options` and not from whatever this process was started with.
SPECULATION = ("--speculative-algorithm", "SSSD")


@dataclass(frozen=True)
class Answer:
    """One request's output.

    Attributes:
        tokens: token ids.
        text: the same, decoded.
        steps: verify steps it took; 0 without speculation.
        logprobs: of the tokens, where asked for.
    """

    tokens: list[int]
    text: str
    steps: int
    logprobs: list[float] | None


class Engine:
    """One model loaded once; a context manager.

    Args:
        kit: whose checkpoint is served, with its share of the GPU's memory.
        flags: `sglang serve`'s, over COMMON.
        env_options: sglang-ext's options by name (drafter, budget, oracle_file, ...).
    """

    def __init__(
        self, kit: Kit, flags: Sequence[str] = (), env_options: Mapping[str, str] | None = None
    ):
        self._saved = dict(os.environ)
        for name, value in (env_options or {}).items():
            os.environ[options.env_name(name)] = value
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-kit-", ignore_cleanup_errors=True)
        try:
            self._engine = _start(kit, ["--model-path", str(kit.model), *COMMON, *flags])
        except BaseException:
            self._restore()
            raise

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.shutdown()
        self._restore()

    def _restore(self) -> None:
        os.environ.clear()
        os.environ.update(self._saved)
        self._folder.cleanup()

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        at_once: int = 0,
        apart_s: float = 0.0,
        **request: Any,
    ) -> list[Answer]:
        """Every prompt's output, in order.

        Args:
            sampling: SGLang's sampling_params, of all or of each.
            at_once: requests in flight at most; 0: all.
            apart_s: seconds between one request's arrival and the next's.
            request: further fields of SGLang's GenerateReqInput, the same for all.
        """
        found = self._generate(prompts, sampling, at_once, apart_s, request)
        return [_answer(one) for one in found]

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        at_once: int,
        apart_s: float,
        request: Mapping[str, Any],
    ) -> list[Any]:
        """`answers` as SGLang gives them."""
        each = [sampling] * len(prompts) if isinstance(sampling, Mapping) else list(sampling)
        gate = asyncio.Semaphore(at_once or len(prompts))

        async def one(number: int) -> Any:
            await asyncio.sleep(number * apart_s)
            async with gate:
                return await self._engine.async_generate(
                    input_ids=list(prompts[number]), sampling_params=dict(each[number]), **request
                )

        async def every() -> list[Any]:
            return await asyncio.gather(*(one(n) for n in range(len(prompts))))

        return list(self._engine.loop.run_until_complete(every()))

    def best_logprobs(
        self, prompts: Sequence[Sequence[int]], tokens: int
    ) -> list[tuple[dict[int, float], dict[int, float]]]:
        """For each token of greedy answers the BEST logprobs, of its decode step and of a prefill.

        Args:
            tokens: per answer.

        Returns:
            pairs of logprobs by token: from the step that wrote it, and from one prefill of the
            prompt and the whole answer.
        """
        asked = {"return_logprob": True, "top_logprobs_num": BEST}
        pairs = []
        written = self._generate(prompts, greedy(tokens), 0, 0.0, asked)
        whole = [
            [*prompt, *found["output_ids"]] for prompt, found in zip(prompts, written, strict=True)
        ]
        read = self._generate(whole, greedy(1), 0, 0.0, asked | {"logprob_start_len": 0})
        for prompt, decoded, prefilled in zip(prompts, written, read, strict=True):
            # The first one is of the first token, which nothing precedes.
            rows = prefilled["meta_info"]["input_top_logprobs"][len(prompt) :]
            steps = decoded["meta_info"]["output_top_logprobs"]
            pairs += [(_by_token(a), _by_token(b)) for a, b in zip(steps, rows, strict=True)]
        return pairs

    def begin(self, what: str) -> None:
        """Have the probe note `steps`, `logits` or `syncs` from now on."""
        self._engine.collective_rpc("gpu_kit", name=what)

    def noted(self, what: str) -> Any:
        """What the probe noted since `begin`; it stops."""
        path = Path(self._folder.name) / f"{what}.json"
        self._engine.collective_rpc("gpu_kit", name=what, path=str(path))
        return json.loads(path.read_text())

    def trace(self, path: Path, steps: int) -> None:
        """Trace the next decode steps into `path`."""
        self._engine.collective_rpc("gpu_kit", name="trace", path=str(path), steps=steps)

    def largest_logits(self, contexts: Sequence[Sequence[int]]) -> list[dict[int, float]]:
        """The largest logits of the token after each context, read in prefills one by one."""
        self.begin("logits")
        for context in contexts:
            self.answers([context], {"max_new_tokens": 1, "temperature": 0.0})
        rows = self.noted("logits")
        return [{int(token): value for token, value in row.items()} for row in rows]


def speculation_flags(kit: Kit) -> list[str]:
    """Flags of SSSD, verified by FlashInfer where there is a GPU."""
    return [*SPECULATION, *([] if kit.emulated else ["--attention-backend", "flashinfer"])]


def greedy(tokens: int, **further: Any) -> dict[str, Any]:
    """sampling_params of a greedy answer of a fixed length."""
    return {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.0} | further


def _answer(found: Mapping[str, Any]) -> Answer:
    meta = found["meta_info"]
    kept = meta.get("output_token_logprobs")
    return Answer(
        list(found["output_ids"]),
        found["text"],
        int(meta.get("spec_verify_ct") or 0),
        [entry[0] for entry in kept] if kept else None,
    )


def _by_token(entries: Sequence[Sequence[Any]]) -> dict[int, float]:
    """SGLang's (logprob, token, text) by token."""
    return {int(token): float(value) for value, token, _ in entries}


def _start(kit: Kit, flags: list[str]) -> Any:
    from sglang.srt.entrypoints.engine import Engine as SglangEngine
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    class Probed(SglangEngine):
        run_scheduler_process_func = staticmethod(probe.run_scheduler)

    if wants_cpu_engine():
        from sglang_ext.cpu.defaults import default_cpu_args

        flags = [*flags, *ON_CPU]
        flags += default_cpu_args(flags)
    else:
        share = ["--mem-fraction-static", str(kit.memory_fraction)]
        flags = [*gpu_flags(flags), *share, *flags]
    load_plugins()
    server_args = prepare_server_args(flags)
    return Probed(server_args=server_args)


def gpu_flags(given: Sequence[str]) -> list[str]:
    """ON_GPU's flags with their values, without those that `given` has."""
    return [
        word for flag, values in ON_GPU.items() if flag not in given for word in (flag, *values)
    ]
