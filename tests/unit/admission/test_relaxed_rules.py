"""Relaxed rules that a server or a request's other parameters do not go with are refused."""

from types import SimpleNamespace

import pytest

from sglang_ext.admission import relaxed_rules
from sglang_ext.admission.relaxed_rules import check_relaxed
from sglang_ext.drafters import Drafter
from sglang_ext.options import Options
from sglang_ext.request_options import RequestOptionError, RequestOptions

GREEDY = SimpleNamespace(top_k=1, temperature=1.0)


class Scored(Drafter):
    """A drafter with log-probabilities of its own."""

    gives_logprobs = True

    def propose(self, requests, max_nodes):
        return []


def asked(**params) -> RequestOptions:
    return RequestOptions.parse(params, ["sssd", "pld", "scored"])


def test_greedy_requests_may_ask_for_it():
    check_relaxed(asked(relaxed={"top_beta": 3, "tau": 1.0}), GREEDY, Options())
    check_relaxed(asked(), SimpleNamespace(top_k=50, temperature=0.7), Options())


def test_a_sampled_request_may_not():
    sampled = SimpleNamespace(top_k=1 << 30, temperature=0.7)
    with pytest.raises(RequestOptionError, match=r"relaxed .* temperature must be 0, got 0.7"):
        check_relaxed(asked(relaxed={}), sampled, Options())


def test_a_server_may_forbid_it():
    with pytest.raises(
        RequestOptionError, match=r"relaxed is not allowed .*--relaxed-acceptance 0"
    ):
        check_relaxed(asked(relaxed={}), GREEDY, Options(relaxed_acceptance=False))
    check_relaxed(asked(), GREEDY, Options(relaxed_acceptance=False))


@pytest.mark.parametrize("drafter", ["sssd", "pld", "none", None])
def test_by_drafter_needs_log_probabilities(drafter):
    by = {"relaxed": {"by": "drafter"}}
    with pytest.raises(RequestOptionError, match=r"relaxed.by must be target for the drafter"):
        check_relaxed(asked(**by, drafter=drafter), GREEDY, Options())


def test_by_drafter_goes_with_a_drafter_that_has_them(monkeypatch):
    monkeypatch.setattr(relaxed_rules, "load_class", lambda name: Scored)
    by = {"relaxed": {"by": "drafter"}}
    check_relaxed(asked(**by, drafter="scored"), GREEDY, Options())
    check_relaxed(asked(**by), GREEDY, Options(drafter="scored"))
