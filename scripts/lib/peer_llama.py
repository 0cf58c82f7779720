"""llama.cpp, for scripts.bench_cpu_peers: run by the peers' interpreter, without our code.

    python peer_llama.py MODEL.gguf --threads N --context TOKENS [--lookup TOKENS]

Reads a JSON object a line, {"prompts": [[ids], ...], "limits": [tokens, ...], "ends": [ids],
"in_flight": n}, and answers {"outputs": [[ids], ...], "seconds": s, "cpu_s": s}: greedy. With one
in flight llama-cpp-python's own loop runs, with its prompt lookup where --lookup asks for it; with
several, sequences of one llama.cpp context, each step a token of all of them and the whole prompts
of those that have just come (continuous batching, as llama-server does it).
"""

import argparse
import json
import os
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np


def main() -> None:
    # What libraries print belongs to people: answers have the real standard output to themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--lookup", type=int, default=0)
    options = parser.parse_args()
    import llama_cpp  # type: ignore[import-not-found]
    from llama_cpp.llama_speculative import (  # type: ignore[import-not-found]
        LlamaPromptLookupDecoding,
    )

    draft = LlamaPromptLookupDecoding(num_pred_tokens=options.lookup) if options.lookup else None
    llm = llama_cpp.Llama(
        options.model, n_ctx=options.context, n_threads=options.threads,
        n_threads_batch=options.threads, draft_model=draft, verbose=False,
    )  # fmt: skip
    print(json.dumps({"versions": {"llama-cpp-python": llama_cpp.__version__}}), file=answers)
    several: dict[int, Sequences] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        rows, ends = asked["in_flight"], set(asked["ends"])
        work = list(zip(asked["prompts"], asked["limits"], strict=True))
        if rows > 1 and rows not in several:
            several[rows] = Sequences(llama_cpp, llm.model, rows, options.context, options.threads)
        wall, cpu = time.perf_counter(), time.process_time()
        if rows > 1:
            outputs = several[rows].run(work, ends)
        else:
            outputs = [one(llm, prompt, limit, ends) for prompt, limit in work]
        seconds, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        print(json.dumps({"outputs": outputs, "seconds": seconds, "cpu_s": cpu_s}), file=answers)


def one(llm: Any, prompt: list[int], limit: int, ends: set[int]) -> list[int]:
    """The greedy output of one prompt, its end token included."""
    output: list[int] = []
    for token in llm.generate(prompt, temp=0.0, repeat_penalty=1.0):
        output.append(int(token))
        if token in ends or len(output) == limit:
            break
    return output


@dataclass
class Row:
    """A sequence under way. `pending` are its tokens that no pass has read yet."""

    place: int
    limit: int
    pending: list[int]
    read: int = 0
    output: list[int] = field(default_factory=list)


class Sequences:
    """Several sequences in one llama.cpp context, over its C interface.

    Args:
        context: tokens of each.
    """

    def __init__(self, llama: Any, model: Any, rows: int, context: int, threads: int) -> None:
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = rows * context
        params.n_seq_max = rows
        params.n_threads = params.n_threads_batch = threads
        self._llama = llama
        self._context = llama.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp made no context of {rows} x {context} tokens")
        self._batch = llama.llama_batch_init(rows * context, 0, 1)
        self._words = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._rows = rows

    def run(self, work: list[tuple[list[int], int]], ends: set[int]) -> list[list[int]]:
        """The greedy outputs, their end tokens included."""
        outputs: list[list[int]] = [[] for _ in work]
        waiting = deque(Row(i, limit, list(prompt)) for i, (prompt, limit) in enumerate(work))
        under_way: dict[int, Row] = {}
        while waiting or under_way:
            for free in sorted(set(range(self._rows)) - under_way.keys())[: len(waiting)]:
                under_way[free] = waiting.popleft()
            for sequence, token in self._step(under_way).items():
                row = under_way[sequence]
                row.output.append(token)
                row.pending = [token]
                if token in ends or len(row.output) == row.limit:
                    outputs[row.place] = row.output
                    memory = self._llama.llama_get_memory(self._context)
                    self._llama.llama_memory_seq_rm(memory, sequence, -1, -1)
                    del under_way[sequence]
        return outputs

    def _step(self, rows: dict[int, Row]) -> dict[int, int]:
        """One pass over all that is pending; the next token of each sequence."""
        batch, count, last = self._batch, 0, {}
        for sequence, row in rows.items():
            for token in row.pending:
                batch.token[count] = token
                batch.pos[count] = row.read
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = sequence
                batch.logits[count] = False
                row.read += 1
                count += 1
            last[sequence] = count - 1
            batch.logits[count - 1] = True
        batch.n_tokens = count
        if code := self._llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode of {count} tokens returned {code}")
        found = {}
        for sequence, index in last.items():
            logits = self._llama.llama_get_logits_ith(self._context, index)
            found[sequence] = int(np.ctypeslib.as_array(logits, shape=(self._words,)).argmax())
        return found


if __name__ == "__main__":
    main()
