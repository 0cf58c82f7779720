"""Training on states that were recorded as the outputs were written (`state_log`)."""

import os
from collections.abc import Sequence

from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError, SourceRule
from sglang_ext.block_drafter.shapes import TargetStates
from sglang_ext.block_drafter.states_on_disk import StatesOnDisk
from sglang_ext.block_drafter.training_data import Example, TrainingData, source_span


def keep_recorded(data: TrainingData, layer: int, rule: SourceRule) -> TargetStates | None:
    """Leave out the examples without recorded states, and say what the others' are.

    None: there are none of this layer, or of several ones; nothing was left out.

    Args:
        layer: behind so many layers; 0: whatever was recorded.
    """
    places = [example.states for example in data.examples]
    kinds = {at.kind for at in places if at is not None and layer in (0, at.kind.layer)}
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    kept = [example for example in data.examples if _has_states(example, kind, rule)]
    if not kept:
        return None
    data.left_out += len(data.examples) - len(kept)
    data.examples[:] = kept
    return kind


def _has_states(example: Example, kind: TargetStates, rule: SourceRule) -> bool:
    """Whether all states that are learned from were recorded."""
    at = example.states
    if at is None or at.kind != kind:
        return False
    end = len(example.prompt) + len(example.output) - 1
    return at.begin <= source_span(example.prompt, rule).start and at.begin + at.count >= end


def recorded_states(
    examples: Sequence[Example], rule: SourceRule, states: TargetStates
) -> StatesOnDisk:
    """The recorded states of examples that all have some.

    Raises:
        BlockDrafterError: they cannot be read.
    """
    places = [example.states for example in examples if example.states is not None]
    starts = [source_span(example.prompt, rule).start for example in examples]
    paths = [at.path for at in places]
    firsts = [at.first + start - at.begin for at, start in zip(places, starts, strict=True)]
    sources = [len(e.prompt) - start for e, start in zip(examples, starts, strict=True)]
    outputs = [len(example.output) - 1 for example in examples]
    try:
        return StatesOnDisk(paths, firsts, sources, outputs, states.width)
    except OSError as error:
        raise BlockDrafterError(
            f"cannot read {error.filename}: {os.strerror(error.errno or 0)}"
        ) from None
