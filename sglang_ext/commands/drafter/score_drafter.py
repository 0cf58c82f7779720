"""`sglang-ext drafter eval`: accepted tokens a step, by k, on known outputs."""

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from sglang_ext.block_drafter.accepted_tokens import replay
from sglang_ext.block_drafter.block_predictor import BlockPredictor
from sglang_ext.block_drafter.drafter_files import load_drafter
from sglang_ext.block_drafter.drafter_manifest import check_target
from sglang_ext.block_drafter.target_models import load_target
from sglang_ext.block_drafter.target_states import StatesReader, check_examples, kept_states
from sglang_ext.block_drafter.trainer import blocks_to_score
from sglang_ext.block_drafter.training_data import read_file
from sglang_ext.block_drafter.training_set import as_pairs

# Of the data of `eval`, which holds in memory what it reads.
_MOST_TOKENS = 20_000_000


def run(args: argparse.Namespace) -> int:
    """Prints the table; returns the exit code."""
    loaded = load_drafter(args.folder, args.device)
    target = load_target(args.model)
    check_target(args.folder, loaded.manifest, target.name, target.tokenizer)
    data = read_file(args.data, target, _MOST_TOKENS)
    del data.examples[args.most :]
    ends = loaded.kept.rows(loaded.manifest.ends).tolist()
    predictor = BlockPredictor(loaded.model, args.device == "cpu", ends)
    scores = {}
    with ExitStack() as stack:
        manifest, states = loaded.manifest, None
        if manifest.states is not None:
            check_examples(data)
            reader = StatesReader(args.model, manifest.states.layer, args.device)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()), "states")
            states = stack.enter_context(kept_states(folder, data, manifest.source, reader))
        pairs = as_pairs(data, manifest.source, loaded.kept, args.most, states)
        started = time.monotonic()
        for k in blocks_to_score(manifest.shape.block):
            scores[k] = replay(predictor, pairs, k, len(pairs))
        seconds = time.monotonic() - started
    if args.json:
        print(json.dumps({f"accepted_per_step_k{k}": a.per_step for k, a in scores.items()}))
        return 0
    print(f"{args.folder} on {len(pairs)} outputs of {data.origin} ({seconds:.1f} s)")
    print(f"{'k':>4}  accepted tokens a step  steps")
    for k, accepted in scores.items():
        print(f"{k:>4}  {accepted.per_step:>22.2f}  {accepted.steps}")
    return 0
