"""`sglang-ext drafter eval`: accepted tokens a step, by k, on known outputs."""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sglang_ext.block_drafter.accepted_tokens import replay
from sglang_ext.block_drafter.block_predictor import BlockPredictor
from sglang_ext.block_drafter.drafter_files import load_drafter
from sglang_ext.block_drafter.drafter_manifest import Manifest, check_target
from sglang_ext.block_drafter.recorded_states import keep_recorded, recorded_states
from sglang_ext.block_drafter.states_on_disk import StatesOnDisk
from sglang_ext.block_drafter.target_models import load_target
from sglang_ext.block_drafter.target_states import StatesReader, check_examples, kept_states
from sglang_ext.block_drafter.trainer import blocks_to_score
from sglang_ext.block_drafter.training_data import TrainingData, read_file
from sglang_ext.block_drafter.training_set import as_pairs

# Of the data of `eval`, which holds in memory what it reads.
_MOST_TOKENS = 20_000_000


def run(args: argparse.Namespace) -> int:
    """Prints the table; returns the exit code."""
    loaded = load_drafter(args.folder, args.device)
    target = load_target(args.model)
    check_target(args.folder, loaded.manifest, target.name, target.tokenizer)
    data = read_file(args.data, target, _MOST_TOKENS)
    ends = loaded.kept.rows(loaded.manifest.ends).tolist()
    predictor = BlockPredictor(loaded.model, args.device == "cpu", ends)
    scores, manifest = {}, loaded.manifest
    with _states(args, data, manifest) as states:
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


@contextmanager
def _states(
    args: argparse.Namespace, data: TrainingData, manifest: Manifest
) -> Iterator[StatesOnDisk | None]:
    """The target's states of the first `--most` examples, those that were recorded if any were.

    None: the drafter does not read them.
    """
    if manifest.states is None:
        yield None
        return
    check_examples(data)
    recorded = keep_recorded(data, manifest.states.layer, manifest.source)
    del data.examples[args.most :]
    if recorded == manifest.states:
        with closing(recorded_states(data.examples, manifest.source, recorded)) as states:
            yield states
        return
    reader = StatesReader(args.model, manifest.states.layer, args.device)
    with (
        tempfile.TemporaryDirectory() as folder,
        kept_states(Path(folder, "states"), data, manifest.source, reader) as states,
    ):
        yield states
