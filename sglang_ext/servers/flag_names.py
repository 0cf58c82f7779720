"""Names by which SGLang's users look for our flags; the options' own names go on working.

SGLang calls flags `--speculative-ALGORITHM-...` and `--asr-...`, the draft model's
`--speculative-draft-model-path`, and a method by its algorithm.
"""

from collections.abc import Mapping, Sequence

from sglang_ext.servers.flags import flag_value, set_flag

ALGORITHM_FLAG = "--speculative-algorithm"
ALGORITHM = "SSSD"
# By the name that `--speculative-algorithm` takes too: the drafter that it stands for.
METHODS: Mapping[str, str] = {
    "SUFFIX": "suffix",
    "PLD": "pld",
    "REST": "rest",
    "SPECASR": "specasr",
    "SSBD": "ssbd",
    "SPECDEC": "specdec",
    "MIRROR": "mirror",
}
_DRAFT_MODEL = ("--speculative-draft-model-path", "--speculative-draft-model")
_OF_DRAFTING = (
    "drafter", "drafters", "datastore", "live_ingest", "datastore_max_tokens",
    "datastore_fold_tokens", "datastore_shared", "prefix_length", "branch_length", "max_samples",
    "bigram_seconds", "budget", "budget_knee", "cuda_widths",
)  # fmt: skip
_ALIASES: Mapping[str, str] = {
    **{name: f"speculative_sssd_{name}" for name in _OF_DRAFTING},
    "specasr_mode": "speculative_specasr_mode",
    "asp_length": "speculative_specasr_length",
    "asp_threshold": "speculative_specasr_threshold",
    "ssbd_beta": "speculative_ssbd_beta",
    "ssbd_sessions": "speculative_ssbd_sessions",
    "ssbd_idle_seconds": "speculative_ssbd_idle_seconds",
    "transcription_max_upload_mb": "asr_max_upload_mb",
    "transcription_max_seconds": "asr_max_seconds",
    "transcription_parallel": "asr_parallel",
    "vad_threshold": "asr_vad_threshold",
    "word_aligner": "asr_word_aligner",
}


def flags_of(option: str) -> tuple[str, ...]:
    """The flags of an option: its own name's, then the alias, if it has one."""
    names = (option, *([_ALIASES[option]] if option in _ALIASES else []))
    return tuple("--" + name.replace("_", "-") for name in names)


def resolved(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """A command line in SGLang's terms, and the options that its names stand for.

    `--speculative-algorithm SUFFIX` is SSSD with the drafter `suffix`, and SGLang's flag of a
    draft model is ours, where the algorithm is. Other algorithms' command lines stay as they are.

    Args:
        argv: what is left for SGLang to parse.

    Returns:
        the command line, and values by option (`drafter`, `draft_model`).
    """
    given = (flag_value(argv, ALGORITHM_FLAG) or "").upper()
    options: dict[str, str] = {}
    if given in METHODS:
        options["drafter"] = METHODS[given]
        argv = set_flag(argv, ALGORITHM, ALGORITHM_FLAG)
    elif given != ALGORITHM:
        return list(argv), {}
    draft_model = flag_value(argv, *_DRAFT_MODEL)
    if draft_model is not None:
        options["draft_model"] = draft_model
        argv = without(argv, *_DRAFT_MODEL)
    return list(argv), options


def without(argv: Sequence[str], *names: str) -> list[str]:
    """argv without the flags of these names, and their values."""
    kept, value_next = [], False
    for arg in argv:
        name, equals, _ = arg.partition("=")
        if value_next:
            value_next = False
        elif name in names:
            value_next = not equals
        else:
            kept.append(arg)
    return kept
