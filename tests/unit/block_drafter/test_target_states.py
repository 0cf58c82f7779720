"""A drafter whose encoder is the target: its states, its training, its directory."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_ext.block_drafter.block_predictor import BlockPredictor
from sglang_ext.block_drafter.drafter_files import load_drafter, save_drafter
from sglang_ext.block_drafter.drafter_manifest import NAME, BlockDrafterError, read_manifest
from sglang_ext.block_drafter.nat_model import BlockModel
from sglang_ext.block_drafter.shapes import TargetStates
from sglang_ext.block_drafter.target_states import (
    StatesReader,
    check_examples,
    even_states,
    kept_states,
)
from sglang_ext.block_drafter.trainer import Trainer
from sglang_ext.block_drafter.training_data import source_rule, source_span
from sglang_ext.block_drafter.training_set import make_training_set
from tests.unit.block_drafter.toy_drafters import END, RECIPE, SHAPE, VOCAB, manifest, repeating
from tests.unit.mirror.tiny_lms import write_lm


@pytest.fixture(scope="module")
def lm(tmp_path_factory) -> Path:
    return write_lm(tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="module")
def reader(lm) -> StatesReader:
    return StatesReader(str(lm), 2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, reader):
    """A drafter that has learned the toy target from another model's states of its sources."""
    folder, data = tmp_path_factory.mktemp("trained"), repeating()
    rule = source_rule(data, SHAPE.source_tokens)
    with kept_states(folder / "training", data, rule, reader) as states:
        made = make_training_set(data, rule, (END,), VOCAB, VOCAB, VOCAB, states)
        stated = manifest(data, rule, made.kept.outputs, states=reader.states)
        return folder, Trainer(folder, made, stated, RECIPE, "cpu").run()


def test_states_are_the_targets_residual_stream_made_even(lm, reader):
    prompts = [np.array([5, 6, 12, 10, 7], np.int32), np.array([9, 8], np.int32)]
    model = AutoModelForCausalLM.from_pretrained(lm, dtype=torch.float32).eval()
    spans = [slice(1, 4), slice(0, 2)]
    found = reader.read(prompts, spans)
    assert reader.states == TargetStates(2, 64)
    for states, prompt, span in zip(found, prompts, spans, strict=True):
        assert states.dtype == torch.float16
        assert torch.allclose(states.float(), residual_stream(model, prompt)[span], atol=0.02)
    huge = even_states(torch.tensor([[1e6, -1e6, 3.0, 4.0]]))
    assert torch.isfinite(huge).all()


def residual_stream(model, prompt) -> torch.Tensor:
    """float[n, width] behind two layers, made even."""
    with torch.inference_mode():
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        hidden = model(ids, output_hidden_states=True).hidden_states[2][0]
    return (hidden - hidden.mean(-1, keepdim=True)) / hidden.std(-1, False, keepdim=True)


@pytest.mark.parametrize("bf16", [False, True])
def test_what_all_prompts_begin_with_is_read_once(lm, bf16):
    reader = StatesReader(str(lm), 2, bf16=bf16)
    model = AutoModelForCausalLM.from_pretrained(lm, dtype=torch.float32).eval()
    read: list[int] = []
    reader._model.register_forward_pre_hook(
        lambda _model, args, kwargs: read.append(args[0].numel()), with_kwargs=True
    )
    template = np.array([5, 6, 12], np.int32)
    reader.begin_with(template)
    prompts = [np.array([5, 6, 12, 10, 7, 9], np.int32), np.array([5, 6, 12, 8, 3], np.int32)]
    spans = [slice(3, 5), slice(4, 5)]
    found = reader.read(prompts, spans)
    other = np.array([5, 7, 12, 8, 3], np.int32)
    found += reader.read([prompts[0], other], spans)
    assert read == [3, 2 * 2, 2 * 5]
    for states, prompt, span in zip(found, [*prompts, prompts[0], other], spans * 2, strict=True):
        wanted = residual_stream(model, prompt)[span]
        assert torch.allclose(states.float(), wanted, atol=0.1 if bf16 else 0.02)


def test_two_thirds_of_the_layers_are_read_unless_one_is_named(lm):
    assert StatesReader(str(lm), 0).states.layer == 2
    with pytest.raises(BlockDrafterError, match=r"--encoder-layer 3: .* has 3 layers, expected 1"):
        StatesReader(str(lm), 3)
    with pytest.raises(BlockDrafterError, match="cannot be loaded as a target"):
        StatesReader(str(lm / "nowhere"), 1)


def test_the_file_of_states_is_gone_on_with_after_a_kill_and_removed_at_the_end(tmp_path, reader):
    data = repeating(40)
    rule = source_rule(data, SHAPE.source_tokens)
    with kept_states(tmp_path / "a", data, rule, reader) as states:
        whole = [states.read(i) for i in range(len(states))]
        assert states.seconds > 0
        (path,) = (tmp_path / "a").glob("*.f16")
        content = path.read_bytes()
    assert not (tmp_path / "a").exists()
    for example, (source, written) in zip(data.examples, whole, strict=True):
        first = source_span(example.prompt, rule).start
        assert source.shape == (len(example.prompt) - first, 64)
        assert written.shape == (len(example.output) - 1, 64)
        text = np.concatenate([example.prompt, example.output[:-1]])
        (wanted,) = reader.read([text], [slice(first, len(text))])
        assert np.allclose(np.concatenate([source, written]), wanted, atol=0.02)
    # Killed in the middle of the 20th example.
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / path.with_suffix(".seconds").name).write_text("100.0")
    (tmp_path / "b" / path.name).write_bytes(content[: 19 * len(content) // 40 + 7])
    told: list[int] = []
    with kept_states(tmp_path / "b", data, rule, reader, told.append) as states:
        assert (tmp_path / "b" / path.name).stat().st_size == len(content)
        assert states.seconds > 100
        for i, pair in enumerate(whole):
            for found, wanted in zip(states.read(i), pair, strict=True):
                assert np.allclose(found, wanted, atol=0.02)
    assert told == [40]


def test_a_full_disk_while_reading_is_one_line(tmp_path, reader):
    data = repeating(40)
    rule = source_rule(data, SHAPE.source_tokens)
    name = f"{data.digest()}-2.states.f16"
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / name).symlink_to("/dev/full")
    with (
        pytest.raises(BlockDrafterError, match=r"cannot write .*: No space left on device"),
        kept_states(tmp_path / "d", data, rule, reader),
    ):
        pass


def test_data_without_whole_prompts_are_refused():
    data = repeating(20)
    check_examples(data)
    data.whole_prompts = False
    with pytest.raises(BlockDrafterError, match="does not hold whole prompts"):
        check_examples(data)
    named = repeating(20)
    named.examples[3] = dataclasses.replace(named.examples[3], is_source=True)
    with pytest.raises(BlockDrafterError, match="--encoder own"):
        check_examples(named)


def test_a_pattern_is_learned_from_states(trained):
    folder, stated = trained
    assert stated.scores["accepted_per_step"]["6"] > 5.0
    loaded = load_drafter(folder)
    assert loaded.manifest == stated and stated.states == TargetStates(2, 64)
    names = {name.split(".")[0] for name, _ in loaded.model.named_parameters()}
    assert "of_states" in names and "encoder" not in names
    assert not (folder / "training").exists()


def test_places_that_are_not_known_leave_the_others_where_they_are(trained):
    model = load_drafter(trained[0]).model
    predictor = BlockPredictor(model, int8=False)
    states = torch.randn(5, 64)
    whole = predictor.remember(states, torch.arange(5))
    part = predictor.remember(states[2:], torch.arange(2, 5))
    assert torch.allclose(whole.entries[:, :, 2:], part.entries, atol=1e-5)
    moved = predictor.remember(states[2:], torch.arange(3))
    assert not torch.allclose(moved.entries, part.entries, atol=1e-3)


def test_the_directory_states_what_is_read(trained):
    content = json.loads((trained[0] / NAME).read_text())
    assert content["format"] == 4 and content["states"] == {"layer": 2, "width": 64}


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ({"layer": 0, "width": 64}, "states.layer must be a whole number"),
        ({"layer": 2}, "states must have the fields layer, width"),
        ({"layer": 2, "width": "64"}, "states.width must be a whole number"),
        ([2, 64], "states must have the fields"),
    ],
)
def test_damaged_states_are_named(trained, tmp_path, states, said):
    content = json.loads((trained[0] / NAME).read_text()) | {"states": states}
    (tmp_path / NAME).write_text(json.dumps(content))
    with pytest.raises(BlockDrafterError, match=said):
        read_manifest(tmp_path)


def test_weights_of_another_encoder_do_not_fit(trained, tmp_path):
    loaded = load_drafter(trained[0])
    own = BlockModel(SHAPE, loaded.kept.num_rows, loaded.kept.num_classes)
    save_drafter(tmp_path, loaded.manifest, own, loaded.kept)
    with pytest.raises(BlockDrafterError, match="does not fit"):
        load_drafter(tmp_path)
