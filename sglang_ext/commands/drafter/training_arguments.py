"""What all kinds of `sglang-ext drafter train` have alike: data, checks, the progress bar."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import TypeVar

from tqdm import tqdm

from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError
from sglang_ext.block_drafter.recipes import LoopRecipe
from sglang_ext.block_drafter.target_models import TargetModel
from sglang_ext.block_drafter.training_data import TrainingData, read_datastore, read_files

R = TypeVar("R", bound=LoopRecipe)


def read_data(args: argparse.Namespace, target: TargetModel) -> TrainingData:
    """What `--data` or `--datastore` names, and `--held-out`.

    Raises:
        BlockDrafterError: it cannot be read, or is of another target.
    """
    if args.data:
        data = read_files(args.data, target, args.most_tokens)
    else:
        data = read_datastore(args.datastore, target, args.most_tokens, args.namespaces)
    if args.held_out:
        data.hold_out(read_files(args.held_out, target, args.most_tokens))
    return data


def check_training(args: argparse.Namespace) -> None:
    """Refuse what cannot be used, whatever is trained.

    Raises:
        BlockDrafterError: namespaces without a datastore, or a device that is not there.
    """
    if args.namespaces and not args.datastore:
        raise BlockDrafterError("--namespaces are those of a --datastore")
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise BlockDrafterError("--device cuda: torch finds no such device here")


def recipe_of(args: argparse.Namespace, defaults: R) -> R:
    """A recipe with what the command line gives.

    Raises:
        BlockDrafterError: a value is out of its range.
    """
    given = {f.name: getattr(args, f.name, None) for f in fields(defaults)}
    recipe = replace(
        defaults, **{n: v for n, v in given.items() if v is not None}, bf16=in_bf16(args)
    )
    if not 0 < recipe.learning_rate < 1:
        raise BlockDrafterError(f"--learning-rate {recipe.learning_rate:g}: expected 0 to 1")
    return recipe


@contextlib.contextmanager
def sharing_cores(args: argparse.Namespace) -> Iterator[None]:
    """Threads that wait give way while other programs use the processors, a server's too."""
    end = None
    if args.device == "cpu":
        import numba
        import torch

        from sglang_ext.cpu.shared_cores import watch_cores

        threads = torch.get_num_threads()
        numba.get_num_threads()  # starts its team, and has torch take as many
        torch.set_num_threads(threads)
        try:
            end = watch_cores()
        except ValueError as error:  # SGLANG_EXT_CPU_SHORT_WAITS
            raise BlockDrafterError(str(error)) from None
    try:
        yield
    finally:
        if end is not None:
            end.set()


def in_bf16(args: argparse.Namespace) -> bool:
    """Whether products are computed in bfloat16: by default where the device is faster in it."""
    if args.precision != "auto":
        return bool(args.precision == "bf16")
    if args.device == "cuda":
        import torch

        return torch.cuda.is_bf16_supported(including_emulation=False)
    from speech.bf16_products import has_fast_bf16

    return has_fast_bf16()


@contextlib.contextmanager
def progress_bar(steps: int) -> Iterator[Callable[[int, str], None]]:
    """A bar of steps on stderr.

    Yields:
        told the steps so far, those before a kill included, and what to say beside the bar.
    """
    with tqdm(total=steps, unit="step", file=sys.stderr, desc="training") as bar:

        def show(step: int, text: str) -> None:
            if not bar.n:
                bar.initial = step - 1  # its rate is that of this run
            bar.n = step
            bar.set_postfix_str(text)

        yield show
