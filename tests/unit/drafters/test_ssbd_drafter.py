"""The previous output as a draft: where it goes on, whose it is, what a request may ask."""

import numpy as np
import pytest
from sglang.srt.environ import envs

from sglang_ext.drafters import DrafterContext, DraftRequest, load
from sglang_ext.drafters.realignment import PreviousOutput
from sglang_ext.drafters.ssbd import RetranslationDrafter, RetranslationOptions
from sglang_ext.options import Options
from sglang_ext.request_options import RequestOptions
from sglang_ext.tree import NO_PARENT, TokenTree, merged


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    """Every node as the tokens from the root to it."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent != NO_PARENT else ()), token))
    return set(found)


OLD = [10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("output", "first"),
    [
        ([], 10),
        ([10, 11], 12),
        ([10, 99, 12], 13),  # one token replaced
        ([10, 99, 11], 12),  # one put in
        ([10, 12], 13),  # one left out
        ([10, 98, 99, 13, 14], 15),  # several
    ],
)
def test_drafts_go_on_where_the_outputs_meet(output, first):
    previous = PreviousOutput(OLD)
    previous.follow(output)
    tree = previous.drafts(8)
    assert tree.tokens[0] == first
    assert paths(tree) == {tuple(OLD[i:j]) for i in [OLD.index(first)] for j in range(i + 1, 7)}


def test_beside_a_disagreement_the_likeliest_places_are_branches():
    previous = PreviousOutput(OLD)
    previous.follow([10, 99])
    tree = previous.drafts(8)
    assert {(12,), (11,), (13,)} <= paths(tree)
    assert tree.tokens[0] == 12  # the new token for one old one
    assert (np.diff(tree.probs) <= 0).all()
    tree.check(100)


def test_following_in_steps_is_following_at_once():
    output = [10, 99, 12, 13, 50, 51, 15]
    whole, stepwise = PreviousOutput(OLD), PreviousOutput(OLD)
    whole.follow(output)
    for end in range(1, len(output) + 1):
        stepwise.follow(output[:end])
    assert whole == stepwise


def test_only_the_published_part_is_expected():
    previous = PreviousOutput(OLD)
    assert previous.expected() == OLD
    previous.follow([10, 11])
    assert list(previous.expected()) == OLD[2:]
    previous.follow([10, 11, 99, 13])
    assert not previous.expected()
    assert list(previous.realigned()) == OLD[4:]


def test_longer_outputs_than_the_previous_one_have_nothing_left():
    previous = PreviousOutput([1, 2])
    previous.follow([1, 2])
    assert not previous.expected() and len(previous.drafts(8)) == 0
    previous.follow([1, 2, 3, 4, 5])
    assert len(previous.drafts(8)) == 0


def test_merged_trees_share_their_paths():
    one = TokenTree.chain([1, 2, 3], 0.5)
    other = TokenTree(
        np.array([1, 4]), np.array([-1, 0], np.int32), np.array([0.9, 0.4], np.float32)
    )
    tree = merged([one, other], 8)
    assert paths(tree) == {(1,), (1, 2), (1, 2, 3), (1, 4)}
    assert tree.probs[0] == np.float32(0.9)
    assert tree.tokens.tolist() == [1, 4, 2, 3]
    assert paths(merged([one, other], 2)) == {(1,), (1, 4)}
    assert len(merged([TokenTree.empty(), TokenTree.empty()], 8)) == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("yes", "ssbd must be an object"),
        ({"beta": 1.5}, "ssbd.beta must be a number from 0 to 1, got 1.5"),
        ({"beta": True}, "ssbd.beta"),
        ({"beta": float("nan")}, "ssbd.beta"),
        ({"session": ""}, "ssbd.session must be a string of 1 to 256"),
        ({"draft": [1, -2]}, "ssbd.draft must be a list"),
        ({"draft": [1, True]}, "ssbd.draft must be a list"),
        ({"trim": 1.5}, "ssbd.trim"),
        ({"realign": 1}, "ssbd.realign must be true or false"),
        (
            {"session": "talk-7", "beta": 0.2},
            "ssbd.beta must be 0 or left out for the session 'talk",
        ),
        ({"bata": 0.2}, "ssbd.'bata' is unknown; known: session, draft, beta"),
    ],
)
def test_wrong_options_are_named(params, message):
    with pytest.raises(ValueError, match=r"^custom_params\.") as caught:
        RetranslationDrafter.check({"ssbd": params})
    assert message in str(caught.value)


def test_options_left_out_keep_their_defaults():
    assert RetranslationOptions.parse(None) == RetranslationOptions()
    assert RetranslationOptions.parse({"beta": None, "draft": [3]}).draft == (3,)


@pytest.fixture(scope="module")
def drafter():
    context = DrafterContext(vocab_size=200, options=Options(), eos_token_ids=frozenset({2}))
    return load("ssbd", context)


# A name that nobody guesses.
SECRET = "8f14e45f-ceea-467f-9d5c-6a1d3c1f2b3a"
NOT_INGESTED = RequestOptions(ingest=False)


def request(rid="r", output=(), options=NOT_INGESTED, **ssbd):
    return DraftRequest(rid, [50, 51, 52], list(output), {"ssbd": ssbd}, options=options)


def write(drafter, session, tokens, namespace="default", rid="r", ingest_name=None):
    """One request of a session, from its prefill to its end."""
    options = RequestOptions(namespace=namespace, ingest=False, ingest_name=ingest_name)
    made = request(rid, options=options, session=session)
    drafter.prefill([made])
    made.output += tokens[:1]
    drafter.start(made)
    made.output += tokens[1:]
    drafter.observe(made, tokens[1:])
    drafter.finish(made, True)


def test_the_next_request_of_a_session_drafts_the_last_output_without_its_end(drafter):
    write(drafter, SECRET, [10, 11, 12, 2])
    made = request(session=SECRET)
    drafter.prefill([made])
    assert drafter.prefill_draft([made], 8)[0].tokens.tolist() == [10, 11, 12]
    bias = drafter.bias(made)
    assert (list(bias.tokens), bias.beta) == ([10, 11, 12], 0.2)
    made.output.append(10)
    drafter.start(made)
    assert drafter.propose([made], 8)[0].tokens.tolist() == [11, 12]
    made.output.append(99)
    drafter.observe(made, [99])
    assert drafter.bias(made) is None
    assert 12 in drafter.propose([made], 8)[0].tokens


def drafted(drafter, session, namespace="default"):
    """What the session's next request is drafted."""
    made = request(options=RequestOptions(namespace=namespace), session=session)
    drafter.prefill([made])
    return drafter.prefill_draft([made], 8)[0].tokens.tolist()


@pytest.mark.parametrize("session", ["talk-7", "8f14e45f-ceea-367f-9d5c-6a1d3c1f2b3a", SECRET[:-1]])
@pytest.mark.parametrize(
    "asked", [{}, {"beta": 0.9}, {"beta": 0.9, "bias_realigned": True}], ids=str
)
def test_a_session_that_others_could_name_is_drafted_without_a_bias(session, asked, drafter):
    write(drafter, session, [10, 11, 12])
    made = request(session=session, **asked)
    drafter.prefill([made])
    assert drafter.prefill_draft([made], 8)[0].tokens.tolist() == [10, 11, 12]
    assert drafter.bias(made) is None
    made.output += [10, 99, 11]
    drafter.start(made)
    assert drafter.bias(made) is None and len(drafter.propose([made], 8)[0])


def test_a_draft_that_the_request_brings_is_biased_in_any_session(drafter):
    RetranslationDrafter.check({"ssbd": {"session": "talk-8", "draft": [10], "beta": 0.5}})
    RetranslationDrafter.check({"ssbd": {"session": "talk-8", "beta": 0}})
    RetranslationDrafter.check({"ssbd": {"session": SECRET.upper(), "beta": 0.5}})
    made = request(session="talk-8", draft=[10, 11], beta=0.5)
    drafter.prefill([made])
    assert list(drafter.bias(made).tokens) == [10, 11]


def test_a_deleted_namespace_leaves_no_session_output(drafter):
    for namespace in ("gone", "kept"):
        write(drafter, SECRET, [10, 11, 12], namespace)
    drafter.forget("gone", None)
    assert drafted(drafter, SECRET, "gone") == []
    assert drafted(drafter, SECRET, "kept") == [10, 11, 12]


def test_a_deleted_request_leaves_its_session_nothing_by_id_or_name(drafter):
    write(drafter, "by-id", [10, 11], "a", rid="r1")
    write(drafter, "by-name", [10, 12], "a", rid="r2", ingest_name="mine")
    write(drafter, "by-id", [10, 13], "b", rid="r1")
    for name in ("r2", "other"):  # has another name; is no request's
        drafter.forget(None, name)
    assert [drafted(drafter, s, "a") for s in ("by-id", "by-name")] == [[10, 11], [10, 12]]
    drafter.forget("a", "mine")
    drafter.forget("a", "r1")
    assert [drafted(drafter, s, "a") for s in ("by-id", "by-name")] == [[], []]
    assert drafted(drafter, "by-id", "b") == [10, 13]
    drafter.forget(None, "r1")
    assert drafted(drafter, "by-id", "b") == []


def test_a_request_that_runs_goes_on_without_what_was_deleted_and_is_not_kept(drafter):
    write(drafter, SECRET, [10, 11, 12, 13], "gone", rid="old")
    made = request("new", options=RequestOptions(namespace="gone"), session=SECRET, beta=0.9)
    drafter.prefill([made])
    write(drafter, SECRET, [20, 21], "gone", rid="beside")  # replaces it, but it is still drafted
    made.output.append(10)
    drafter.start(made)
    assert drafter.bias(made) and drafter.propose([made], 8)[0].tokens[0] == 11
    drafter.forget("gone", "old")
    assert drafter.bias(made) is None
    assert not {11, 12, 13} & set(drafter.propose([made], 8)[0].tokens.tolist())
    made.output += [11, 12]
    drafter.observe(made, [11, 12])
    before = drafter._retrieval.datastore.info().queued_documents
    drafter.finish(made, True)
    assert drafted(drafter, SECRET, "gone") == [20, 21]
    assert drafter._retrieval.datastore.info().queued_documents == before
    assert "gone" not in drafter._retrieval.datastore.namespaces()


def test_other_sessions_and_namespaces_have_no_draft(drafter):
    write(drafter, "mine", [10, 11, 12], namespace="a")
    for made in (request(session="mine"), request(session="other"), request()):
        drafter.prefill([made])
        assert len(drafter.prefill_draft([made], 8)[0]) == 0
        assert drafter.bias(made) is None


def test_aborted_outputs_do_not_become_drafts(drafter):
    write(drafter, "s2", [10, 11])
    made = request(session="s2", output=[10])
    drafter.start(made)
    drafter.finish(made, False)
    made = request(session="s2")
    drafter.prefill([made])
    assert drafter.prefill_draft([made], 8)[0].tokens.tolist() == [10, 11]


def test_given_drafts_are_trimmed_and_biased_as_asked(drafter):
    made = request(draft=[10, 11, 12, 13], trim=2, beta=0.5)
    drafter.prefill([made])
    assert drafter.prefill_draft([made], 8)[0].tokens.tolist() == [10, 11]
    assert drafter.bias(made).beta == 0.5
    exact = request(draft=[10, 11], beta=0)
    drafter.prefill([exact])
    assert drafter.bias(exact) is None


def test_as_published_nothing_is_drafted_behind_a_disagreement(drafter):
    made = request(output=[10, 99, 12], draft=OLD, realign=False, retrieve=False)
    drafter.start(made)
    assert len(drafter.propose([made], 8)[0]) == 0
    realigned = request(output=[10, 99, 12], draft=OLD, retrieve=False, bias_realigned=True)
    drafter.start(realigned)
    assert drafter.propose([realigned], 8)[0].tokens.tolist() == [13, 14, 15]
    assert list(drafter.bias(realigned).tokens) == [13, 14, 15]


def test_retrieval_joins_behind_a_disagreement(drafter):
    made = request(output=[10, 50], draft=OLD)  # the prompt goes on 51, 52 behind 50
    drafter.start(made)
    tree = drafter.propose([made], 12)[0]
    assert (51, 52) in paths(tree)
    assert {11, 12, 13} & set(tree.tokens.tolist())


def test_what_is_no_token_of_the_model_ends_a_draft(drafter):
    made = request(draft=[10, 10**9, 11])
    drafter.prefill([made])
    assert drafter.prefill_draft([made], 8)[0].tokens.tolist() == [10]
    assert list(drafter.bias(made).tokens) == [10]


def test_a_draft_that_sglang_could_not_send_is_refused():
    params = {"ssbd": {"draft": [1, 2]}}
    RetranslationDrafter.check(params)
    with envs.SGLANG_USE_PICKLE_IPC.override(False):
        with pytest.raises(ValueError, match="session instead"):
            RetranslationDrafter.check(params)
        RetranslationDrafter.check({"ssbd": {"session": "a"}})
