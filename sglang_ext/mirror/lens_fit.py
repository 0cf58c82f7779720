"""Fitting a target's lens at the start of a server, or taking the one that is kept."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_ext.mirror.lens import Lens, RidgeSums, kept_lens, read_lens, write_lens
from sglang_ext.mirror.proxy import Proxy
from sglang_ext.mirror.target_parts import ExitError, tap_normed, tap_state

logger = logging.getLogger(__name__)

# More tell little more; fewer than so many for each number of a state fit noise.
AIM_TOKENS = 24_576
_LEAST_PER_SIZE = 2
# Read at once, and of these passes one in so many is held back to judge the lens.
_PASS_TOKENS = 1024
_HELD_EVERY = 8

# Reads texts: the target runs them, and its taps see the states.
Read = Callable[[Sequence[Sequence[int]]], object]


@dataclass
class Fitted:
    """A lens, and how it was judged on states held back.

    Attributes:
        lens: the regression.
        held_back: tokens it was judged on.
        head, lensed: shares of these of which the target's token was among the candidates, with
            the LM head by itself and with the lens.
        seconds: that it took.
    """

    lens: Lens
    held_back: int
    head: float
    lensed: float
    seconds: float


@torch.no_grad()
def fitted(
    read: Read,
    texts: Sequence[Sequence[int]],
    proxy: Proxy,
    exit_layer: int,
    seconds: float,
    pass_tokens: int = _PASS_TOKENS,
) -> Fitted:
    """A lens of what the target says of these texts, read for at most so many seconds.

    Args:
        read: has the target read texts in one pass.
        proxy: the paper's, with the target's parts.
        pass_tokens: most tokens of a pass.

    Raises:
        ExitError: the time was too short for enough tokens, or a pass showed no state.
    """
    began = time.monotonic()
    size = 0
    sums: RidgeSums | None = None
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, (states, final) in enumerate(_passes(read, texts, proxy, exit_layer, pass_tokens)):
        size = final.shape[-1]
        sums = sums or RidgeSums(size)
        if number % _HELD_EVERY == 1:
            held.append((states, final))
        else:
            sums.add(proxy.normalised(states), final)
        if sums.tokens >= AIM_TOKENS or time.monotonic() - began > seconds:
            break
    if sums is None or sums.tokens < _LEAST_PER_SIZE * size or not held:
        raise ExitError(
            f"a lens of {size} x {size} needs {_LEAST_PER_SIZE * size} tokens and some held back, "
            f"{sums.tokens if sums else 0} were read in {time.monotonic() - began:.0f} s"
        )
    lens = sums.solve()
    lensed = Proxy(proxy.parts, proxy.kappa, lens)
    counts = [_found(each, held) for each in (proxy, lensed)]
    tokens = sum(len(final) for _, final in held)
    return Fitted(lens, tokens, counts[0] / tokens, counts[1] / tokens, time.monotonic() - began)


def _passes(
    read: Read, texts: Sequence[Sequence[int]], proxy: Proxy, exit_layer: int, pass_tokens: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each pass the states at the exit and the final normalised ones, float[n, d] copies."""
    seen: dict[str, torch.Tensor] = {}
    parts = proxy.parts
    ends = (
        tap_state(parts.layers, exit_layer, lambda state: seen.update(at_exit=state.clone())),
        tap_normed(parts.norm, lambda state: seen.update(final=state.clone())),
    )
    try:
        for group in _grouped(texts, pass_tokens):
            seen.clear()
            read(group)
            if len(seen) != 2 or len(seen["at_exit"]) != len(seen["final"]):
                raise ExitError("the target's pass did not show its states")
            at_exit, final = seen["at_exit"], seen["final"]
            yield at_exit, final
    finally:
        for end in ends:
            end()


def _grouped(texts: Sequence[Sequence[int]], tokens: int) -> Iterator[list[Sequence[int]]]:
    """The texts in groups of at most so many tokens; a longer text is cut."""
    group: list[Sequence[int]] = []
    for text in texts:
        text = text[:tokens]
        if group and sum(map(len, group)) + len(text) > tokens:
            yield group
            group = []
        group.append(text)
    if group:
        yield group


def _found(proxy: Proxy, held: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> int:
    """Of how many states the target's likeliest token is among the proxy's candidates."""
    found = 0
    for states, final in held:
        said = proxy.parts.logits(final).argmax(dim=-1, keepdim=True)
        found += int((proxy.candidates(states)[0] == said).any(dim=-1).sum())
    return found


def lens_of(
    identity: dict[str, Any],
    size: int,
    fit: Callable[[], Fitted],
) -> Lens | None:
    """The lens kept of a model and layer, else a fitted one; None where the LM head does better.

    Args:
        identity: what the lens holds for.
        size: d, of states.
        fit: fits it.

    Raises:
        ExitError: it cannot be fitted.
    """
    kept = kept_lens(identity)
    lens = kept.read(lambda path: read_lens(path, size))
    if lens is not None:
        logger.info("sglang-ext lens: fitted on %d tokens before (%s)", lens.tokens, kept.path)
        return lens
    made = fit()
    logger.info(
        "sglang-ext lens: fitted on %d tokens in %.1f s; of %d held back the target's token is "
        "among the candidates in %.0f%%, with the LM head by itself in %.0f%% (%s)",
        made.lens.tokens, made.seconds, made.held_back, 100 * made.lensed, 100 * made.head,
        kept.path,
    )  # fmt: skip
    if made.lensed <= made.head:
        return None
    write_lens(kept, made.lens)
    return made.lens


def lens_from(path: str, size: int) -> Lens:
    """The lens in a file that the user names.

    Raises:
        ExitError: it cannot be read, or is of another size.
    """
    try:
        lens = read_lens(Path(path), size)
    except (OSError, ValueError, KeyError) as error:
        raise ExitError(f"--mirror-lens {path}: {error}") from error
    if lens is None:
        raise ExitError(f"--mirror-lens {path}: a lens of states that are not of {size} numbers")
    return lens
