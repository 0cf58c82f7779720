"""`sglang-ext drafter train`: from a file or a datastore to a drafter's directory."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from tqdm import tqdm

from sglang_ext.block_drafter.checkpoints import FOLDER
from sglang_ext.block_drafter.drafter_manifest import (
    BlockDrafterError,
    Manifest,
    SourceRule,
    is_drafter_folder,
)
from sglang_ext.block_drafter.embedding_start import embedding_start
from sglang_ext.block_drafter.held_outputs import held_folder
from sglang_ext.block_drafter.recipes import Recipe
from sglang_ext.block_drafter.recorded_states import keep_recorded, recorded_states
from sglang_ext.block_drafter.shapes import SHAPES, Shape, TargetStates
from sglang_ext.block_drafter.states_on_disk import StatesOnDisk
from sglang_ext.block_drafter.target_models import TargetModel, load_target
from sglang_ext.block_drafter.target_states import StatesReader, check_examples, kept_states
from sglang_ext.block_drafter.trainer import Progress, Trainer
from sglang_ext.block_drafter.training_data import TrainingData, source_rule
from sglang_ext.block_drafter.training_set import make_training_set
from sglang_ext.commands.drafter.training_arguments import (
    check_training,
    in_bf16,
    progress_bar,
    read_data,
    recipe_of,
    sharing_cores,
)

_NO_WEIGHTS = "0" * 64


def run(args: argparse.Namespace) -> int:
    """Trains; returns the exit code."""
    shape, recipe = _shape(args), _recipe(args)
    _check(args)
    target = load_target(args.model)
    data = read_data(args, target)
    rule = source_rule(data, shape.source_tokens)
    with (
        held_folder(args.out),
        sharing_cores(args),
        _states(args, data, rule) as (states, kind),
    ):
        trained = _train(args, shape, recipe, target, data, rule, kind, states)
    scores = trained.scores["accepted_per_step"]
    held = trained.scores["held_out"]
    by_k = ", ".join(f"k {k}: {score:.2f}" for k, score in scores.items())
    print(f"{args.out}: accepted tokens a step on {held} held-out outputs, {by_k}")
    return 0


@contextmanager
def _states(
    args: argparse.Namespace, data: TrainingData, rule: SourceRule
) -> Iterator[tuple[StatesOnDisk | None, TargetStates | None]]:
    """The target's states of sources and outputs, and what they are; None: it is not the encoder.

    Those that were recorded with the outputs; else the target reads all.
    """
    if args.encoder != "target":
        yield None, None
        return
    check_examples(data)
    recorded = keep_recorded(data, args.encoder_layer, rule)
    if recorded is not None:
        if args.held_out and not any(example.held_out for example in data.examples):
            raise BlockDrafterError(
                "--data has states and --held-out has none: `drafter distill --states` them too"
            )
        with closing(recorded_states(data.examples, rule, recorded)) as states:
            yield states, recorded
        return
    reader = StatesReader(args.model, args.encoder_layer, args.device, bf16=in_bf16(args))
    with tqdm(total=len(data.examples), unit="prompt", file=sys.stderr, desc="reading") as bar:

        def tell(read: int) -> None:
            bar.update(read - bar.n)

        with kept_states(args.out / FOLDER, data, rule, reader, tell) as states:
            bar.close()
            yield states, reader.states


def _train(
    args: argparse.Namespace,
    shape: Shape,
    recipe: Recipe,
    target: TargetModel,
    data: TrainingData,
    rule: SourceRule,
    kind: TargetStates | None,
    states: StatesOnDisk | None,
) -> Manifest:
    most = args.outputs
    made = make_training_set(data, rule, target.ends, target.vocab_size, most, most, states)
    learned = f"{len(made.learned):,} outputs, {len(made.held_out):,} held out"
    print(f"{data.origin}: {learned}, {data.left_out:,} left out", file=sys.stderr)
    manifest = Manifest(
        target=target.name,
        tokenizer=target.tokenizer,
        vocab_size=target.vocab_size,
        ends=target.ends,
        shape=shape,
        source=rule,
        outputs=made.kept.outputs,
        weights=_NO_WEIGHTS,
        data={**data.summary(), "digest": data.digest()},
        states=kind,
        training={} if states is None else {"reading_seconds": round(states.seconds, 1)},
    )
    data.examples.clear()  # as much memory again as the rows that were made of them
    with progress_bar(recipe.steps) as show:

        def tell(progress: Progress) -> None:
            left = f"{progress.left_s / 60:.0f} min left at most"
            learned = f"loss {progress.loss:.3f}, accepted {progress.score:.2f}"
            show(progress.step, f"{learned}, {left}")

        start = embedding_start(args.model, made.kept, shape.width)
        if start is None:
            print(f"{args.model}: no embedding to begin at; it begins at random", file=sys.stderr)
        return Trainer(args.out, made, manifest, recipe, args.device, tell, start).run()


def _check(args: argparse.Namespace) -> None:
    """Raises BlockDrafterError: the output folder or the device cannot be used."""
    if args.encoder_layer and args.encoder != "target":
        raise BlockDrafterError("--encoder-layer is a layer of the target: give --encoder target")
    check_training(args)
    if is_drafter_folder(args.out) and not (args.out / FOLDER).is_dir():
        raise BlockDrafterError(f"{args.out} holds a trained drafter already: name another folder")


def _shape(args: argparse.Namespace) -> Shape:
    named = SHAPES[args.shape]
    shape = replace(named, block=args.block, source_tokens=args.source_tokens)
    try:
        shape.check()
    except ValueError as error:
        raise BlockDrafterError(f"--block or --source-tokens: {error}") from None
    return shape


def _recipe(args: argparse.Namespace) -> Recipe:
    recipe = recipe_of(args, Recipe())
    if not 0 <= recipe.dropout < 1:
        raise BlockDrafterError(f"--dropout {recipe.dropout:g}: expected 0 to 1")
    if not 0 <= recipe.glancing <= 1:
        raise BlockDrafterError(f"--glancing {recipe.glancing:g}: expected 0 to 1")
    return recipe
