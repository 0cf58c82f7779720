"""The draft model's inference against transformers', which has no tree masks: path by path."""

import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode

from scripts.lib.specasr_simulation import greedy_output
from speech.specasr import draft_model, weights
from speech.specasr.draft_model import DraftWhisper, Feed, audio_frames
from tests.unit.speech.specasr_models import FRAMES, MEL_BINS, POSITIONS, random_whisper

VOCAB = 60


@pytest.fixture(scope="module")
def reference():
    return random_whisper(VOCAB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, reference):
    folder = tmp_path_factory.mktemp("whisper")
    reference.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return DraftWhisper.load(folder, "float32")


def audio(seed: int = 0) -> torch.Tensor:
    return torch.randn(MEL_BINS, FRAMES, generator=torch.Generator().manual_seed(seed))


def expected(reference, features, tokens) -> torch.Tensor:
    with torch.no_grad():
        return reference(features[None], decoder_input_ids=torch.tensor([tokens])).logits[0]


def test_chain_at_once_and_token_by_token(model, reference):
    features, tokens = audio(), [1, 5, 9, 40, 7, 7, 30]
    right = expected(reference, features, tokens)
    at_once = model.logits([model.encode(features)], [Feed.chain(tokens, -1)])
    torch.testing.assert_close(at_once, right, rtol=1e-4, atol=1e-4)
    cache = model.encode(features)
    for i, token in enumerate(tokens):
        logits = model.logits([cache], [Feed.chain([token], i - 1)])
        torch.testing.assert_close(logits[0], right[i], rtol=1e-4, atol=1e-4)


def test_branches_see_their_own_ancestors_only(model, reference):
    features = audio()
    cache = model.encode(features)
    model.logits([cache], [Feed.chain([1, 5, 9], -1)])
    # 1 5 9 with branches 9-20-21, 9-30 (a sibling of 20), 5-40 and, below 30, 31.
    first = model.logits([cache], [Feed([20, 30, 40], [2, 2, 1])])
    second = model.logits([cache], [Feed([21, 31], [3, 4])])
    paths = [[1, 5, 9, 20], [1, 5, 9, 30], [1, 5, 40], [1, 5, 9, 20, 21], [1, 5, 9, 30, 31]]
    for logits, path in zip([*first, *second], paths, strict=True):
        right = expected(reference, features, path)[-1]
        torch.testing.assert_close(logits, right, rtol=1e-4, atol=1e-4)
    # Branches gone, the chain goes on as if they had not been.
    cache.truncate(2)
    logits = model.logits([cache], [Feed.chain([8, 3], 1)])
    right = expected(reference, features, [1, 5, 8, 3])[2:]
    torch.testing.assert_close(logits, right, rtol=1e-4, atol=1e-4)


def test_requests_of_any_length_share_a_pass(model, reference):
    sequences = [[1, 5], [1, 6, 7, 8, 9, 10], [2]]
    features = [audio(seed) for seed in range(3)]
    caches = [model.encode(mels) for mels in features]
    for cache, tokens in zip(caches, sequences, strict=True):
        if tokens[:-1]:
            model.logits([cache], [Feed.chain(tokens[:-1], -1)])
    feeds = [Feed.chain(tokens[-1:], len(tokens) - 2) for tokens in sequences]
    feeds[1] = Feed([10, 11], [4, 4])
    logits = model.logits(caches, feeds)
    paths = [(0, sequences[0]), (1, sequences[1]), (1, [1, 6, 7, 8, 9, 11]), (2, sequences[2])]
    for row, (request, tokens) in zip(logits, paths, strict=True):
        right = expected(reference, features[request], tokens)[-1]
        torch.testing.assert_close(row, right, rtol=1e-4, atol=1e-4)


def test_cache_grows_with_its_content(model, reference):
    features = audio()
    tokens = [1 + i % 50 for i in range(POSITIONS - 1)]
    cache = model.encode(features)
    for first in range(0, len(tokens), 100):
        logits = model.logits([cache], [Feed.chain(tokens[first : first + 100], first - 1)])
    right = expected(reference, features, tokens)
    torch.testing.assert_close(logits[-1], right[-1], rtol=1e-3, atol=1e-3)


def test_greedy_output_is_what_transformers_writes(model, reference):
    features, tokens = audio(7), [1, 5]
    while len(tokens) < 40:
        tokens.append(int(expected(reference, features, tokens)[-1].argmax()))
    assert greedy_output(model, features, tokens[:2], end=-1)[:38] == tokens[2:]
    end = tokens[12]
    stopped = greedy_output(model, features, tokens[:2], end)
    assert stopped == tokens[2 : 3 + tokens[2:].index(end)]


def test_step_gives_the_likeliest_tokens(model, reference):
    features = audio()
    (answer,) = model.step([model.encode(features)], [Feed.chain([1, 5], -1)])
    right = expected(reference, features, [1, 5]).softmax(-1)
    for prediction, row in zip(answer, right, strict=True):
        assert prediction.tokens == row.topk(len(prediction.tokens)).indices.tolist()
        assert prediction.probs == pytest.approx(row.topk(4).values.tolist(), rel=1e-3)


def test_int8_is_close(folder, reference):
    features, tokens = audio(), [1, 5, 9, 40, 7]
    model = DraftWhisper.load(folder, "int8")
    logits = model.logits([model.encode(features)], [Feed.chain(tokens, -1)])
    right = expected(reference, features, tokens)
    assert (logits - right).norm() < 0.1 * right.norm()


def test_float16_is_close_and_stays_so(folder, reference):
    features, tokens = audio(), [1, 5, 9, 40, 7]
    model = DraftWhisper.load(folder, "float16")
    cache = model.encode(features)
    logits = model.logits([cache], [Feed.chain(tokens, -1)])
    assert {t.dtype for t in (logits, cache.keys, cache.cross_keys)} == {torch.float16}
    right = expected(reference, features, tokens)
    assert (logits.float() - right).norm() < 0.01 * right.norm()


def test_on_a_gpu_nothing_of_it_is_on_the_host(folder, monkeypatch):
    [file] = folder.glob("*.safetensors")
    stored = load_file(file)  # which fake tensors cannot
    monkeypatch.setattr(weights, "load_file", lambda _: stored)
    monkeypatch.setattr(draft_model, "audio_frames", lambda *_: FRAMES)  # reads the host's values
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = DraftWhisper.load(folder, device="cuda")
        cache = model.encode(audio())
        model.logits([cache], [Feed.chain([1, 5, 9], -1)])
        # With branches, so that there is a mask.
        feeds = [Feed([2, 3], [2, 1]), Feed.chain([4, 5], -1)]
        logits = model.logits([cache, model.encode(audio(1))], feeds)
        for tensor in (logits, cache.keys, cache.cross_values):
            assert (tensor.device.type, tensor.dtype) == ("cuda", torch.float16)


def test_int8_is_for_cpus(folder):
    with pytest.raises(ValueError, match="int8 has products for device cpu only, not for cuda"):
        DraftWhisper.load(folder, "int8", "cuda")


def test_silence_behind_the_audio_is_left_out():
    features = torch.full((MEL_BINS, 100), -1.5)
    features[3, 20] = 0.0
    assert audio_frames(features, 0) == 22
    assert audio_frames(features, 10) == 32
    assert audio_frames(features, 1000) == 100
    assert audio_frames(torch.zeros(MEL_BINS, 100), 10) == 10


@pytest.mark.parametrize("shape", [(MEL_BINS + 1, FRAMES), (MEL_BINS, FRAMES + 1), (MEL_BINS, 0)])
def test_features_of_another_shape_are_refused(model, shape):
    with pytest.raises(ValueError, match=f"features are {shape[0]} x {shape[1]}"):
        model.encode(torch.zeros(shape))


def test_folders_that_hold_no_whisper(tmp_path, folder):
    with pytest.raises(ValueError, match=r"no config\.json"):
        DraftWhisper.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="'llama', not 'whisper'"):
        DraftWhisper.load(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="safetensors"):
        DraftWhisper.load(tmp_path)
    with pytest.raises(ValueError, match="precision 'int4'"):
        DraftWhisper.load(folder, "int4")
