"""Training: a toy target is learned, and a kill changes nothing."""

import dataclasses
import errno

import numpy as np
import pytest
import torch

from sglang_ext.block_drafter import checkpoints, drafter_files
from sglang_ext.block_drafter.accepted_tokens import agreed, replay
from sglang_ext.block_drafter.block_paths import Paths
from sglang_ext.block_drafter.drafter_files import load_drafter
from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError
from sglang_ext.block_drafter.glancing import _shown, block_loss, make_batch
from sglang_ext.block_drafter.kept_tokens import MASK, PADDING, UNKNOWN
from sglang_ext.block_drafter.nat_model import BlockModel
from sglang_ext.block_drafter.shapes import TargetStates
from sglang_ext.block_drafter.trainer import alike
from sglang_ext.block_drafter.training_set import Pairs
from tests.unit.block_drafter.toy_drafters import (
    RECIPE,
    SHAPE,
    repeating,
    trainer,
    training_set,
    untrained,
)

SHORT = dataclasses.replace(RECIPE, steps=20, evaluate=10)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return folder, trainer(folder, repeating()).run()


def test_a_pattern_is_learned_to_high_acceptance(trained):
    folder, manifest = trained
    scores = manifest.scores["accepted_per_step"]
    assert list(scores) == ["2", "4", "5", "6"]
    assert scores["2"] == 3.0 and scores["6"] > 5.0
    assert manifest.scores["held_out"] >= 2
    assert not (folder / checkpoints.FOLDER).exists()
    assert load_drafter(folder).manifest == manifest


def test_a_pattern_is_learned_in_bfloat16_and_gone_on_with_in_float32(tmp_path):
    rounded = dataclasses.replace(RECIPE, steps=60, bf16=True)
    manifest = trainer(tmp_path, repeating(), rounded).run()
    assert manifest.training["bf16"] and manifest.scores["accepted_per_step"]["6"] > 4.0
    assert load_drafter(tmp_path).model.embedding.weight.dtype == torch.float32

    def kill(progress):
        raise KeyboardInterrupt

    begun, data = dataclasses.replace(rounded, checkpoint_s=0.0), repeating(60)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "begun", data, begun, tell=kill).run()
    begun = dataclasses.replace(begun, bf16=False)
    assert trainer(tmp_path / "begun", data, begun).step == 1


def test_a_training_that_was_killed_ends_in_the_same_weights(tmp_path):
    data = repeating(60)
    whole = trainer(tmp_path / "whole", data, SHORT)
    whole.run()

    class Killed(BaseException):
        pass

    def kill(progress):
        if progress.step == 13:
            raise Killed

    eager = dataclasses.replace(SHORT, checkpoint_s=0.0)
    with pytest.raises(Killed):
        trainer(tmp_path / "cut", data, eager, tell=kill).run()
    resumed = trainer(tmp_path / "cut", data, eager)
    assert resumed.step == 13
    resumed.run()
    first, second = (load_drafter(tmp_path / name) for name in ("whole", "cut"))
    assert first.manifest.weights == second.manifest.weights
    assert first.manifest.scores == second.manifest.scores


def test_a_training_ends_after_its_minutes_and_says_how_far_it_came(tmp_path):
    hurried = dataclasses.replace(RECIPE, steps=1000, minutes=1e-6)
    manifest = trainer(tmp_path, repeating(60), hurried).run()
    assert manifest.training["steps"] == 1
    assert load_drafter(tmp_path).manifest == manifest


def test_other_data_do_not_go_on_with_a_training(tmp_path):
    eager = dataclasses.replace(SHORT, checkpoint_s=0.0)

    class Killed(BaseException):
        pass

    def kill(progress):
        raise Killed

    with pytest.raises(Killed):
        trainer(tmp_path, repeating(60), eager, tell=kill).run()
    with pytest.raises(BlockDrafterError, match="other data"):
        trainer(tmp_path, repeating(61), eager)
    state = tmp_path / "training" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(BlockDrafterError, match="damaged"):
        trainer(tmp_path, repeating(60), eager)


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(drafter_files.os, "replace", full)
    with pytest.raises(BlockDrafterError, match=r"cannot write .*No space left on device$"):
        trainer(tmp_path, repeating(60), SHORT).run()


def test_too_little_data_are_refused():
    with pytest.raises(BlockDrafterError, match="9 different sources"):
        training_set(repeating(9))


def test_held_out_sources_are_not_learned_from():
    made, _ = training_set(repeating())
    learned, held = (
        {rows.tobytes() for rows in part.read(range(len(part))).sources}
        for part in (made.learned, made.held_out)
    )
    assert held and not learned & held
    assert made.learned.source_lengths().tolist() == [2] * len(made.learned)


def test_examples_that_are_named_as_held_out_judge_and_their_sources_are_not_learned_from():
    data, others = repeating(60), repeating(20)
    data.hold_out(others)
    made, _ = training_set(data)
    learned, held = (
        {rows.tobytes() for rows in part.read(range(len(part))).sources}
        for part in (made.learned, made.held_out)
    )
    assert (len(learned), len(held)) == (40, 20) and not learned & held
    assert len(made.held_out) == 40  # of both
    alone = repeating(20)
    alone.hold_out(others)
    with pytest.raises(BlockDrafterError, match="every source of the data is held out"):
        training_set(alone)


def test_the_first_held_out_examples_are_of_all_files():
    data = repeating(100)
    data.hold_out(repeating(64))
    made, _ = training_set(data)
    first = {int(rows[0]) for rows in made.held_out.outputs[:32]}
    assert len(first) > 8  # of 16 tokens that outputs repeat, four in 64 of each, in order


def test_blocks_stand_behind_random_prefixes_and_end_with_the_output():
    rng = np.random.default_rng(0)
    outputs = [np.arange(10, 19), np.array([7])]
    batch = make_batch([np.array([4]), np.array([5, 6])], outputs, SHAPE, 8, rng)
    # As different as they can be.
    assert len(set(batch.committed[:8].tolist())) == 8 and max(batch.committed) < 9
    assert not batch.committed[8:].any()
    # Of few different lengths.
    assert batch.sources.tolist() == [[4, *[PADDING] * 7], [5, 6, *[PADDING] * 6]]
    assert batch.written.tolist() == [list(range(10, 18)), [PADDING] * 8]
    blocks = zip(batch.tokens, batch.gold, batch.committed, batch.seen, strict=True)
    for i, (tokens, gold, done, seen) in enumerate(blocks):
        output = outputs[i // 8]
        following = output[done : done + SHAPE.block]
        assert gold[gold != PADDING].tolist() == following.tolist()
        assert tokens.tolist() == [output[done - 1] if done else PADDING, *[MASK] * SHAPE.block]
        assert seen[:8].tolist() == [True, i >= 8, *[False] * 6]
        before = output[max(0, done - 1 - SHAPE.window) : max(0, done - 1)]
        assert batch.written[i // 8][seen[8:]].tolist() == before.tolist()


def test_blocks_of_states_stand_behind_a_token_at_least():
    rng = np.random.default_rng(0)
    outputs = [np.arange(10, 14), np.array([7])]
    states = [rng.standard_normal((n, 4)).astype(np.float16) for n in (2, 1, 3, 0)]
    batch = make_batch(states[:2], outputs, SHAPE, 6, rng, states[2:])
    assert set(batch.committed[:6].tolist()) == {1, 2, 3}
    assert batch.committed[6:].tolist() == [1] * 6 and not (batch.gold[6:] != PADDING).any()
    assert batch.sources.shape == batch.written.shape == (2, 8, 4)
    assert batch.seen.sum(1).tolist() == [2 + int(n) - 1 for n in batch.committed[:6]] + [1] * 6


def test_outputs_of_one_token_alone_cost_a_batch_and_not_the_training():
    torch.manual_seed(0)
    _, kept = untrained()
    model = BlockModel(SHAPE, kept.num_rows, kept.num_classes, states=TargetStates(1, 4))
    states = [np.ones((2, 4), np.float16), np.ones((0, 4), np.float16)]
    rng = np.random.default_rng(0)
    batch = make_batch(states[:1], [np.array([7])], SHAPE, 4, rng, states[1:])
    generator = torch.Generator().manual_seed(0)
    loss = block_loss(model, batch, glancing=0.0, fading=0.8, smoothing=0.1, generator=generator)
    loss.backward()
    assert float(loss) == 0.0
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads and not any(grad.any() or grad.isnan().any() for grad in grads)


def test_far_places_are_learned_from_less():
    class Counting(BlockModel):
        def decode(self, memory, seen, tokens, committed, before, wanted=None):
            counted.append(wanted.sum(0).tolist())
            return super().decode(memory, seen, tokens, committed, before, wanted)

    counted: list[list[int]] = []
    _, kept = untrained()
    model = Counting(SHAPE, kept.num_rows, kept.num_classes)
    outputs = [np.arange(10, 30)] * 50
    batch = make_batch([np.array([4])] * 50, outputs, SHAPE, 8, np.random.default_rng(0))
    generator = torch.Generator().manual_seed(0)
    given = {"smoothing": 0.1, "generator": generator}
    assert block_loss(model, batch, glancing=0.0, fading=0.5, **given).isfinite()
    (learned,) = counted
    assert learned[0] == 400 and 150 < learned[1] < 250 and learned[5] < 30
    counted.clear()
    assert block_loss(model, batch, glancing=0.5, fading=1.0, **given).isfinite()
    first, second = counted
    assert 0.4 < sum(second) / sum(first) < 0.6


def test_batches_are_of_about_one_length_and_leave_nothing_out():
    rng = np.random.default_rng(5)
    lengths = rng.integers(3, 60, size=400)
    batches = [alike(lengths, 8, rng) for _ in range(2000)]
    spread = [int(np.ptp(lengths[batch])) for batch in batches]
    assert np.mean(spread) < 10 and np.ptp(lengths) > 50
    often = np.bincount(np.concatenate(batches), minlength=len(lengths))
    assert often.min() > 15 and often.max() < 70  # 40 each


def test_the_more_a_first_pass_gets_wrong_the_more_is_shown():
    gold = torch.tensor([[5, 6, 7, 8], [5, 6, PADDING, PADDING], [5, 6, 7, 8]])
    guessed = torch.tensor([[9, 9, 9, 9], [9, 9, 9, 9], [5, 6, 7, 9]])
    shown = _shown(guessed, gold, gold != PADDING, 0.5, torch.Generator().manual_seed(0))
    assert shown.sum(1).tolist() == [2, 1, 0]
    assert not shown[1, 2:].any()


class _Scripted:
    """A predictor that knows the outputs, but for every fourth token."""

    def __init__(self, outputs):
        self._outputs = outputs

    def encode(self, sources):
        self._read = [0] * len(sources)
        return list(range(len(sources)))

    def write(self, memories, read):
        for i, new in zip(memories, read, strict=True):
            assert (new.tokens == self._outputs[i][new.places]).all()
            assert new.places.tolist() == list(
                range(self._read[i], self._read[i] + len(new.places))
            )
            self._read[i] += len(new.places)

    def predict(self, memories, written, choices, longest):
        found = []
        for i, own in zip(memories, written, strict=True):
            done = own.committed
            assert own.last[-1] == self._outputs[i][done - 1] and self._read[i] == done - 1
            rows = np.array(self._outputs[i][done : done + longest])
            rows[[(done + j) % 4 == 3 for j in range(len(rows))]] = UNKNOWN
            sure = np.zeros(len(rows), np.float32)
            found.append(Paths(rows, np.arange(len(rows)) - 1, sure, sure))
        return found


def test_a_replay_counts_steps_as_a_server_would():
    outputs = [np.arange(10, 19), np.arange(10, 12), np.array([10])]
    pairs = Pairs(outputs, outputs, None, range(3))
    accepted = replay(_Scripted(outputs), pairs, block=6, most=9)  # type: ignore[arg-type]
    # 9 tokens: 1 of the prefill, then 3 (two drafted), 4 (three drafted), 1; 2 tokens: 1 step.
    assert (accepted.tokens, accepted.steps) == (9, 4)
    by_one = replay(_Scripted(outputs), pairs, block=1, most=3)  # type: ignore[arg-type]
    assert by_one.tokens == 9 and by_one.steps == 6


def test_tokens_agree_up_to_the_first_that_differs():
    assert agreed(np.array([5, 6, 7]), np.array([5, 6, 9, 7])) == 2
    assert agreed(np.array([5, UNKNOWN]), np.array([5, UNKNOWN])) == 1
    assert agreed(np.array([5]), np.array([], dtype=np.int64)) == 0
