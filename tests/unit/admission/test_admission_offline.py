"""`sglang.Engine` with the plugin: its program's requests have no server to be checked by."""

from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_ext.admission import hooks


def test_requests_without_a_server_are_left_as_they_are(monkeypatch):
    found = {}
    monkeypatch.setattr(
        HookRegistry,
        "register",
        lambda target, hook, kind: found.setdefault(target.rsplit(".", 2)[1], hook),
    )
    hooks.register(lambda: True)
    monkeypatch.setattr(http_server, "_global_state", None)
    request = GenerateReqInput(input_ids=[1, 2], sampling_params={"max_new_tokens": 1})
    found["GenerateReqInput"](GenerateReqInput.normalize_batch_and_arguments, request)
    assert request.is_single
    same = found["TokenizerManager"](lambda manager, made: made, None, request)
    assert same is request
