"""How a server's options want its draft executor run."""

import sys
from dataclasses import dataclass

from sglang_ext import models
from sglang_ext.mirror.draft_devices import DraftDevice
from sglang_ext.mirror.lm_loading import config_of
from sglang_ext.mirror.streaming.stream_files import load_streams
from sglang_ext.models.tokenizers import fingerprint
from sglang_ext.options import Options


@dataclass(frozen=True)
class ExecutorSettings:
    """How an executor is run.

    Attributes:
        model: the draft model's folder.
        weights: one of weight_formats.FORMATS.
        device: as DraftDevice.parse takes it.
        window: tokens of a continuation (gamma).
        cache_mb: MiB for keys and values.
        guesses: whether retrieval drafts for the draft model.
        streams: the folder of its streams; empty: it has none.
    """

    model: str
    weights: str
    device: str
    window: int
    cache_mb: float
    guesses: bool
    streams: str = ""

    def command(self, channel: str) -> list[str]:
        """The process's command line."""
        return [
            *(sys.executable, "-m", "sglang_ext.mirror.draft_process"),
            *("--channel", channel, "--model", self.model, "--weights", self.weights),
            *("--device", self.device, "--window", str(self.window)),
            *("--cache-mb", str(self.cache_mb), "--guesses", str(int(self.guesses))),
            *("--streams", self.streams),
        ]


def settings_of(options: Options) -> ExecutorSettings:
    """How the options want the executor run.

    Raises:
        models.ModelError, DraftModelError, ValueError: they cannot be met.
    """
    if not options.draft_model:
        raise ValueError("--draft-model is missing: a folder or a name of `sglang-ext models list`")
    folder = models.resolve(options.draft_model)
    config_of(folder)
    if options.mirror_streams:
        load_streams(options.mirror_streams, folder)
    device = DraftDevice.parse(options.mirror_device)
    on_cpu = device.torch_name == "cpu"
    weights = options.mirror_weights
    return ExecutorSettings(
        model=folder,
        weights=("int4" if on_cpu else "bf16") if weights == "auto" else weights,
        device=options.mirror_device,
        window=options.mirror_window,
        cache_mb=options.mirror_cache_mb,
        guesses=options.mirror_draft_retrieval,
        streams=options.mirror_streams,
    )


def check_tokenizer(draft_model: str, expected: str) -> None:
    """Raise ValueError unless the draft model has the target's tokenizer.

    Args:
        draft_model: its folder.
        expected: the fingerprint of the target's; empty: the server was started without one.
    """
    if not expected:
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(draft_model)
    if fingerprint(tokenizer) != expected:
        raise ValueError("its tokenizer is not the target's; expected a model of the same family")
