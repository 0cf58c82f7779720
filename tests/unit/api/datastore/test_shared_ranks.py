"""Data-parallel ranks share one datastore, named or not."""

from datastores import MEMORY_TOKENS
from sglang_ext.api.datastore import protocol
from sglang_ext.api.datastore.shared_ranks import share_among_ranks
from sglang_ext.drafters import DrafterContext
from sglang_ext.drafters.sssd import open_datastore
from sglang_ext.options import Options
from tests.eventually import eventually


def test_one_rank_keeps_its_datastore_to_itself(monkeypatch, tmp_path):
    monkeypatch.setenv(protocol.FOLDER_VARIABLE, str(tmp_path))
    share_among_ranks(1)
    assert Options.from_env() == Options()


def test_a_named_folder_is_shared(monkeypatch, tmp_path):
    monkeypatch.setenv("SGLANG_EXT_DATASTORE", str(tmp_path))
    monkeypatch.setenv("SGLANG_EXT_DATASTORE_SHARED", "0")
    share_among_ranks(2)
    options = Options.from_env()
    assert options.datastore_shared and options.datastore == str(tmp_path)
    assert options.datastore_max_tokens == 0


def test_ranks_without_a_folder_draft_from_what_the_others_serve(monkeypatch, tmp_path):
    monkeypatch.setenv(protocol.FOLDER_VARIABLE, str(tmp_path))
    for name in ("DATASTORE", "DATASTORE_SHARED", "DATASTORE_MAX_TOKENS"):
        monkeypatch.setenv(f"SGLANG_EXT_{name}", "")
        monkeypatch.delenv(f"SGLANG_EXT_{name}")
    share_among_ranks(2)
    options = Options.from_env()
    assert options.datastore_max_tokens == MEMORY_TOKENS
    context = DrafterContext(500, options)
    with open_datastore(context) as first, open_datastore(context) as second:
        assert first.add([1, 2, 3], "a") and second.add([4, 5], "b")
        for store in (first, second):
            eventually(lambda store=store: store.namespaces() == {"a": 3, "b": 2})
