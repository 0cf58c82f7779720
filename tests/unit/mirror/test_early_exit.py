"""The early exit: where it looks, what it says, and what becomes of its failures."""

import time

import numpy as np
import pytest
import torch

from datastores import Datastore
from sglang_ext.mirror.early_exit import EarlyExit, layer_at
from sglang_ext.mirror.fit_texts import carried_texts, frequent_tokens, served_texts
from sglang_ext.mirror.lens import Lens
from sglang_ext.mirror.proxy import Proxy, narrowed
from sglang_ext.mirror.target_parts import ExitError, parts_of, tap_normed, tap_state
from tests.unit.mirror.layered_model import (
    DEPTH,
    VOCAB,
    CapturingLayer,
    Layer,
    LayeredModel,
    PairLayer,
)

TOKENS = torch.arange(7)


def proxy_of(model: LayeredModel, kappa: int = 5) -> Proxy:
    return Proxy(parts_of(model, DEPTH, VOCAB), kappa)


@pytest.mark.parametrize("layer", [Layer, PairLayer, CapturingLayer])
@pytest.mark.parametrize("exit_layer", [1, 2, DEPTH - 1])
def test_the_state_is_what_the_first_layers_leave_in_the_residual(layer, exit_layer):
    model, seen, final = LayeredModel(layer), [], []
    parts = parts_of(model, DEPTH, VOCAB)
    ends = [tap_state(parts.layers, exit_layer, seen.append), tap_normed(parts.norm, final.append)]
    normed = model.model(TOKENS)
    torch.testing.assert_close(seen, [model.states(TOKENS)[exit_layer]])
    torch.testing.assert_close(final, [normed])
    for end in ends:
        end()
    model(TOKENS)
    assert len(seen) == len(final) == 1


def test_whoever_captures_a_layers_state_gets_it_too():
    model, theirs, ours = LayeredModel(CapturingLayer), [], []
    model.model.captures = {2: lambda state, owned: theirs.append(state)}
    tap_state(model.model.layers, 2, ours.append)
    model(TOKENS)
    torch.testing.assert_close(theirs, ours)


def test_layers_whose_residual_is_out_of_sight_are_refused():
    stage = type("Stage", (), {"__module__": "sglang.srt.layers.layer_boundary.stage"})

    class Hidden(Layer):
        def __init__(self):
            super().__init__()
            self.attn_boundary = stage()

    with pytest.raises(ExitError, match="Hidden does not show its state"):
        tap_state(LayeredModel(Hidden).model.layers, 2, print)


@pytest.mark.parametrize(
    ("depth", "layers", "layer"), [(0.5, 30, 15), (0.9, 30, 27), (0.9, 4, 3), (0.9, 2, 1)]
)
def test_a_depth_is_a_layer_between_two_others(depth, layers, layer):
    assert layer_at(depth, layers) == layer


@pytest.mark.parametrize("exit_layer", [0, DEPTH])
def test_an_exit_lies_between_two_layers(exit_layer):
    with pytest.raises(ExitError, match=f"behind layer 1 to {DEPTH - 1}"):
        tap_state(LayeredModel().model.layers, exit_layer, print)


def test_a_model_without_the_parts_is_refused():
    model = LayeredModel()
    with pytest.raises(ExitError, match="no list of 9 decoder layers"):
        parts_of(model, 9, VOCAB)
    del model.lm_head
    with pytest.raises(ExitError, match="no LM head"):
        parts_of(model, DEPTH, VOCAB)


def test_without_a_lens_the_head_reads_the_normalised_state():
    model = LayeredModel()
    state = model.states(TOKENS)[2]
    tokens, logprobs = proxy_of(model).candidates(state)
    expected = torch.log_softmax(model.lm_head(model.model.norm(state)), dim=-1).topk(5)
    torch.testing.assert_close(tokens, expected.indices)
    torch.testing.assert_close(logprobs, expected.values)


def test_logits_are_scaled_and_capped_as_the_targets():
    model = LayeredModel()
    model.logits_processor = torch.nn.Identity()
    model.logits_processor.logit_scale, model.logits_processor.final_logit_softcapping = 0.5, 2.0
    normed = torch.randn(3, 12)
    logits = parts_of(model, DEPTH, VOCAB).logits(normed)
    torch.testing.assert_close(logits, 2.0 * torch.tanh(0.5 * model.lm_head(normed) / 2.0))


def test_a_narrow_head_is_asked_about_its_tokens_alone():
    model = LayeredModel()
    state, asked = model.states(TOKENS)[2], torch.tensor([3, 8, 9, 20, 31, 39])
    tokens, logprobs = narrowed(proxy_of(model), asked).candidates(state)
    logits = model.lm_head(model.model.norm(state))[:, asked]
    expected = torch.log_softmax(logits, dim=-1).topk(5)
    torch.testing.assert_close(tokens, asked[expected.indices])
    torch.testing.assert_close(logprobs, expected.values)
    lens = Lens(torch.randn(12, 12), torch.randn(12), 1)
    lensed = Proxy(parts_of(model, DEPTH, VOCAB), 5, lens)
    folded = narrowed(lensed, asked).logits(state)
    torch.testing.assert_close(folded, lensed.logits(state)[:, asked], atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="5 candidates need as many tokens, got 2"):
        narrowed(proxy_of(model), asked[:2])


def test_a_pass_is_told_of_once_in_its_middle_for_the_rows_asked_about():
    model = LayeredModel(CapturingLayer)
    exit, told, order = EarlyExit(proxy_of(model), 2), [], []
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda *_, i=i: order.append(i))
    rows = np.array([1, 4])

    def tell(tokens, logprobs):
        order.append("told")
        told.append((tokens, logprobs))

    began = time.perf_counter()
    with exit.watching(rows, len(TOKENS), tell) as look:
        assert look.reached_at is None
        model(TOKENS)
        model(TOKENS)  # whatever else runs within is not what was asked about
    assert began < look.reached_at < time.perf_counter() - look.seconds
    model(TOKENS)
    assert len(told) == 1 and order[:6] == [0, 1, 2, "told", 3, 0]
    expected = proxy_of(model).candidates(model.states(TOKENS)[2][rows])
    np.testing.assert_array_equal(told[0][0], expected[0])
    np.testing.assert_allclose(told[0][1], expected[1], rtol=1e-5)
    assert told[0][0].dtype == np.int32 and told[0][1].dtype == np.float32
    assert exit.passes == 1 and exit.seconds > 0


def test_a_failing_exit_is_logged_once_and_the_passes_go_on(caplog):
    model = LayeredModel()
    exit = EarlyExit(proxy_of(model), 2)

    def fail(tokens, logprobs):
        raise RuntimeError("no room")

    plain = model(TOKENS)
    for _ in range(3):
        with exit.watching(None, len(TOKENS), fail):
            torch.testing.assert_close(model(TOKENS), plain)
    assert caplog.text.count("the early exit failed") == 1 and "no room" in caplog.text


def test_a_pass_of_other_rows_than_expected_closes_the_exit(caplog):
    model = LayeredModel()
    told = []
    with EarlyExit(proxy_of(model), 2).watching(None, 5, lambda *args: told.append(args)):
        model(TOKENS)
    assert not told and "a pass of 7 tokens, 5 were expected" in caplog.text


class Words:
    """A tokenizer whose tokens are words' lengths."""

    chat_template = None

    def encode(self, text):
        return [len(word) % VOCAB for word in text.split()]


def test_the_carried_texts_leave_half_of_the_questions_unseen():
    texts = carried_texts(Words())
    assert len(texts) == 240 and max(map(len, texts)) == 256


def test_served_texts_are_the_default_namespaces_newest_first():
    with Datastore(vocab_size=VOCAB) as store:
        store.add(range(10, 20))
        store.add(range(20, 30))
        store.add(range(5, 15), namespace="theirs")
        store.flush()
        assert served_texts([store]) == [list(range(20, 30)), list(range(10, 20))]
        assert served_texts([store], tokens=5) == [list(range(20, 30))]


def test_the_most_frequent_tokens_come_first_and_low_ids_fill_up():
    assert frequent_tokens([[7, 7, 3], [9, 9]], 2, VOCAB).tolist() == [7, 9]
    assert frequent_tokens([[7, 7, 3]], 4, VOCAB).tolist() == [0, 1, 3, 7]
