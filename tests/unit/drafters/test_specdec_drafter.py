"""The drafter `specdec`: its directory, its sources, its trees, its memory."""

import dataclasses

import pytest
import torch
from sglang.srt.environ import envs

from sglang_ext.block_drafter.drafter_files import save_drafter
from sglang_ext.block_drafter.drafter_manifest import NAME
from sglang_ext.block_drafter.nat_model import BlockModel
from sglang_ext.block_drafter.shapes import TargetStates
from sglang_ext.drafters import DrafterContext, DrafterError, DraftRequest, SequenceStates, load
from sglang_ext.drafters.specdec import BlockDrafter, BlockOptions
from sglang_ext.options import Options
from sglang_ext.preflight import PreflightError, check_launch
from tests.unit.block_drafter.toy_drafters import (
    END,
    SHAPE,
    VOCAB,
    manifest,
    repeating,
    trainer,
    training_set,
    untrained,
)

TOKENIZER = "0123456789abcdef"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A drafter that has learned to repeat the first token of its source."""
    made = tmp_path_factory.mktemp("specdec") / "drafter"
    torch.manual_seed(0)
    trainer(made, repeating()).run()
    return made


def context(folder, **options) -> DrafterContext:
    given = {"draft_model": str(folder), "specdec_retrieve": False, **options}
    return DrafterContext(
        VOCAB, Options(**given), tokenizer_fingerprint=TOKENIZER, eos_token_ids=frozenset({END})
    )


@pytest.fixture(scope="module")
def drafter(folder):
    return BlockDrafter(context(folder))


def request(first: int, output, rid="r", **params) -> DraftRequest:
    return DraftRequest(rid, [5, 6, first, 10, 7], list(output), params)


def test_one_pass_drafts_for_all_requests(drafter):
    requests = [request(token, [token], rid=str(token)) for token in (12, 13, 14)]
    drafter.prefill(requests)
    before = drafter.counters["passes"]
    for made in requests:
        drafter.start(made)
    trees = drafter.propose(requests, 16)
    assert drafter.counters["passes"] == before + 1
    for made, tree in zip(requests, trees, strict=True):
        tree.check(VOCAB)
        assert len(tree) <= 16
        assert tree.path([made.output[0]] * SHAPE.block).sum() >= SHAPE.block - 1
    (alone,) = drafter.propose([requests[1]], 16)
    assert alone.tokens[0] == 13


def test_branches_are_an_option_and_1_is_the_chain(folder):
    made = request(12, [12])
    chain = BlockDrafter(context(folder, specdec_branches=1))
    chain.start(made)
    (tree,) = chain.propose([made], 16)
    assert tree.parents.tolist() == list(range(-1, len(tree) - 1))
    assert len(tree) <= SHAPE.block
    wide = BlockDrafter(context(folder, specdec_branches=3))
    (tree,) = wide.propose([made], 16)
    assert (tree.parents == -1).sum() > 1
    narrow = request(12, [12], specdec={"branches": 1})
    wide.start(narrow)
    again, alone = wide.propose([made, narrow], 16)
    assert alone.parents.tolist() == list(range(-1, len(alone) - 1))
    assert again.tokens.tolist() == tree.tokens.tolist()


def test_a_first_block_is_a_chain_behind_the_prompt(drafter):
    made = request(12, [])
    drafter.prefill([made])
    (tree,) = drafter.prefill_draft([made], 4)
    assert tree.parents.tolist() == list(range(-1, len(tree) - 1))
    assert 1 <= len(tree) <= 4


def test_a_source_is_the_prompt_or_what_the_request_names(drafter):
    named = request(12, [15], specdec={"source": [15, 10]})
    drafter.start(named)
    (tree,) = drafter.propose([named], 8)
    assert tree.tokens[0] == 15
    plain = request(12, [12])
    drafter.start(plain)
    drafter.propose([plain], 8)
    # Of [5, 6, 12, 10, 7] the template's tokens are left out.
    assert plain.state.memory.nbytes == named.state.memory.nbytes


def test_a_request_keeps_a_bounded_memory_until_it_ends(drafter):
    made = DraftRequest("long", [9] * 5000, [9])
    drafter.start(made)
    drafter.propose([made], 8)
    entries = (SHAPE.source_tokens + SHAPE.window) * SHAPE.decoder_layers * 2
    assert made.state.memory.nbytes == (entries + 1) * SHAPE.width * 4
    drafter.finish(made, completed=False)
    assert made.state is None


def test_a_retracted_request_is_taken_up_again(drafter):
    made = request(12, [12])
    drafter.prefill([made])
    memory = made.state.memory
    made.output.extend([12, 12])
    drafter.start(made)
    assert made.state.memory is memory
    drafter.finish(made, completed=False)
    drafter.start(made)
    (tree,) = drafter.propose([made], 8)
    assert tree.tokens[0] == 12


def paths(tree) -> set[tuple[int, ...]]:
    """Every node as the tokens from the root to it."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


def test_with_retrieval_one_tree_holds_both(folder):
    server = context(folder, specdec_retrieve=True)
    both, retrieval = BlockDrafter(server), load("sssd", server)
    # The prompt says that 30 and 31 follow 11; the drafter has learned nothing of them.
    made = DraftRequest("both", [5, 6, 12, 11, 30, 31, 11, 10, 7], [12, 11])
    others = [dataclasses.replace(made, state=None) for _ in range(2)]
    both.start(made)
    (tree,) = both.propose([made], 60)
    tree.check(VOCAB)

    others[0].params = {"specdec": {"retrieve": False}}
    both.start(others[0])
    (drafted,) = both.propose([others[0]], 20)
    retrieval.start(others[1])
    (retrieved,) = retrieval.propose([others[1]], 20)
    assert (30, 31) in paths(retrieved) - paths(drafted)
    assert paths(tree) >= paths(retrieved) and paths(tree) & paths(drafted)

    before = [weight.weight for weight in both._mixture.weights]
    made.output += [30, 31, 11]
    both.propose([made], 60)
    after = [weight.weight for weight in both._mixture.weights]
    assert any(new > old for new, old in zip(after, before, strict=True)), "retrieval was right"
    both.finish(made, completed=True)
    both.finish(others[0], completed=True)


def test_another_targets_drafter_ends_the_start(folder):
    other = dataclasses.replace(context(folder), tokenizer_fingerprint="f" * 16)
    with pytest.raises(DrafterError, match="trained for repeater, whose tokenizer is another"):
        BlockDrafter(other)
    with pytest.raises(DrafterError, match="not for smollm2"):
        BlockDrafter(dataclasses.replace(context(folder), model_path="/models/smollm2"))
    with pytest.raises(DrafterError, match="vocabulary of 48"):
        BlockDrafter(dataclasses.replace(context(folder), vocab_size=40))
    with pytest.raises(DrafterError, match="needs --draft-model"):
        BlockDrafter(context(""))


def test_a_start_finds_what_is_wrong_before_the_model_is_loaded(folder, tmp_path):
    argv = ["--speculative-algorithm", "SSSD", "--model-path", "/models/other", "--port", "39999"]
    with pytest.raises(PreflightError, match="trained for repeater, not for other"):
        check_launch(argv, Options(draft_model=str(folder)))
    (tmp_path / NAME).write_text("[]")
    with pytest.raises(PreflightError, match="damaged"):
        check_launch(argv, Options(draft_model=str(tmp_path)))
    with pytest.raises(PreflightError, match="needs --draft-model"):
        check_launch(argv, Options(drafter="specdec"))


def test_a_drafters_directory_makes_specdec_the_default(folder):
    assert Options(draft_model=str(folder)).loaded_drafters() == ["specdec", "sssd"]
    assert Options(draft_model="whisper-tiny.en").loaded_drafters()[0] == "specasr"
    assert Options(draft_model=str(folder), drafter="sssd").default_drafter == "sssd"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "specdec must be an object"),
        ({"sauce": "x"}, "'sauce' is unknown"),
        ({"source": 3}, "specdec.source must be a text"),
        ({"source": [-1]}, "specdec.source must be a text"),
        ({"source": "x" * 70000}, "specdec.source must be a text"),
        ({"retrieve": "yes"}, "specdec.retrieve must be true or false"),
        ({"branches": 0}, "specdec.branches must be a whole number of 1 to 8"),
    ],
)
def test_bad_params_are_refused_by_name(given, said):
    with pytest.raises(ValueError, match=said):
        BlockDrafter.check({"specdec": given})


def test_good_params_are_taken():
    BlockDrafter.check({})
    BlockDrafter.check({"specdec": {"source": "A man in a blue shirt", "retrieve": False}})
    assert BlockOptions.parse({"source": [4, 5], "retrieve": None}).source == (4, 5)


def test_token_ids_need_the_messages_that_can_carry_them():
    with (
        envs.SGLANG_USE_PICKLE_IPC.override(False),
        pytest.raises(ValueError, match="cannot be token ids"),
    ):
        BlockDrafter.check({"specdec": {"source": [4]}})


def test_params_that_passed_no_check_cost_nothing(drafter):
    made = request(12, [12], specdec={"sauce": 1})
    drafter.start(made)
    assert len(drafter.propose([made], 8)[0])


def test_an_untrained_drafter_proposes_trees_that_are_possible(tmp_path):
    model, kept = untrained()
    data = repeating(40)
    stated = manifest(data, training_set(data)[1], kept.outputs)
    save_drafter(tmp_path / "d", stated, model, kept)
    made = request(12, [12])
    drafter = BlockDrafter(context(tmp_path / "d", specdec_branches=8))
    drafter.start(made)
    for _ in range(3):
        (tree,) = drafter.propose([made], 40)
        tree.check(VOCAB)
        made.output.append(int(tree.tokens[0]))


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory):
    """An untrained drafter that reads a target's states of 8 numbers."""
    made, data = tmp_path_factory.mktemp("shared") / "d", repeating(40)
    kept = untrained()[1]
    states = TargetStates(3, 8)
    model = BlockModel(SHAPE, kept.num_rows, kept.num_classes, states=states)
    stated = manifest(data, training_set(data)[1], kept.outputs, states=states)
    save_drafter(made, stated, model, kept)
    return made


def test_a_shared_encoder_reads_a_prompt_once_and_what_was_written_in_each_step(shared_folder):
    drafter, asked = BlockDrafter(context(shared_folder)), []

    def states(begin: int, end: int) -> SequenceStates:
        asked.append((begin, end))
        return SequenceStates(torch.ones(end - begin, 8).half(), torch.arange(end - begin))

    made = dataclasses.replace(request(12, []), target_states=states)
    assert drafter.states_layer == 3
    drafter.prefill([made])
    (chain,) = drafter.prefill_draft([made], 8)
    assert not len(chain) and not asked  # the target has yet to read
    drafter.start(made)
    for _ in range(3):
        made.output.append(12)
        (tree,) = drafter.propose([made], 8)
        assert len(tree)
    # Of [5, 6, 12, 10, 7] what is behind the template's first tokens; the last one is unread.
    assert asked == [(2, 5), (5, 5), (5, 6), (6, 7)]
    assert drafter.counters["sources"] == 1 and drafter.counters["source_tokens"] == 3
    assert made.state.memory.count == 3 + 2
    made.output.extend([12] * 40)
    drafter.propose([made], 8)
    assert asked[-1] == (5 + 42 - SHAPE.window, 5 + 42)


def test_without_states_the_block_is_silent_and_others_of_the_batch_are_not(shared_folder):
    drafter = BlockDrafter(context(shared_folder))

    def states(begin: int, end: int) -> SequenceStates:
        known = min(1, end - begin)
        return SequenceStates(torch.ones(known, 8).half(), torch.tensor([1])[:known])

    def none(begin: int, end: int) -> SequenceStates:
        return SequenceStates(torch.ones(0, 8).half(), torch.arange(0))

    given = [none, states, None]
    rows = [dataclasses.replace(request(12, [12]), target_states=each) for each in given]
    for row in rows:
        drafter.start(row)
    assert [len(tree) > 0 for tree in drafter.propose(rows, 8)] == [False, True, False]
    assert [len(tree) for tree in drafter.propose([rows[0]], 8)] == [0]


def test_a_source_is_refused_where_the_target_is_the_encoder(shared_folder, folder, monkeypatch):
    monkeypatch.setenv("SGLANG_EXT_DRAFT_MODEL", str(shared_folder))
    with pytest.raises(ValueError, match=r"source must be left out: .* reads the target's states"):
        BlockDrafter.check({"specdec": {"source": "A man"}})
    BlockDrafter.check({"specdec": {"branches": 2}})
    monkeypatch.setenv("SGLANG_EXT_DRAFT_MODEL", str(folder))
    BlockDrafter.check({"specdec": {"source": "A man"}})
