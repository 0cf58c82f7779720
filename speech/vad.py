"""Voice activity detection: Silero VAD's weights, many frames at a time.

The package silero-vad runs its network frame by frame from Python. Only the LSTM needs the frames
in order, so here everything before it runs as one batch (architecture: the package's
tinygrad_model.py). The package is not imported, since that sets torch's thread count to 1.
"""

import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from speech.audio import SAMPLE_RATE

FRAME_SAMPLES = 512
"""Samples of a frame at 16 kHz, 32 ms."""

FRAMES_PER_SECOND = SAMPLE_RATE / FRAME_SAMPLES

_CONTEXT_SAMPLES = 64  # of the frame before, read again with each frame
_STFT_HOP = 128
_REFLECTED = 64
_STRIDES = (1, 2, 2, 1)  # of the encoder's convolutions
_WIDTH = 128  # of the LSTM


class SpeechDetector:
    """Silero VAD at 16 kHz.

    Args:
        weights: silero_vad.jit; default: the one in the package silero-vad (its .safetensors
            are of an older training).

    Raises:
        ModuleNotFoundError: the package is not installed.
    """

    def __init__(self, weights: Path | None = None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # TorchScript is on its way out
            module = torch.jit.load(weights or _packaged_weights(), map_location="cpu")
        network = {k.removeprefix("_model."): v for k, v in module.state_dict().items()}
        self._stft = network["stft.forward_basis_buffer"]
        self._layers = [
            (network[f"encoder.{i}.reparam_conv.weight"], network[f"encoder.{i}.reparam_conv.bias"])
            for i in range(len(_STRIDES))
        ]
        self._lstm = torch.nn.LSTM(_WIDTH, _WIDTH)
        self._lstm.load_state_dict(
            {
                f"{name}_l0": network[f"decoder.rnn.{name}"]
                for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            }
        )
        self._head = (
            network["decoder.decoder.2.weight"][:, :, 0],
            network["decoder.decoder.2.bias"],
        )

    def stream(self) -> "SpeechStream":
        """A detector for one audio, from its beginning."""
        return SpeechStream(self)

    @torch.inference_mode()
    def run(
        self, frames: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Speech probabilities of consecutive frames.

        Args:
            frames: float32[n, 64 + 512], each with the end of the one before.
            state: of the LSTM after the frame before; None at the beginning.

        Returns:
            float32[n] and the LSTM's state after them.
        """
        x = functional.pad(frames, (0, _REFLECTED), mode="reflect").unsqueeze(1)
        real, imaginary = functional.conv1d(x, self._stft, stride=_STFT_HOP).chunk(2, 1)
        x = (real.square() + imaginary.square()).sqrt()
        for (weight, bias), stride in zip(self._layers, _STRIDES, strict=True):
            x = functional.conv1d(x, weight, bias, stride=stride, padding=1).relu()
        hidden, state = self._lstm(x.transpose(1, 2), state)
        logits = functional.linear(hidden[:, 0].relu(), *self._head)
        return logits.sigmoid()[:, 0], state


class SpeechStream:
    """Speech probabilities of one audio, given piece by piece."""

    def __init__(self, detector: SpeechDetector):
        self._detector = detector
        self._state: tuple[torch.Tensor, torch.Tensor] | None = None
        self._context = np.zeros(_CONTEXT_SAMPLES, np.float32)
        self._rest = np.empty(0, np.float32)

    def push(self, samples: np.ndarray, last: bool = False) -> np.ndarray:
        """Probabilities of the frames that `samples` complete.

        Args:
            samples: float32[n] at 16 kHz, the next ones.
            last: fill up the last frame with silence.

        Returns:
            float32[frames].
        """
        samples = np.concatenate([self._rest, samples])
        if last:
            samples = np.pad(samples, (0, -len(samples) % FRAME_SAMPLES))
        count = len(samples) // FRAME_SAMPLES
        self._rest = samples[count * FRAME_SAMPLES :].copy()
        if not count:
            return np.empty(0, np.float32)
        padded = np.concatenate([self._context, samples[: count * FRAME_SAMPLES]])
        self._context = padded[-_CONTEXT_SAMPLES:].copy()
        frames = torch.from_numpy(padded).unfold(0, _CONTEXT_SAMPLES + FRAME_SAMPLES, FRAME_SAMPLES)
        probabilities, self._state = self._detector.run(frames, self._state)
        return probabilities.numpy()


def speech_mask(
    probabilities: np.ndarray,
    threshold: float = 0.5,
    min_speech_s: float = 0.1,
    min_silence_s: float = 0.1,
) -> np.ndarray:
    """Which frames are speech.

    Speech begins where the probability reaches `threshold` and ends where it falls 0.15 below it
    (silero-vad's rule), shorter silences are bridged, and shorter sounds dropped.

    Args:
        probabilities: float32[frames].

    Returns:
        bool[frames].
    """
    starts, ends = probabilities >= threshold, probabilities < max(threshold - 0.15, 0.01)
    # The last decisive frame up to each one tells its state; before any there is silence.
    decisive = np.where(starts | ends, np.arange(len(probabilities)), -1)
    latest = np.maximum.accumulate(decisive) if len(decisive) else decisive
    mask = np.where(latest >= 0, starts[latest], False) if len(latest) else np.empty(0, bool)
    for start, end in runs(~mask):
        inside = start > 0 and end < len(mask)
        if inside and end - start < min_silence_s * FRAMES_PER_SECOND:
            mask[start:end] = True
    for start, end in runs(mask):
        if end - start < min_speech_s * FRAMES_PER_SECOND:
            mask[start:end] = False
    return mask


def runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """(start, end) of each run of True in bool[n]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


@cache
def default_detector() -> SpeechDetector:
    """The package's detector, loaded once in a process; threads may share it."""
    return SpeechDetector()


def _packaged_weights() -> Path:
    package = find_spec("silero_vad")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("voice activity detection needs the package silero-vad")
    return Path(package.submodule_search_locations[0]) / "data" / "silero_vad.jit"
