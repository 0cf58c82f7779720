"""The options of sglang-ext: one place, each an environment variable and a flag of `serve`.

SGLang's scheduler runs in processes of its own, so the flags travel as environment variables;
`sglang serve --speculative-algorithm SSSD` takes the same variables without our launcher.
"""

import argparse
import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, fields

from sglang_ext.block_drafter.drafter_manifest import is_drafter_folder
from sglang_ext.servers.flag_names import flags_of

ENV_PREFIX = "SGLANG_EXT_"
AUTO = "auto"
"""A server's drafter of this name: what pays, by request."""
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_HEADER_NAME = r"[A-Za-z0-9-]*"
_DRAFT_DEVICE = r"cpu(?::\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)?|cuda(?::\d+)?"


class OptionError(ValueError):
    """An option's value is not usable; the message names it and says what was expected."""


def _option(default, help_text: str, **limits):
    return field(default=default, metadata={"help": help_text, **limits})


@dataclass(frozen=True)
class Options:
    """Server-wide options; every one has a default that works."""

    drafter: str = _option(
        "",
        "drafter of requests that name none: `sssd`, `specasr`, an installed plugin's name, "
        "`none` for plain decoding, or `auto` for what pays on each namespace's traffic: `sssd`, "
        "`specdec` or both together; empty: `specdec` or `specasr` where the draft model is "
        "theirs, else `sssd`",
    )
    drafters: str = _option(
        "", "further drafters to load, comma-separated, that requests may choose"
    )
    datastore: str = _option(
        "",
        "folder of the durable datastore, made if it is not there, or an address to fetch one from "
        "(`hf://OWNER/NAME`, `s3://...`); empty: memory only",
    )
    live_ingest: bool = _option(True, "let finished outputs join the datastore")
    datastore_max_tokens: int = _option(
        0,
        "served tokens that the datastore holds at most, oldest dropped first; "
        "0: 8 million in memory (where the largest namespace's oldest go first), 8 x 512 million "
        "in a folder",
        low=0,
    )
    datastore_fold_tokens: int = _option(
        1 << 20,
        "a log of the datastore with so many tokens (or 5 minutes old) becomes a sub-index file",
        low=1,
    )
    datastore_shared: bool = _option(
        False,
        "several servers use the datastore's folder at once: each takes in what it serves, one "
        "folds for all, and another one takes its place when it ends; on with data parallelism",
    )
    namespace_header: str = _option(
        "x-sglang-ext-namespace",
        "HTTP header that names a request's namespace; empty: `custom_params.namespace` only",
        pattern=_HEADER_NAME,
        expected="letters, digits and hyphens",
    )
    salt_namespaces: bool = _option(
        True,
        "a request's `cache_salt` and `extra_key` name its namespace, where nothing else does",
    )
    namespace_key: str = _option(
        "",
        "secret of the hash by which salts become names of namespaces; servers of one datastore "
        "need the same. Set it in the environment, other users see command lines",
    )
    namespace_share: float = _option(
        0.5,
        "of what other namespaces leave of a limit (translation sessions, streams, outputs that "
        "wait to be ingested), as much may be one namespace's; 1: all",
        low=0.01,
        high=1.0,
    )
    max_choices: int = _option(
        128, "answers to one prompt that a request may ask for (n)", low=1, high=65_536
    )
    max_answers: int = _option(
        4096, "answers that one request may ask for, prompts times n", low=1, high=1 << 20
    )
    max_logprobs: int = _option(
        128, "alternatives to a token whose logprobs a request may ask for", low=0, high=1 << 20
    )
    max_body_mb: int = _option(
        64, "longest body of a request that is no form, in MiB", low=1, high=4096
    )
    cpu_weights: str = _option(
        "fp32",
        "on CPUs: linear layers' weights as they are loaded (`fp32`), or in 16, 8 or 4 bits: "
        "`bf16`, `int8`, `int4`",
        choices=("fp32", "bf16", "int8", "int4"),
    )
    grammar_cache_mb: int = _option(
        256,
        "compiled grammars (json_schema, regex, ebnf, structural_tag) that are kept, in MiB",
        low=1,
        high=1 << 20,
    )
    max_streams: int = _option(
        256,
        "WebSockets and event streams of translation sessions open at once; --namespace-share "
        "holds for them too",
        low=1,
    )
    websocket_message_kb: int = _option(
        1024, "longest message of a WebSocket, in KiB", low=64, high=1 << 20
    )
    prefix_length: int = _option(
        8,
        "SSSD: longest matched prefix, P (the paper's 4 drafts less where text repeats)",
        low=1,
        high=12,
    )
    branch_length: int = _option(
        12, "SSSD: longest retrieved continuation, in tokens", low=1, high=64
    )
    max_samples: int = _option(
        100, "SSSD: continuations sampled from the datastore per query", low=1, high=10_000
    )
    bigram_seconds: float = _option(
        15.0,
        "SSSD: most seconds of a start that go into asking the target what follows each token, "
        "until all are known; what was asked is kept for the next start; 0: nothing is asked or "
        "used",
        low=0.0,
    )
    budget: str = _option(
        "auto",
        "nodes verified per request: `auto`, as many as pay by measured gain and cost, none where "
        "drafts do not; `fixed`, always `--speculative-num-draft-tokens`",
        choices=("auto", "fixed"),
    )
    budget_knee: int = _option(
        0,
        "I_knee: most tokens of a forward pass that verifies, on CPUs (s_q = I_knee / batch); "
        "0: as many as pay",
        low=0,
    )
    cuda_widths: str = _option(
        "",
        "nodes per request for which verify steps get CUDA graphs, as `2,4,8`, beside plain decode "
        "steps and `--speculative-num-draft-tokens`; empty: 2, 4, 8, ... up to that",
        pattern=r"|(?:[2-9]|[1-9]\d)(?:,(?:[2-9]|[1-9]\d))*",
        expected="whole numbers of 2 to 99, comma-separated",
    )
    mirror_retrieval: bool = _option(
        False,
        "SSSD: retrieve drafts for what a step is likely to commit while the second half of its "
        "pass runs, in another thread; on CPUs alone",
    )
    mirror_outcomes: int = _option(
        16,
        "SSSD with `--mirror-retrieval`: outcomes of a step that are retrieved for, per request",
        low=1,
        high=64,
    )
    mirror_exit_layer: int = _option(
        0,
        "layers of the target before its early exit; 0: half of them for a draft model, 94% for "
        "`--mirror-retrieval`",
        low=0,
        high=1024,
    )
    mirror_kappa: int = _option(
        8, "next tokens that the early exit names behind each node", low=1, high=64
    )
    mirror_lens: str = _option(
        "auto",
        "how the early exit reads its state: `auto`, by a fitted lens where that foresees more "
        "than the LM head by itself; `head`, by the LM head (the paper's); or the file of a lens",
    )
    mirror_lens_seconds: float = _option(
        45.0,
        "most seconds of a start in which texts are read to fit a lens; what was fitted is kept "
        "for the next start; 0: none is fitted",
        low=0.0,
    )
    mirror_head_tokens: int = _option(
        8192,
        "the early exit asks about so many tokens only, the most frequent ones, which costs less; "
        "0: all",
        low=0,
    )
    draft_model: str = _option(
        "",
        "SpecASR: the draft Whisper, Mirror: the draft language model; a folder or a name of "
        "`sglang-ext models list`. SpecDec: a drafter's directory, of `sglang-ext drafter train`",
    )
    specdec_branches: int = _option(
        3,
        "SpecDec: paths followed through a block, and tokens tried behind each; 1: a chain",
        low=1,
        high=8,
    )
    specdec_retrieve: bool = _option(
        True, "SpecDec: draft with SSSD too, in one tree, unless a request says otherwise"
    )
    record_states: str = _option(
        "",
        "recorder: folder to which the target's states of its requests are appended, for `drafter "
        "train --encoder target`; `drafter distill --states` sets it",
    )
    record_layer: int = _option(
        0, "recorder: the states behind so many of the target's layers", low=0, high=1024
    )
    specasr_mode: str = _option(
        "tsp",
        "SpecASR: `tsp` (two-pass sparse tree), `recycling`, `asp` (adaptive single sequence) or "
        "`fixed`",
        choices=("tsp", "recycling", "asp", "fixed"),
    )
    asp_length: int = _option(
        0,
        "SpecASR: most tokens of a drafted sequence; 0: 32 in mode `tsp`, else 24",
        low=0,
        high=64,
    )
    asp_threshold: float = _option(
        0.4,
        "SpecASR: a drafted sequence ends where the top token's probability falls below this",
        low=0.0,
        high=1.0,
    )
    relaxed_acceptance: bool = _option(
        True,
        "let greedy requests ask for drafted tokens that the target nearly wrote itself "
        "(`custom_params.relaxed`), which changes what is written; off: such requests get a 400",
    )
    ssbd_beta: float = _option(
        0.2,
        "SSBD: bias of a re-translation towards the session's last output; 0: none",
        low=0.0,
        high=1.0,
    )
    ssbd_sessions: int = _option(4096, "SSBD: sessions whose last output is kept", low=1)
    ssbd_idle_seconds: float = _option(
        600.0, "SSBD: a session that was not used so long is forgotten, in seconds", low=1.0
    )
    mirror_device: str = _option(
        "cpu",
        "Mirror: where the draft model runs: `cpu`, `cpu:` and cores as `1` or `2-3,6`, or "
        "`cuda:N`",
        pattern=_DRAFT_DEVICE,
        expected="cpu, cpu:1, cpu:2-3,6 or cuda:0",
    )
    mirror_weights: str = _option(
        "auto",
        "Mirror: the draft model's weights: `fp32`, `bf16`, `int8` or `int4`; `auto`: `int4` on a "
        "CPU, `bf16` on a GPU",
        choices=("auto", "fp32", "bf16", "int8", "int4"),
    )
    mirror_window: int = _option(
        7, "Mirror: most tokens that the draft model drafts for a step (gamma)", low=1, high=32
    )
    mirror_cache_mb: int = _option(
        1024, "Mirror: keys and values of the draft model, in MiB", low=16, high=1 << 20
    )
    mirror_draft_retrieval: bool = _option(
        True,
        "Mirror: the request's own text drafts for the draft model, which so gives several tokens "
        "in a pass",
    )
    mirror_streams: str = _option(
        "",
        "Mirror: a folder of `sglang-ext drafter train --kind streaming`, whose streams have the "
        "draft model give several tokens in a pass",
    )
    mirror_exit: bool = _option(
        True,
        "Mirror: draft for what the target's early exit foresees while it verifies; 0: ordinary "
        "speculative decoding, each step waits for its draft",
    )
    oracle_file: str = _option(
        "", "JSONL of token id lists that the drafter `oracle` proposes (for checks)"
    )
    transcription_max_upload_mb: int = _option(
        512, "largest audio file that a client may post, in MiB", low=1
    )
    transcription_max_seconds: int = _option(
        4 * 3600, "longest audio that is transcribed, in seconds", low=1
    )
    transcription_parallel: int = _option(
        16, "chunks of one audio that are decoded at once", low=1, high=1024
    )
    live_policy: str = _option(
        "auto",
        "when words of live speech are settled: `localagreement`, once two hypotheses agree on "
        "them; `alignatt`, once they attend to audio that has passed (on the CPU); `auto`, "
        "alignatt where it can be had",
        choices=("auto", "localagreement", "alignatt"),
    )
    alignatt_frames: int = _option(
        20,
        "alignatt: frames of 20 ms behind the place that a settled word attends to: half as many "
        "if it is sure, none if two hypotheses agree on it too, 3.5 times as many if it is neither",
        low=0,
        high=500,
    )
    realtime_step_seconds: float = _option(
        0.0,
        "live speech is transcribed again after so many seconds of audio, where a session names "
        "no `step_ms`; 0: 1 with localagreement, 0.3 with alignatt",
        low=0.0,
        high=5.0,
    )
    live_padding_seconds: float = _option(
        7.0,
        "live audio that will be heard again is encoded with so many seconds of silence behind it, "
        "where a session names no `padding_ms`; 30: whole windows, as files are",
        low=1.0,
        high=30.0,
    )
    translate_with: str = _option(
        "",
        "text server (`--drafters ssbd`) that translates live speech, `http://HOST:PORT`; empty: "
        "Whisper itself translates, into English alone",
        pattern=r"|https?://[^\s/]+(?:/[^\s]*)?",
        expected="http://HOST:PORT",
    )
    translate_key: str = _option(
        "",
        "API key of the `--translate-with` server. Set it in the environment, other users see "
        "command lines",
    )
    audio_decoders: int = _option(
        4, "processes that decode what clients send as audio", low=1, high=256
    )
    audio_queue: int = _option(
        64,
        "audio files that may wait for a process that decodes them; more get a 503",
        low=1,
        high=4096,
    )
    audio_decoder_memory_mb: int = _option(
        256, "memory that decoding one audio file may take, in MiB", low=32
    )
    audio_decoder_seconds: float = _option(
        20.0, "CPU time that ten minutes of audio may take to decode, in seconds", low=0.1
    )
    translation_sessions: int = _option(1000, "translation sessions open at once", low=1)
    translation_idle_seconds: float = _option(
        600.0, "a translation session that was not used so long is closed, in seconds", low=1.0
    )
    translation_max_source_chars: int = _option(
        20_000, "longest source of a translation session, in characters", low=1
    )
    vad_threshold: float = _option(
        0.5,
        "speech probability from which sound is transcribed; the rest makes no words",
        low=0.0,
        high=1.0,
    )
    word_aligner: str = _option(
        "",
        "Whisper that times the words, a folder or a name of `sglang-ext models list`; empty: the "
        "draft model where it speaks the language, else the served one; `none`: no word times",
    )

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> "Options":
        """Read every option from `SGLANG_EXT_<NAME>`; unset ones keep their defaults.

        Raises:
            OptionError: a value does not parse or is out of range.
        """
        env = os.environ if env is None else env
        values = {}
        for option in fields(cls):
            text = env.get(env_name(option.name))
            if text is not None:
                values[option.name] = _parse(option, text, env_name(option.name))
        return cls(**values)

    @property
    def chooses_drafters(self) -> bool:
        """Whether the drafters of requests that name none are chosen by what they gain."""
        return self.drafter == AUTO

    @property
    def default_drafter(self) -> str:
        """The drafter of requests that name none and for which none is chosen."""
        named = "" if self.chooses_drafters else self.drafter
        if named or not self.draft_model:
            return named or "sssd"
        return "specdec" if is_drafter_folder(self.draft_model) else "specasr"

    def loaded_drafters(self) -> list[str]:
        """The names of the drafters to load, the default one first."""
        names = [self.default_drafter, *(name.strip() for name in self.drafters.split(","))]
        if "ssbd" in names or "specdec" in names:
            names.append("sssd")  # which they draft with
        if "specasr" in names:
            names.append("rehearing")  # for live speech
        return list(dict.fromkeys(name for name in names if name and name != "none"))


def env_name(option: str) -> str:
    """The environment variable of an option."""
    return ENV_PREFIX + option.upper()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give `parser` a flag for each option; their defaults are left to `Options`."""
    group = parser.add_argument_group("sglang-ext")
    for option in fields(Options):
        group.add_argument(
            *flags_of(option.name),
            metavar=type(option.default).__name__.upper(),
            help=f"{option.metadata['help']} [{option.default!r}; {env_name(option.name)}]",
        )


def export_flags(args: argparse.Namespace, env: MutableMapping[str, str]) -> Options:
    """Put the flags that were given into `env`, for the processes to come, and read them back.

    Raises:
        OptionError: a value does not parse or is out of range.
    """
    for option in fields(Options):
        value = getattr(args, option.name, None)
        if value is not None:
            flag = "--" + option.name.replace("_", "-")
            _parse(option, value, flag)
            env[env_name(option.name)] = value
    return Options.from_env(env)


def _parse(option, text: str, source: str):
    if isinstance(option.default, bool):
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise OptionError(f"{source}={text!r}: expected 1 or 0")
    if isinstance(option.default, int | float):
        return _parse_number(option, text, source)
    choices = option.metadata.get("choices")
    if choices and text not in choices:
        raise OptionError(f"{source}={text!r}: expected one of {', '.join(choices)}")
    pattern = option.metadata.get("pattern")
    if pattern and not re.fullmatch(pattern, text):
        raise OptionError(f"{source}={text!r}: expected {option.metadata['expected']}")
    return text


def _parse_number(option, text: str, source: str):
    low, high = option.metadata.get("low"), option.metadata.get("high")
    kind = type(option.default)
    expected = "a whole number" if kind is int else "a number"
    expected += f" of at least {low}" if low is not None else ""
    expected += f" and at most {high}" if high is not None else ""
    try:
        value = kind(text)
    except ValueError:
        raise OptionError(f"{source}={text!r}: expected {expected}") from None
    # Written so that NaN is refused too.
    if not ((low is None or value >= low) and (high is None or value <= high)):
        raise OptionError(f"{source}={text!r}: expected {expected}")
    return value
