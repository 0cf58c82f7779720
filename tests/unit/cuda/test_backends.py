"""Every target gets an attention backend that can verify trees for it, or a clear refusal."""

import logging
from types import SimpleNamespace

import pytest
from sglang.srt.arg_groups import lora_hook
from sglang.srt.arg_groups.overrides import attention_backends_of, resolving_view
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative import spec_registry
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from scripts.emulation import targets
from sglang_ext import plugin
from sglang_ext.cuda import backends
from sglang_ext.cuda.backends import (
    BackendChoice,
    BackendFlags,
    TargetFacts,
    choose_backend,
    facts_of,
    prepare,
    reaches_flashinfer,
    resolve_backends,
)

PLAIN = TargetFacts("Llama")
WINDOW = TargetFacts("Gemma", window=True)
LATENT = TargetFacts("DeepSeek", mla=True)
SINKS = TargetFacts("GptOss", window=True, sinks=True)
WHISPER = TargetFacts("Whisper", encoder_decoder=True)
FLOAT32 = TargetFacts("Llama", float32=True)
GPUS = {
    "Ampere": {},
    "Hopper": {"is_sm90": True, "is_hopper_with_cuda_12_3": True},
    "Blackwell": {"is_sm100": True, "is_blackwell": True},
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """SGLang's real ModelConfig of each kind of target."""
    folder = tmp_path_factory.mktemp("targets")
    return {kind: targets.model_config(kind, folder) for kind in targets.KINDS}


@pytest.mark.parametrize("kind", targets.KINDS)
def test_facts_are_read_from_sglangs_model_config(configs, kind):
    facts = facts_of(configs[kind])
    found = {name for name in vars(facts) if getattr(facts, name) is True}
    assert found == targets.facts_expected(kind)
    assert facts.name == configs[kind].hf_config.architectures[0]


def test_window_latent_and_sink_targets_never_reach_flashinfer(configs):
    assert reaches_flashinfer([facts_of(config) for config in configs.values()]) == []


def test_the_check_for_flashinfer_names_what_gets_there(monkeypatch):
    monkeypatch.setitem(backends._CANNOT, "flashinfer", {"mla": "no mask"})
    assert reaches_flashinfer([PLAIN, WINDOW, LATENT, SINKS]) == ["Gemma", "GptOss"]


@pytest.mark.parametrize(
    ("target", "backend"),
    [
        (PLAIN, "flashinfer"),
        (WHISPER, "flashinfer"),
        (WINDOW, "triton"),
        (LATENT, "triton"),
        (SINKS, "triton"),
        (FLOAT32, "triton"),
        (TargetFacts("Llama4", chunks=True), "triton"),
    ],
)
def test_without_flags_a_target_gets_a_backend_that_can(target, backend):
    assert choose_backend(target, BackendFlags()) == BackendChoice(backend, backend, 1)


def test_deterministic_inference_keeps_the_radix_cache():
    assert choose_backend(PLAIN, BackendFlags(deterministic=True)).decode == "triton"
    assert choose_backend(WHISPER, BackendFlags(deterministic=True)).decode == "flashinfer"


@pytest.mark.parametrize(
    ("target", "flags", "message"),
    [
        (PLAIN, {"attention": "trtllm_mha"}, "--attention-backend trtllm_mha: expected one that"),
        (PLAIN, {"decode": "fa4"}, "--decode-attention-backend fa4: expected one that"),
        (
            PLAIN,
            {"attention": "flashinfer", "prefill": "torch_native"},
            "--prefill-attention-backend torch_native: expected one that",
        ),
        (WINDOW, {"attention": "flashinfer"}, "flashinfer cannot verify trees of Gemma"),
        (LATENT, {"attention": "flashinfer"}, "leaves the tree mask out; leave --attention-back"),
        (SINKS, {"prefill": "flashinfer"}, "--prefill-attention-backend flashinfer cannot"),
        (SINKS, {"attention": "fa3"}, "counts attention sinks twice"),
        (FLOAT32, {"attention": "flashinfer"}, "no kernels for --dtype float32"),
        (WHISPER, {"attention": "triton"}, "no cross-attention; leave .* out to get flashinfer"),
        (WHISPER, {"decode": "triton"}, "--decode-attention-backend triton cannot verify"),
        (
            PLAIN,
            {"attention": "triton", "page_size": 16, "page_size_given": True},
            "--page-size 16: expected 1, since attention backend triton",
        ),
        (
            PLAIN,
            {"attention": "fa3", "page_size": 64, "page_size_given": True},
            "--page-size 64: expected 1, since attention backend fa3",
        ),
        (WINDOW, {"page_size": 16, "page_size_given": True}, "--page-size 16: expected 1"),
        (WINDOW, {"deterministic": True}, "--enable-deterministic-inference verifies no trees"),
        (
            PLAIN,
            {"prefill": "triton", "page_size": 16, "page_size_given": True},
            "attention backend triton",
        ),
    ],
)
def test_a_flag_that_cannot_work_is_refused_in_one_line(target, flags, message):
    with pytest.raises(ValueError, match=message) as refused:
        choose_backend(target, BackendFlags(**flags))
    assert "\n" not in str(refused.value)


def test_what_no_backend_can_verify_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"Whisper cannot be a target: no backend .*float32.*cross"
    ):
        choose_backend(TargetFacts("Whisper", encoder_decoder=True, float32=True), BackendFlags())
    own = TargetFacts("DeepseekV32", mla=True, own_attention="attention backend dsa")
    with pytest.raises(ValueError, match=r"DeepseekV32 cannot be a target: it is served by .* dsa"):
        choose_backend(own, BackendFlags(attention="triton"))


@pytest.mark.parametrize(
    ("target", "flags", "choice"),
    [
        (PLAIN, {"attention": "triton"}, BackendChoice("triton", "triton", 1)),
        (PLAIN, {"attention": "fa3"}, BackendChoice("fa3", "fa3", 1)),
        (LATENT, {"attention": "fa3"}, BackendChoice("fa3", "fa3", 1)),
        (PLAIN, {"decode": "triton"}, BackendChoice("flashinfer", "triton", 1)),
        (
            PLAIN,
            {"attention": "triton", "prefill": "flashinfer"},
            BackendChoice("flashinfer", "triton", 1),
        ),
        (
            PLAIN,
            {"page_size": 16, "page_size_given": True},
            BackendChoice("flashinfer", "flashinfer", 16),
        ),
        # A page size that came with the backend that SGLang would have taken goes with it.
        (SINKS, {"page_size": 64}, BackendChoice("triton", "triton", 1)),
    ],
)
def test_a_flag_that_can_work_is_obeyed(target, flags, choice):
    assert choose_backend(target, BackendFlags(**flags)) == choice


@pytest.fixture
def started(configs, monkeypatch):
    """Start on CUDA: SGLang's real pipeline of arguments, our algorithm the only plugin."""
    monkeypatch.setattr("sglang_ext.api.datastore.protocol.make_folder", lambda: None)
    monkeypatch.setattr(spec_registry, "_REGISTRY", {})
    SpeculativeAlgorithm.register(
        plugin.ALGORITHM, supports_overlap=True, spec_class=plugin._host_drafted_algorithm()
    )(plugin._worker_class)

    def start(kind, **flags):
        args = ServerArgs(
            model_path=configs[kind].model_path,
            device="cuda",
            speculative_algorithm=plugin.ALGORITHM,
            **flags,
        )
        args.resolve_once()
        cfg = resolving_view(args)
        return *attention_backends_of(cfg), cfg.page_size

    return start


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("llama", "flashinfer"), ("gpt-oss", "triton"), ("deepseek-v3", "triton")],
)
@pytest.mark.parametrize("gpu", GPUS)
def test_what_sglang_would_take_by_itself_is_replaced(started, kind, backend, gpu):
    """On a Hopper that is fa3, on a Blackwell pages of 64 tokens for gpt-oss."""
    with override_platform(**GPUS[gpu]):
        assert started(kind) == (backend, backend, 1)


def test_a_servers_flag_is_obeyed(started):
    assert started("llama", attention_backend="triton") == ("triton", "triton", 1)
    assert started("llama", decode_attention_backend="triton") == ("flashinfer", "triton", 1)
    assert started("llama", page_size=16) == ("flashinfer", "flashinfer", 16)


def test_an_untried_backend_is_named_in_the_log(started, caplog):
    with caplog.at_level(logging.WARNING, logger="sglang_ext"):
        assert started("llama", attention_backend="fa3") == ("fa3", "fa3", 1)
    assert [r.message for r in caplog.records if r.name == "sglang_ext.cuda.backends"] == [
        "Attention backend fa3 is untried: no GPU has run it with trees"
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"attention_backend": "torch_native"}, "--attention-backend torch_native: expected"),
        ({"decode_attention_backend": "fa4"}, "--decode-attention-backend fa4: expected one that"),
        ({"attention_backend": "triton", "page_size": 16}, "--page-size 16: expected 1"),
        ({"enable_lmcache": True}, "SSSD does not support --enable-lmcache"),
        (
            {"disaggregation_mode": "decode", "enable_pd_role_switch": True},
            r"--enable-pd-role-switch .* \(--speculative-algorithm SSSD\)",
        ),
        (
            {"disaggregation_mode": "decode", "disaggregation_decode_enable_radix_cache": True},
            r"-enable-radix-cache is incompatible .* \(--speculative-algorithm SSSD\)",
        ),
    ],
)
def test_a_start_with_a_flag_that_cannot_work_ends_in_one_line(started, flags, message):
    with pytest.raises(ValueError, match=message) as refused:
        started("llama", **flags)
    assert "\n" not in str(refused.value)


def test_lora_is_refused_by_sglang_in_our_name():
    with pytest.raises(ValueError, match=r"LoRA is only compatible with .* not SSSD"):
        lora_hook.check_lora_speculative_compatibility(
            SimpleNamespace(speculative_algorithm="SSSD")
        )


def test_a_flag_that_sglang_has_changed_counts_as_changed(configs):
    """It replaces fa3 by Triton for some KV caches, and every backend by `dsa` for some models."""

    def resolve(kind, resolved):
        args = SimpleNamespace(
            attention_backend="fa3",
            prefill_attention_backend=None,
            decode_attention_backend=None,
            page_size=None,
            enable_deterministic_inference=False,
            _raw_input={
                "attention_backend": "fa3",
                "prefill_attention_backend": None,
                "decode_attention_backend": None,
                "page_size": None,
            },
            _resolved_overrides=[("SGLang", {"attention_backend": resolved})],
            _model_config=configs[kind],
        )
        return resolve_backends(args)

    assert resolve("llama", "triton") == BackendChoice("triton", "triton", 1)
    with pytest.raises(ValueError, match="DeepseekV3ForCausalLM cannot be a target"):
        resolve("deepseek-v3", "dsa")


@pytest.fixture
def loaded(monkeypatch):
    """A model runner of a loaded target, and what was installed on its backend."""
    runner = SimpleNamespace(
        prefill_attention_backend_str="flashinfer",
        decode_attention_backend_str="flashinfer",
        sliding_window_size=None,
        model_config=SimpleNamespace(
            is_encoder_decoder=False, hf_config=SimpleNamespace(architectures=["Nemotron"])
        ),
        installed=[],
    )
    for module in ("encoder_tokens", "windows"):

        def install(backend, module=module):
            runner.installed.append((module, backend))

        monkeypatch.setattr(f"sglang_ext.cuda.{module}.install", install)
    return runner


def test_a_window_in_the_models_code_alone_is_refused_once_it_is_loaded(loaded):
    loaded.sliding_window_size = 511
    with pytest.raises(ValueError, match="flashinfer cannot verify trees of Nemotron"):
        prepare("a backend", loaded)


def test_a_backend_is_prepared_for_what_the_target_is(loaded):
    prepare("a backend", loaded)
    assert loaded.installed == [("windows", "a backend")]
    loaded.model_config.is_encoder_decoder = True
    prepare("another", loaded)
    assert loaded.installed[1:] == [("encoder_tokens", "another"), ("windows", "another")]
