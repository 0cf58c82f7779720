"""The real worker in the order of SGLang's overlap loop: roots, outputs and what drafters learn."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.emulation import overlap_loop
from scripts.emulation.overlap_loop import OverlapLoop, overlap_figures, relay_as_it_stands
from sglang_ext.block_drafter.drafter_files import save_drafter
from sglang_ext.block_drafter.drafter_manifest import Manifest, SourceRule
from sglang_ext.block_drafter.kept_tokens import KeptTokens
from sglang_ext.block_drafter.nat_model import BlockModel
from sglang_ext.block_drafter.shapes import Shape
from sglang_ext.drafters import DrafterContext
from sglang_ext.drafters.specdec import BlockDrafter
from sglang_ext.options import Options

SCHEDULES = 80


def test_no_schedule_of_the_overlap_loop_gives_a_wrong_root_or_output():
    figures = overlap_figures(SCHEDULES)
    assert figures["request_steps"] > 100 * SCHEDULES
    assert figures["known_tokens"] > SCHEDULES
    assert figures["relaxed_tokens"] > SCHEDULES
    assert {n: v for n, v in figures.items() if n.startswith(("wrong", "schedules_hit"))} == {
        "wrong_outputs": 0,
        "wrong_roots": 0,
        "wrong_learned": 0,
        "wrong_kv": 0,
        "wrong_marks": 0,
        "schedules_hit": 0,
    }


def test_a_relay_that_is_taken_as_it_stands_is_noticed():
    figures = overlap_figures(5, lacking=relay_as_it_stands)
    assert figures["schedules_hit"] == 5
    assert figures["wrong_outputs"] > 0 and figures["wrong_roots"] > 0


@pytest.mark.parametrize("kind", ["encoders", "_from_afar", "_drains_prefills"])
def test_schedules_are_of_every_kind(kind):
    assert {getattr(OverlapLoop(seed), kind) for seed in range(SCHEDULES)} == {True, False}


def test_schedules_have_steps_that_need_nothing_from_the_host():
    loop = OverlapLoop(1)
    loop.run(200)
    assert loop.blind > 10


def block_drafter(folder: Path) -> BlockDrafter:
    """SpecDec's drafter with weights by chance: it is right now and then."""
    vocab = overlap_loop.VOCAB
    kept = KeptTokens(np.arange(vocab), vocab, vocab)
    shape = Shape(16, 2, 16, 1, 1, block=4, window=4, source_tokens=8)
    model = BlockModel(shape, kept.num_rows, kept.num_classes)
    stated = Manifest("any", "0" * 16, vocab, (), shape, SourceRule(), vocab, "0" * 64)
    save_drafter(folder, stated, model, kept)
    return BlockDrafter(DrafterContext(vocab, Options(draft_model=str(folder))))


def test_a_block_drafter_follows_every_schedule(tmp_path, monkeypatch, caplog):
    """Joining, retracted, aborted and handed over: blocks stand behind the right tokens."""
    torch.manual_seed(0)
    drafter = block_drafter(tmp_path)
    monkeypatch.setattr(overlap_loop, "KnowingDrafter", lambda *_: drafter)
    with caplog.at_level(logging.WARNING):
        for seed in range(8):
            loop = OverlapLoop(seed)
            loop.run(60)
            assert not +loop.wrong, (seed, loop.wrong)
    assert not caplog.records, caplog.records[0].getMessage()
    assert drafter.counters["blocks"] > drafter.counters["passes"] > 100
