"""The drafters that bench_specdec trains on the spot, from what the target has just written."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.lib.client import Completion, generate_all
from scripts.lib.server import Server
from scripts.lib.spec_bench import tokenizer
from scripts.lib.specdec_asking import AT_ONCE, DATA, TRAIN, pair_of
from scripts.lib.ssbd_streams import read_lines
from scripts.lib.translation_runs import Prompts
from sglang_ext.block_drafter.drafter_manifest import Manifest, read_manifest
from sglang_ext.block_drafter.target_models import load_target
from sglang_ext.block_drafter.training_data import header, read_file
from sglang_ext.commands.drafter import add_commands


@dataclass(frozen=True)
class Written:
    """What the target wrote of one sentence.

    Attributes:
        prompt: token ids of the whole prompt.
        output: token ids, the one that ended it included.
        text: the output, decoded.
    """

    prompt: Sequence[int]
    output: Sequence[int]
    text: str

    @classmethod
    def of(cls, prompt: Sequence[int], made: Completion) -> "Written":
        """A server's answer to a prompt."""
        return cls(prompt, made.token_ids, made.text)


@dataclass(frozen=True)
class Recipe:
    """How a drafter is trained here.

    Attributes:
        shape: a name of `drafter train --shape`.
        minutes: most minutes of training.
        block: tokens that a pass predicts.
    """

    shape: str
    minutes: float
    block: int


def write_data(path: Path, model: str, written: Sequence[Written]) -> None:
    """A file as `sglang-ext drafter distill` writes it."""
    lines = [
        {"n": n, "prompt": list(each.prompt), "output": list(each.output)}
        for n, each in enumerate(written)
    ]
    heads = [header(load_target(model)), *lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in heads), encoding="utf-8")


def train(data: Path, model: str, out: Path, encoder: str, recipe: Recipe) -> Manifest:
    """Run `sglang-ext drafter train`, and return what its directory states.

    Args:
        encoder: own or target.

    Raises:
        RuntimeError: it failed; it has said why.
    """
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(required=True))
    # A warm-up of 1,000 steps is for hours of training.
    steps = ["--warmup", "100", "--evaluate", "50", "--patience", "1000"]
    args = parser.parse_args(
        ["drafter", "train", "--data", str(data), "--model", model, "--out", str(out),
         "--encoder", encoder, "--shape", recipe.shape, "--block", str(recipe.block),
         "--minutes", str(recipe.minutes), *steps]
    )  # fmt: skip
    if args.func(args):
        raise RuntimeError(f"the drafter with --encoder {encoder} could not be trained")
    return read_manifest(out)


@dataclass(frozen=True)
class Drafters:
    """Block drafters, and what they were trained on.

    Attributes:
        own: the directory of one with an encoder of its own; None: there is none.
        shared: of one with the target's; None: there is none.
        data: what both were trained on; None: that is not here.
    """

    own: Path | None = None
    shared: Path | None = None
    data: Path | None = None

    @property
    def better(self) -> Path | None:
        """Whichever drafts more of held-out outputs; None: there is none."""
        found = [each for each in (self.own, self.shared) if each is not None]
        return max(found, key=_score, default=None)


def _score(drafter: Path) -> float:
    """Accepted tokens a step on held-out outputs, with whole blocks."""
    stated = read_manifest(drafter)
    return float(stated.scores["accepted_per_step"][str(stated.shape.block)])


def written_by_language(plain: Server, options: argparse.Namespace) -> dict[str, list[Written]]:
    """What the target writes of the training half: read, or asked for here."""
    if not options.data:
        return {name: distilled(plain, options, name) for name in options.languages}
    pairs = zip(options.languages, options.data, strict=True)
    return {name: read_written(file, options.model) for name, file in pairs}


def read_written(file: Path, model: str) -> list[Written]:
    """What a file of `sglang-ext drafter distill` holds.

    Raises:
        BlockDrafterError: it is none, or another target's.
    """
    decode = tokenizer(model).decode
    examples = read_file(file, load_target(model), sys.maxsize).examples
    found = [
        Written(e.prompt.tolist(), e.output.tolist(), decode(e.output, skip_special_tokens=True))
        for e in examples
    ]
    return [each for each in found if each.text.strip()]


def training_figures(drafter: Path | None) -> dict[str, float]:
    """Minutes and the most memory that a drafter's training took; nothing of none."""
    if drafter is None:
        return {}
    stated = read_manifest(drafter).training
    seconds = stated["seconds"] + stated.get("reading_seconds", 0.0)
    return {"trained_minutes": seconds / 60, "trained_memory_gb": stated["memory_gb"]}


def distilled(plain: Server, options: argparse.Namespace, language: str) -> list[Written]:
    """What the target writes of sentences of the training half, of which none is the test's."""
    prompts = Prompts(pair_of(options.model, language))
    lines = [line for line in read_lines(DATA / f"{TRAIN}.en.gz") if line][: options.distil]
    asked = [prompts.ids(source) for source in lines]
    made = generate_all(
        plain.base_url,
        asked,
        in_flight=AT_ONCE,
        label=f"distilling, {language}",
        max_new_tokens=options.max_tokens,
    )
    pairs = zip(asked, made, strict=True)
    return [Written.of(prompt, answer) for prompt, answer in pairs if answer.text.strip()]


def drafters_for(
    options: argparse.Namespace, folder: Path, written: Mapping[str, Sequence[Written]]
) -> Drafters:
    """The drafter that was given, or those that are trained here."""
    data = folder / "distilled.jsonl"
    if options.train_minutes or options.data:
        write_data(data, options.model, [each for own in written.values() for each in own])
    if not options.train_minutes:
        own, shared = (
            Path(folder) if folder else None
            for folder in (options.draft_model, options.shared_draft_model)
        )
        return Drafters(own, shared, data if options.data else None)
    recipe = Recipe(options.train_shape, options.train_minutes, options.length)
    train(data, options.model, folder / "own", "own", recipe)
    if not options.shared_encoder:
        return Drafters(folder / "own", None, data)
    train(data, options.model, folder / "shared", "target", recipe)
    return Drafters(folder / "own", folder / "shared", data)
