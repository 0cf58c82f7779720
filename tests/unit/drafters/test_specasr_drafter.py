"""The drafter over a small random draft model: what the worker does to it, in every order."""

import pytest
import torch

from sglang_ext.drafters import Drafter, DrafterContext, DrafterError, DraftRequest
from sglang_ext.drafters.specasr import WhisperDrafter, server_options
from sglang_ext.options import Options
from sglang_ext.tree import TokenTree
from speech.specasr import sparse_tree
from speech.specasr.draft_options import MODES, SpecASROptions
from tests.unit.speech.specasr_models import FRAMES, MEL_BINS, POSITIONS, vocab, write_whisper

TARGET_TEXTS = ["ab", "abc"]
SPECIAL = len(vocab(TARGET_TEXTS))
START, ENGLISH, FRENCH, TRANSCRIBE, PLAIN = (SPECIAL + i for i in (1, 2, 3, 5, 7))
PROMPT = [START, ENGLISH, TRANSCRIBE, PLAIN]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, texts in (("target", TARGET_TEXTS), ("draft", ["bc"])):
        (folder / name).mkdir()
        write_whisper(folder / name, texts)
    return folder


@pytest.fixture(scope="module")
def context(folders):
    return DrafterContext(
        vocab_size=SPECIAL + 10,
        options=Options(draft_model=str(folders / "draft"), asp_length=10, asp_threshold=0.0),
        model_path=str(folders / "target"),
    )


@pytest.fixture
def drafter(context, monkeypatch):
    # A random model is sure of nothing.
    monkeypatch.setattr(sparse_tree, "FLOOR", 0.0)
    return WhisperDrafter(context)


def request(rid: str = "0", audio: bool = True, prompt=PROMPT, **options) -> DraftRequest:
    torch.manual_seed(int(rid))
    features = torch.randn(MEL_BINS, FRAMES) if audio else None
    return DraftRequest(rid, prompt, [], {"specasr": options} if options else {}, features)


def begin(drafter, *requests: DraftRequest) -> None:
    drafter.prefill(requests)
    for one in requests:
        one.output.append(97)
        drafter.start(one)


def commit(drafter, one: DraftRequest, tokens) -> None:
    one.output.extend(tokens)
    drafter.observe(one, tokens)


def same(tree, other) -> bool:
    return tree.tokens.tolist() == other.tokens.tolist()


def test_is_a_drafter(drafter):
    assert isinstance(drafter, Drafter)


@pytest.mark.parametrize("mode", MODES)
def test_drafts_valid_trees_and_counts(drafter, context, mode):
    one = request(mode=mode)
    begin(drafter, one)
    for step in range(6):
        (tree,) = drafter.propose([one], 15)
        tree.check(context.vocab_size)
        assert 0 < len(tree) <= 15
        commit(drafter, one, [*tree.tokens[: step % 3].tolist(), 98])
    drafter.finish(one, True)
    assert one.state is None
    counters = drafter.counters
    assert counters["rounds"] == 6
    assert counters["draft_steps"] >= 6
    assert counters["decoder_seconds"] > 0
    assert counters["encoder_seconds"] > 0


def test_a_batch_drafts_what_its_requests_would_alone(drafter, context):
    together = [request(str(i)) for i in range(3)]
    begin(drafter, *together)
    commit(drafter, together[1], [98, 99])
    trees = drafter.propose(together, 15)
    for i, tree in enumerate(trees):
        lonely = WhisperDrafter(context)
        alone = request(str(i))
        begin(lonely, alone)
        if i == 1:
            commit(lonely, alone, [98, 99])
        assert same(lonely.propose([alone], 15)[0], tree)
    drafter.finish(together[0], True)
    assert len(drafter.propose(together[1:], 15)) == 2


def test_a_retracted_request_comes_back(drafter):
    one, other = request("1"), request("1")
    begin(drafter, one)
    commit(drafter, one, [98, 99])
    drafter.propose([one], 15)
    drafter.start(one)  # with its state
    begin(drafter, other)
    other.output[:] = one.output
    other.state = None
    drafter.start(other)  # and without, not prefilled again
    assert same(*drafter.propose([one, other], 15))


def test_without_audio_or_in_another_language_nothing_is_drafted(drafter):
    silent = request(audio=False)
    french = request("1", prompt=[START, FRENCH, TRANSCRIBE, PLAIN])
    begin(drafter, silent, french)
    trees = drafter.propose([silent, french], 15)
    assert len(trees[0]) == 0
    # This vocabulary is not GPT-2's, so the draft model counts as multilingual.
    assert len(trees[1]) > 0
    assert [len(tree) for tree in drafter.propose([french], 0)] == [0]


def test_an_output_longer_than_the_draft_models_positions(drafter):
    one = request()
    begin(drafter, one)
    commit(drafter, one, [98] * POSITIONS)
    assert len(drafter.propose([one], 15)[0]) == 0
    commit(drafter, one, [98])
    assert len(drafter.propose([one], 15)[0]) == 0


def test_a_requests_options(drafter):
    one = request(mode="fixed", length=3)
    begin(drafter, one)
    assert drafter.propose([one], 15)[0].depths().max() <= 3
    odd = request("1", mode="best")
    begin(drafter, odd)  # past the HTTP layer: drafted for as the server says
    assert len(drafter.propose([odd], 15)[0]) > 0
    with pytest.raises(ValueError, match=r"custom_params\.specasr\.mode 'best'"):
        WhisperDrafter.check({"specasr": {"mode": "best"}})
    WhisperDrafter.check({})
    WhisperDrafter.check({"specasr": {"mode": "asp", "length": 8}, "other": 1})


def test_what_the_target_said_is_taken_only_for_the_nodes_that_it_verified(drafter):
    one = request()
    begin(drafter, one)
    (tree,) = drafter.propose([one], 15)
    session = one.state
    drafter.verified(one, tree.first(1), [98, 99])
    assert session.chain.choices[session.chain.start] == 98
    session.chain.choices.clear()
    other = TokenTree(tree.tokens + 1, tree.parents, tree.probs)
    drafter.verified(one, other, [98] * (len(other) + 1))
    assert session.chain.choices == {}


def test_server_options_are_the_defaults():
    options = Options(specasr_mode="asp", asp_length=7, asp_threshold=0.3)
    assert server_options(options) == SpecASROptions("asp", 7, 0.3)


@pytest.mark.parametrize(
    ("draft", "target", "message"),
    [
        ("nowhere", "target", "draft model '.*nowhere'"),
        (".", "target", r"no tokenizer\.json"),
        ("draft", "", "target's folder is not known"),
    ],
)
def test_models_that_cannot_be_had(folders, draft, target, message):
    context = DrafterContext(
        vocab_size=300,
        options=Options(draft_model=str(folders / draft)),
        model_path=str(folders / target) if target else "",
    )
    with pytest.raises(DrafterError, match=message):
        WhisperDrafter(context)


def test_a_target_that_is_no_whisper(folders, tmp_path):
    text = (folders / "target" / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace("<|endoftext|>", "<|end|>"))
    options = Options(draft_model=str(folders / "draft"))
    with pytest.raises(DrafterError, match="not a Whisper"):
        WhisperDrafter(DrafterContext(300, options, model_path=str(tmp_path)))
