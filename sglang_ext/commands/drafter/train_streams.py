"""`sglang-ext drafter train --kind streaming`: lookahead streams for Mirror's draft model."""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from sglang_ext import models
from sglang_ext.block_drafter.checkpoints import FOLDER, Checkpoints
from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError, target_name
from sglang_ext.block_drafter.held_outputs import held_folder
from sglang_ext.block_drafter.recipes import StreamRecipe
from sglang_ext.block_drafter.target_models import TargetModel, load_target
from sglang_ext.block_drafter.training_data import Example, TrainingData
from sglang_ext.commands.drafter.training_arguments import (
    check_training,
    progress_bar,
    read_data,
    recipe_of,
    sharing_cores,
)
from sglang_ext.mirror.executor_settings import check_tokenizer
from sglang_ext.mirror.lm_loading import DraftModelError, load
from sglang_ext.mirror.streaming.lookahead_streams import LookaheadStreams
from sglang_ext.mirror.streaming.stream_files import (
    NAME,
    StreamManifest,
    StreamsError,
    draft_fingerprint,
    write_streams,
)
from sglang_ext.mirror.streaming.stream_passages import Passage, passages_of
from sglang_ext.mirror.streaming.stream_training import (
    Kept,
    StreamProgress,
    StreamTrainer,
    fresh_streams,
)

_HELD_OUT_PART, _MOST_HELD_OUT, _LEAST = 0.05, 32, 10


def run(args: argparse.Namespace) -> int:
    """Trains; returns the exit code."""
    if not args.draft_model:
        raise BlockDrafterError("--kind streaming needs --draft-model, whose streams they are")
    check_training(args)
    recipe = recipe_of(args, StreamRecipe())
    if (args.out / NAME).exists() and not (args.out / FOLDER).is_dir():
        raise BlockDrafterError(f"{args.out} holds trained streams already: name another folder")
    target = load_target(args.model)
    data = read_data(args, target)
    learned, held = _divided(data.examples, args.streams)
    print(
        f"{data.origin}: {len(learned):,} outputs, {len(held):,} held out, "
        f"{data.left_out:,} left out",
        file=sys.stderr,
    )
    try:
        with held_folder(args.out), sharing_cores(args):
            scores = _trained(args, recipe, target, learned, held, data)
    except (models.ModelError, DraftModelError, StreamsError, ValueError) as error:
        raise BlockDrafterError(str(error)) from None
    if not (args.out / NAME).exists():
        raise BlockDrafterError(
            "nothing was learned: no evaluation was better than the untrained streams; give more "
            "--steps, or another --learning-rate"
        )
    shares = ", ".join(f"stream {j}: {share:.1%}" for j, share in enumerate(scores, 1))
    print(f"{args.out}: tokens foreseen in {len(held)} held-out outputs, {shares}")
    return 0


def _trained(
    args: argparse.Namespace,
    recipe: StreamRecipe,
    target: TargetModel,
    learned: Sequence[Passage],
    held: Sequence[Passage],
    data: TrainingData,
) -> Sequence[float]:
    folder = models.resolve(args.draft_model)
    check_tokenizer(folder, target.tokenizer)
    model = load(folder, "fp32", args.device)
    manifest = StreamManifest(
        draft=draft_fingerprint(folder),
        draft_name=target_name(folder),
        target=target.name,
        streams=args.streams,
        rank=args.rank,
        layers=model.shape.layers,
        data=data.summary(),
        training=asdict(recipe),
    )

    def keep(streams: LookaheadStreams, shares: Sequence[float]) -> None:
        found = {"held_out": len(held), "foreseen": [round(share, 4) for share in shares]}
        write_streams(args.out, replace(manifest, scores=found), streams)

    sizes = {"streams": args.streams, "rank": args.rank}
    identity = {"data": data.digest(), "draft": manifest.draft, **sizes}
    kept = Kept(keep, Checkpoints(args.out), identity)
    made = fresh_streams(model, args.streams, args.rank, recipe.seed)
    with progress_bar(recipe.steps) as show:

        def tell(progress: StreamProgress) -> None:
            foreseen = ", ".join(f"{share:.0%}" for share in progress.foreseen)
            show(progress.step, f"loss {progress.loss:.3f}, foreseen {foreseen}")

        return StreamTrainer(model, made, learned, held, recipe, kept, tell).run()


def _divided(examples: Sequence[Example], streams: int) -> tuple[list[Passage], list[Passage]]:
    """Passages to learn from, and those held out; equal texts are on one side."""
    texts: dict[str, tuple[list[int], list[int]]] = {}
    named = set()
    for example in examples:
        key = example.prompt.tobytes() + b"|" + example.output.tobytes()
        digest = hashlib.blake2b(key, digest_size=8).hexdigest()
        texts[digest] = (example.prompt.tolist(), example.output.tolist())
        if example.held_out:
            named.add(digest)
    learned = passages_of([texts[d] for d in sorted(texts) if d not in named], streams)
    held = passages_of([texts[d] for d in sorted(named)], streams)[:_MOST_HELD_OUT]
    if len(learned) + len(held) < _LEAST or not learned or (named and not held):
        raise BlockDrafterError(
            f"the data has {len(learned)} different outputs of more than {streams} tokens to learn "
            f"from and {len(held)} held out; training needs {_LEAST} or more"
        )
    if held:
        return learned, held
    many = min(_MOST_HELD_OUT, max(2, round(_HELD_OUT_PART * len(learned))))
    return learned[many:], learned[:many]
