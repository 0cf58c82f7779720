"""Streams of a draft model: what they see, that they change nothing else, what training makes."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_ext.block_drafter.checkpoints import FOLDER, Checkpoints
from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError
from sglang_ext.block_drafter.recipes import StreamRecipe
from sglang_ext.mirror import lm_loading
from sglang_ext.mirror.causal_lm import CausalLM, Feed
from sglang_ext.mirror.channel import Channel
from sglang_ext.mirror.executor import Executor
from sglang_ext.mirror.streaming.lookahead_streams import LookaheadStreams
from sglang_ext.mirror.streaming.stream_files import (
    NAME,
    WEIGHTS,
    StreamManifest,
    StreamsError,
    draft_fingerprint,
    load_streams,
    write_streams,
)
from sglang_ext.mirror.streaming.stream_pass import said_ahead
from sglang_ext.mirror.streaming.stream_passages import passages_of
from sglang_ext.mirror.streaming.stream_training import (
    Kept,
    StreamProgress,
    StreamTrainer,
    fresh_streams,
)
from sglang_ext.mirror.tree_cache import ROOT
from tests.unit.mirror.test_rollouts import PROMPT, WINDOW, Bench, ask, text
from tests.unit.mirror.tiny_lms import Reference, write_lm

STREAMS, RANK = 3, 4


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def folder(request, tmp_path_factory) -> Path:
    return write_lm(tmp_path_factory.mktemp("lm"), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return write_lm(tmp_path_factory.mktemp("lm"), "llama")


def streams_of(model: CausalLM, seed: int = 0) -> LookaheadStreams:
    """Random ones, which change every matrix."""
    made = fresh_streams(model, STREAMS, RANK, seed)
    torch.manual_seed(seed)
    tensors = {name: t + 0.1 * torch.randn_like(t) for name, t in made.tensors()}
    return LookaheadStreams.of(tensors, model.shape.layers)


def looking(folder: Path) -> CausalLM:
    model = lm_loading.load(folder, "fp32")
    model.use_streams(streams_of(model))
    return model


def said_in_training(model: CausalLM, tokens: list[int]) -> list[int]:
    """What the streams say behind a text, by the code that trains them."""
    assert model.streams is not None
    with torch.no_grad():
        said = said_ahead(model, model.streams, tokens, [len(tokens) - 1])
    return said[0].argmax(dim=-1).tolist()


def test_the_main_stream_says_what_it_said_without_streams(folder):
    plain, model = lm_loading.load(folder, "fp32"), looking(folder)
    caches = plain.new_cache(), model.new_cache()
    for feed, ahead in (((PROMPT, [7, 9], [ROOT, 0]), [9, 11]), (([], [4, 5], [1, ROOT]), [0])):
        wanted = len(feed[1]) + bool(feed[0])
        expected = plain.forward([Feed(caches[0], *feed, wanted)])
        said = model.forward([Feed(caches[1], *feed, wanted, ahead, STREAMS)])
        assert len(said.tokens) == wanted + STREAMS * len(ahead)
        assert said.tokens[:wanted].tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(said.probs[:wanted], expected.probs, atol=1e-5)
    assert caches[0].used == caches[1].used


def test_streams_see_their_rows_path_and_each_other_as_in_training(folder):
    model = looking(folder)
    cache = model.new_cache()
    # Root -> 7 -> 9, root -> 30; streams behind the root, 9 and 30, of two requests in one pass.
    feeds = [
        Feed(cache, PROMPT, [7, 30, 9], [ROOT, ROOT, 0], 4, [len(PROMPT) - 1, 11, 12], STREAMS),
        Feed(model.new_cache(), PROMPT[:3], [], [], 1, [2], 2),
    ]
    said = model.forward(feeds).tokens[:, 0].tolist()
    assert len(said) == 4 + 3 * STREAMS + 1 + 2
    seen = [said[i : i + STREAMS] for i in (4, 7, 10)]
    paths = [PROMPT, [*PROMPT, 30], [*PROMPT, 7, 9]]
    assert seen == [said_in_training(model, path) for path in paths]
    # A large batch looks less far: the first streams say the same without those behind them.
    assert said[14:] == said_in_training(model, PROMPT[:3])[:2]
    # What was read in between does not matter, nor do the slots that streams have left.
    said = model.forward([Feed(cache, [], [11], [2], 1, [0], STREAMS)]).tokens[:, 0].tolist()
    assert said[1:] == said_in_training(model, [*PROMPT, 7, 9, 11])


def circle(reference: Reference) -> list[int]:
    """A text that the model continues in a circle."""
    return PROMPT + reference.continued(PROMPT, 90)


@pytest.fixture(scope="module")
def trained(llama) -> tuple[LookaheadStreams, list[list[float]]]:
    """Streams that know one text by heart, and how much of it they foresaw at first and at last."""
    model = lm_loading.load(llama, "fp32")
    held = passages_of([(PROMPT, circle(Reference(llama))[len(PROMPT) :])], STREAMS)
    kept, shares = list[LookaheadStreams](), list[list[float]]()
    recipe = StreamRecipe(steps=200, batch=1, learning_rate=1e-2, warmup=5, evaluate=25)
    fresh = fresh_streams(model, STREAMS, RANK, 1)
    trainer = StreamTrainer(model, fresh, held, held, recipe, Kept(lambda s, _: kept.append(s)))
    shares.append(trainer.evaluated())
    shares.append(list(trainer.run()))
    tensors = {name: tensor.detach().clone() for name, tensor in kept[-1].tensors()}
    return LookaheadStreams.of(tensors, model.shape.layers), shares


def test_training_foresees_more_of_what_the_model_says(trained):
    _, (before, after) = trained
    assert max(before) < 0.5 and min(after) > 0.8, (before, after)


def test_streams_learn_in_bfloat16_too(llama):
    model = lm_loading.load(llama, "fp32")
    held = passages_of([(PROMPT, circle(Reference(llama))[len(PROMPT) :])], STREAMS)
    recipe = StreamRecipe(steps=100, batch=1, learning_rate=1e-2, warmup=5, evaluate=25, bf16=True)
    fresh = fresh_streams(model, STREAMS, RANK, 1)
    kept = list[LookaheadStreams]()
    trainer = StreamTrainer(model, fresh, held, held, recipe, Kept(lambda s, _: kept.append(s)))
    assert min(trainer.run()) > 0.6
    assert all(tensor.dtype == torch.float32 for _, tensor in kept[-1].tensors())


def test_a_training_that_is_killed_goes_on_as_if_it_had_not_been(llama, tmp_path):
    model = lm_loading.load(llama, "fp32")
    held = passages_of([(PROMPT, circle(Reference(llama))[len(PROMPT) :])], STREAMS)
    fresh = fresh_streams(model, STREAMS, RANK, 1)

    def trainer(folder: Path, steps: int, identity: str = "a") -> StreamTrainer:
        recipe = StreamRecipe(steps=6, batch=1, evaluate=3, warmup=1, checkpoint_s=0)
        kept = Kept(lambda *_: None, Checkpoints(folder), {"data": identity})

        def tell(progress: StreamProgress) -> None:
            if progress.step == steps:
                raise KeyboardInterrupt

        return StreamTrainer(model, fresh, held, held, recipe, kept, tell)

    whole = trainer(tmp_path / "whole", 0)
    shares = whole.run()
    assert not (tmp_path / "whole" / FOLDER).exists(), "what has ended leaves no checkpoints"
    for killed_at in (2, 4):
        with pytest.raises(KeyboardInterrupt):
            trainer(tmp_path / "killed", killed_at).run()
    with pytest.raises(BlockDrafterError, match="of a training of other data"):
        trainer(tmp_path / "killed", 0, "b")
    again = trainer(tmp_path / "killed", 0)
    assert again.step == 4 and again.run() == shares
    for name, tensor in whole._parameters.items():
        assert torch.equal(again._parameters[name], tensor), name


def test_streams_save_passes_and_change_no_draft(llama, trained):
    reference = Reference(llama)
    known, passes = circle(reference)[:40], {}
    for streams in (None, trained[0]):
        channel = Channel.create()
        model = lm_loading.load(llama, "fp32")
        if streams is not None:
            model.use_streams(streams)
        bench = Bench(Executor(Channel.open(channel.path), model, 6, False, 64.0), channel)
        bench.rows_ride_along()
        output, totals = list(known), bench.executor._rollouts.totals
        bench.tell(*text(1, output))
        bench.work()
        for number in range(4):
            bench.tell(ask(1, len(output), 6, number + 1))
            bench.work()
            chain = bench.chain(output, 6)
            assert chain == reference.continued(output, 6)
            bench.tell(*text(1, chain, len(output)))
            output += chain
        passes[streams is not None] = totals.asked_steps
    assert passes[True] <= 0.67 * passes[False], passes


def test_a_large_batch_looks_less_far(llama, trained):
    model = lm_loading.load(llama, "fp32")
    model.use_streams(trained[0])
    for batch, streams in ((3, STREAMS), (16, 1)):
        channel = Channel.create()
        bench = Bench(Executor(Channel.open(channel.path), model, WINDOW, False, 64.0), channel)
        for number in range(batch):
            bench.tell(*text(number, [number, *PROMPT]), ask(number, len(PROMPT) + 1, WINDOW))
        bench.work()
        seen = [one.tree.ahead for one in bench.executor._texts.values()]
        assert {len(found) for ahead in seen for found in ahead.values()} == {streams}


def test_a_request_may_do_without_its_streams(llama, trained):
    from sglang_ext.mirror import messages

    channel = Channel.create()
    model = lm_loading.load(llama, "fp32")
    model.use_streams(trained[0])
    bench = Bench(Executor(Channel.open(channel.path), model, WINDOW, False, 64.0), channel)
    for number, flags in ((1, 0), (2, messages.NO_STREAMS)):
        bench.tell(*text(number, PROMPT, flags=flags), ask(number, len(PROMPT), WINDOW))
        bench.work()
        assert bool(bench.executor._texts[number].tree.ahead) == (not flags)


def manifest(folder: Path) -> StreamManifest:
    return StreamManifest(draft_fingerprint(folder), "tiny", "target", STREAMS, RANK, 3)


def test_a_folder_of_streams_is_read_as_it_was_written(llama, tmp_path):
    streams = streams_of(lm_loading.load(llama, "fp32"))
    written = write_streams(tmp_path, manifest(llama), streams)
    read, again = load_streams(tmp_path, llama)
    assert read == written and again.rank == RANK
    for (name, one), (other_name, other) in zip(streams.tensors(), again.tensors(), strict=True):
        assert name == other_name and torch.equal(one, other)


def test_streams_that_cannot_be_used_are_refused_by_name(llama, tmp_path):
    with pytest.raises(StreamsError, match=f"holds no streams: it has no {NAME}"):
        load_streams(tmp_path, llama)
    streams = streams_of(lm_loading.load(llama, "fp32"))
    write_streams(tmp_path, manifest(llama), streams)
    other = write_lm(tmp_path / "other", "llama", seed=5)
    with pytest.raises(StreamsError, match="has streams of tiny, not of"):
        load_streams(tmp_path, other)
    for name, changes, message in (
        ("deep", {"num_hidden_layers": 2}, "the streams are of 3 layers, the draft model has 2"),
        ("wide", {"hidden_size": 32}, "embeddings is (3, 64), for the draft model it must be"),
        ("broad", {"intermediate_size": 64}, "layers.0.gate_up.up is (192, 4), for the draft"),
    ):
        model = lm_loading.load(write_lm(tmp_path / name, **changes), "fp32")
        with pytest.raises(ValueError, match=re.escape(message)):
            model.use_streams(streams)
    bad = {name: tensor * float("nan") for name, tensor in streams.tensors()}
    write_streams(tmp_path, manifest(llama), LookaheadStreams.of(bad, 3))
    with pytest.raises(StreamsError, match="embeddings is no matrix of finite numbers"):
        load_streams(tmp_path, llama)
    write_streams(tmp_path, dataclasses.replace(manifest(llama), rank=2), streams)
    with pytest.raises(StreamsError, match=r"does not fit streams\.json: 3 streams of rank 4"):
        load_streams(tmp_path, llama)
    write_streams(tmp_path, manifest(llama), streams)
    weights = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(weights[:-1] + b"x")
    with pytest.raises(StreamsError, match="its checksum is not the one"):
        load_streams(tmp_path, llama)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(StreamsError, match="cannot read"):
        load_streams(tmp_path, llama)
    stated = json.loads(manifest(llama).as_json())
    damaged = [stated | {name: None} for name in stated]
    damaged += [stated | {"rank": 0}, stated | {"data": {"namespaces": {"a": "b"}}}, {"format": 1}]
    for damage in ("[]", "{", "[" * 100_000, *map(json.dumps, damaged)):
        (tmp_path / NAME).write_text(damage)
        with pytest.raises(StreamsError, match=r"streams\.json is damaged"):
            load_streams(tmp_path, llama)


def test_draft_models_that_begin_alike_are_told_apart(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "tuned")
    [weights] = (tmp_path / "tuned").glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert draft_fingerprint(tmp_path / "tuned") != draft_fingerprint(llama)
