"""Corpora that requests choose: what the HTTP process knows of them, and when it asks."""

from types import SimpleNamespace

import pytest

from sglang_ext.api.datastore import known_corpora
from sglang_ext.api.datastore.control import ControlError
from sglang_ext.api.datastore.known_corpora import KnownCorpora, check_corpora
from sglang_ext.request_options import RequestOptionError, RequestOptions


class Server:
    """Corpora that come and go, and a clock."""

    def __init__(self, *names):
        self.names = {*names}
        self.asked, self.now, self.fails = 0, 100.0, False
        self.known = KnownCorpora(self.ask, lambda: self.now)

    def ask(self):
        self.asked += 1
        if self.fails:
            raise ControlError("no answer", 504)
        return set(self.names)

    def check(self, *names, namespace="default"):
        self.known.check(namespace, names)


def test_a_name_must_be_shared_or_the_namespaces_own():
    server = Server((None, "sql"), ("acme", "docs"))
    server.check("sql")
    server.check("sql", "docs", namespace="acme")
    with pytest.raises(RequestOptionError, match=r"no corpus 'docs'; there are: 'sql'$"):
        server.check("docs", namespace="globex")


def test_one_that_was_just_added_is_found_and_one_that_is_gone_is_missed():
    server = Server((None, "sql"))
    server.check("sql")
    server.names = {(None, "new")}
    server.now += 0.3
    server.check("new")
    with pytest.raises(RequestOptionError):
        server.check("sql")


def test_the_scheduler_is_asked_seldom_whatever_clients_send():
    server = Server((None, "sql"))
    for _ in range(100):
        server.check("sql")
        with pytest.raises(RequestOptionError):
            server.check("nothing")
    assert server.asked == 1
    server.now += 6
    server.check("sql")
    assert server.asked == 2


def test_without_an_answer_nothing_is_refused():
    server = Server()
    server.fails = True
    server.check("sql")


def test_a_request_is_checked_under_its_own_namespace(monkeypatch):
    server = Server(("acme", "docs"))
    monkeypatch.setattr(known_corpora, "_known", lambda: server.known)

    def ask(**params):
        check_corpora(SimpleNamespace(sampling_params=SimpleNamespace(custom_params=params)))

    ask(corpora=["docs"], namespace="acme")
    ask(corpora=[])
    ask()
    with pytest.raises(RequestOptionError, match="no corpus 'docs'; there are: none"):
        ask(corpora=["docs"])
    check_corpora(SimpleNamespace(sampling_params=None))


@pytest.mark.parametrize("wrong", ["docs", [1], [""], ["a"] * 33, {"a": 1}, ["a" * 513]])
def test_corpora_are_a_short_list_of_names(wrong):
    with pytest.raises(RequestOptionError, match=r"custom_params\.corpora must be a list of"):
        RequestOptions.parse({"corpora": wrong}, [])


def test_corpora_are_read_as_json_has_them():
    assert RequestOptions.parse({"corpora": ["b", "a"]}, []).corpora == ("b", "a")
    assert RequestOptions.parse({"corpora": []}, []).corpora == ()
    assert RequestOptions.parse({"corpora": None}, []).corpora is None
