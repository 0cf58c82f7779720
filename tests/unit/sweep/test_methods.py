"""The catalogue of methods: what it names is there."""

import pytest

from sglang_ext.sweep.methods import (
    AUDIO,
    DEFAULT_METHODS,
    METHODS,
    RETRANSLATION,
    SERVERS,
    TEXT,
    UnknownMethod,
    default_methods,
    method,
    servers_for,
)


def test_servers_and_defaults_are_there():
    assert {m.server for m in METHODS.values()} == set(SERVERS)
    for kind in (TEXT, AUDIO, RETRANSLATION):
        names = default_methods([kind])
        assert names[0] == "ar" and len(set(names)) == len(names)
        assert all(kind in method(name).workload_kinds for name in names)


def test_a_server_loads_the_drafters_of_the_sweeps_methods():
    def drafters(*names):
        flags = servers_for(METHODS[name] for name in names)
        assert flags.keys() == SERVERS.keys()
        return flags["sssd"][2:]

    assert drafters("ar", "sssd-live") == drafters("ssbd") == ()
    assert drafters("sssd-cold", "rest", "pld", "rest-budget") == ("--drafters", "rest,pld")
    assert drafters(*DEFAULT_METHODS) == ("--drafters", "pld,rest,suffix")


def test_workloads_of_two_kinds_are_compared_by_methods_that_decode_both():
    assert default_methods([TEXT, RETRANSLATION, TEXT]) == DEFAULT_METHODS
    assert default_methods([RETRANSLATION, RETRANSLATION])[1] == "ssbd"
    for name in DEFAULT_METHODS:
        assert {TEXT, RETRANSLATION} <= method(name).workload_kinds


def test_what_our_drafters_are_asked_for_is_what_they_take():
    from sglang_ext.drafters.specasr import WhisperDrafter
    from sglang_ext.drafters.ssbd import RetranslationDrafter
    from sglang_ext.request_options import RequestOptions

    for made in METHODS.values():
        RequestOptions.parse(made.params, ("sssd", "pld", "rest", "suffix", "ssbd", "specasr"))
        RetranslationDrafter.check(made.params)
        WhisperDrafter.check(made.params)


def test_biased_methods_are_not_exact():
    assert {m.name for m in METHODS.values() if not m.exact} == {"ssbd-bias", "ssbd-plus"}
    assert all(m.sessions == ("ssbd" in m.params) for m in METHODS.values())


def test_unknown():
    with pytest.raises(UnknownMethod, match="unknown method 'x'; known: ar, "):
        method("x")
