"""A hypothesis as the draft of the next one, and the server's own drafter beside it."""

import pytest

from sglang_ext.drafters import Drafter, DrafterContext, DraftRequest
from sglang_ext.drafters.rehearing import RehearingDrafter
from sglang_ext.options import Options
from sglang_ext.request_options import RequestOptions
from sglang_ext.tree import TokenTree

EOS = 99
OLD = [10, 11, 12, 13, 14, 15]


class Other(Drafter):
    """Drafts 50, 51 and keeps what it was told."""

    def __init__(self):
        self.told: list[tuple] = []

    def prefill(self, requests):
        self.told += [("prefill", r.rid) for r in requests]
        for request in requests:
            request.state = "encoded"

    def prefill_draft(self, requests, max_nodes):
        return [TokenTree.chain([40], 0.9) for _ in requests]

    def start(self, request):
        self.told.append(("start", request.rid, request.state, list(request.output)))

    def observe(self, request, tokens):
        self.told.append(("observe", request.rid, list(tokens)))

    def verified(self, request, tree, predicted):
        self.told.append(("verified", request.rid))

    def propose(self, requests, max_nodes):
        self.told += [("propose", r.rid) for r in requests]
        return [TokenTree.chain([50, 51], 0.9) for _ in requests]

    def finish(self, request, completed):
        self.told.append(("finish", request.rid, completed))


@pytest.fixture
def other():
    return Other()


@pytest.fixture
def drafter(other):
    context = DrafterContext(100, Options(drafter="mine"), eos_token_ids=frozenset({EOS}))
    context.loaded["mine"] = other
    return RehearingDrafter(context)


def request(rid, name="audio", namespace="default"):
    params = {} if name is None else {"rehearing": name}
    return DraftRequest(rid, [1, 2], [], params, options=RequestOptions(namespace=namespace))


def heard(drafter, output, rid="first", **named):
    """A request from its prefill to its end."""
    made = request(rid, **named)
    drafter.prefill([made])
    made.output.extend(output)
    drafter.start(made)
    drafter.finish(made, True)


def test_the_last_hypothesis_is_drafted_from_the_prompt_on(drafter, other):
    heard(drafter, [*OLD, EOS])
    other.told.clear()
    again = request("second")
    drafter.prefill([again])
    assert drafter.prefill_draft([again], 4)[0].tokens.tolist() == OLD[:4]
    again.output.extend(OLD[:2])
    drafter.start(again)
    assert drafter.propose([again], 8)[0].tokens.tolist() == OLD[2:]
    again.output.extend(OLD[2:4])
    drafter.observe(again, OLD[2:4])
    assert drafter.propose([again], 8)[0].tokens.tolist() == OLD[4:]
    assert other.told == []  # nothing of it was needed
    assert drafter.counters == {"hypotheses": 1, "drafted_hypotheses": 1}


def test_beside_a_hypothesis_the_other_drafter_is_not_asked(drafter, other):
    heard(drafter, OLD)
    told = list(other.told)
    again = request("second")
    drafter.prefill([again])
    again.output.extend([10, 77])
    drafter.start(again)
    tree = drafter.propose([again], 16)[0]
    assert 12 in tree.tokens.tolist()  # realigned
    again.output.extend([50])
    drafter.observe(again, [50])
    drafter.verified(again, tree, [1] * (len(tree) + 1))
    drafter.finish(again, False)
    assert other.told == told


def test_new_audio_is_the_other_drafters_from_the_prefill_on(drafter, other):
    new = request("new")
    drafter.prefill([new])
    assert drafter.prefill_draft([new], 8)[0].tokens.tolist() == [40]
    new.output.append(7)
    drafter.start(new)
    tree = drafter.propose([new], 8)[0]
    assert tree.tokens.tolist() == [50, 51]
    drafter.verified(new, tree, [1, 2, 3])
    assert other.told == [
        ("prefill", "new"),
        ("start", "new", "encoded", [7]),
        ("propose", "new"),
        ("verified", "new"),
    ]


def test_names_belong_to_namespaces_and_what_is_forgotten_is_not_drafted(drafter):
    heard(drafter, OLD, namespace="acme")
    for rid, namespace, drafted in (("a", "default", []), ("b", "acme", OLD)):
        made = request(rid, namespace=namespace)
        drafter.prefill([made])
        made.output.append(10)
        drafter.start(made)
        got = drafter.propose([made], 8)[0].tokens.tolist()
        assert (got == OLD[1:]) == bool(drafted)
    drafter.forget("acme")
    assert drafter.propose([made], 8)[0].tokens.tolist() == [50, 51]
    drafter.finish(made, True)
    assert drafter.counters["hypotheses"] == 0


def test_what_was_aborted_or_has_no_name_is_not_kept(drafter):
    heard(drafter, OLD, name=None)
    made = request("gone")
    drafter.prefill([made])
    drafter.finish(made, False)
    drafter.finish(request("never"), True)
    assert drafter.counters["hypotheses"] == 0


@pytest.mark.parametrize("name", [1, "", "x" * 257, {"a": 1}])
def test_a_wrong_name_is_refused(name):
    with pytest.raises(ValueError, match=r"custom_params\.rehearing must be a string"):
        RehearingDrafter.check({"rehearing": name})
    RehearingDrafter.check({"rehearing": "audio"})
    RehearingDrafter.check({})
