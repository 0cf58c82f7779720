"""Chunks of audio through SGLang's tokenizer manager, in this process."""

import math
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from sglang_ext.api.http import checked_meta
from sglang_ext.step.token_info import FRAMES
from sglang_ext.whisper.audio_context import PARAMETER as AUDIO_CTX
from sglang_ext.whisper.audio_processor import PcmAudio
from speech.chunks import FRAME_S, Chunk
from speech.prompts import WhisperVocabulary
from speech.segments import Decoded

_SINK_FRAMES = 1  # tokens that look at one place differ by so much


class WhisperEngine:
    """The served Whisper.

    Args:
        manager: SGLang's TokenizerManager.
    """

    def __init__(self, manager: Any):
        config = manager.model_config.hf_config
        self._manager = manager
        self.vocabulary = WhisperVocabulary(config.vocab_size)
        self.context: int = config.max_target_positions
        self._encoder_tokens: int = config.max_source_positions

    @property
    def model_names(self) -> list[str]:
        """The names that requests may call the model by."""
        return [self._manager.served_model_name, self._manager.model_path]

    @property
    def model_path(self) -> str:
        """The served model's folder or hub id."""
        return self._manager.model_path

    async def detect_language(self, chunk: Chunk, custom_params: Mapping[str, Any]) -> str:
        """The ISO code of the likeliest language token after <|startoftranscript|>."""
        languages = self.vocabulary.languages
        request = self._request(
            chunk,
            [self.vocabulary.start],
            {
                "temperature": 0.0,
                "max_new_tokens": 1,
                # One token is neither drafted nor worth remembering.
                "custom_params": {**custom_params, "drafter": "none", "ingest": False},
            },
            return_logprob=True,
            token_ids_logprob=list(languages.values()),
        )
        meta: Mapping[str, Any] = {}
        async for output in self._manager.generate_request(request):
            meta = checked_meta(output)
        scores = {token: logprob for logprob, token, *_ in meta["output_token_ids_logprobs"][0]}
        return max(languages, key=lambda code: scores[languages[code]])

    async def decode(
        self,
        chunk: Chunk,
        prompt: list[int],
        temperature: float,
        custom_params: Mapping[str, Any],
        stream: bool = False,
        most_tokens: int | None = None,
    ) -> AsyncIterator[Decoded]:
        """What the model writes for a chunk: all so far, again and again; else once, at the end.

        Args:
            custom_params: of the request; `attended_frames` is cut to what the chunk has.
            most_tokens: it is cut off behind so many; None: where Whisper's context ends.

        Raises:
            ApiError: SGLang aborted the request.
            ValueError: SGLang refuses it, for its custom_params for instance.
        """
        most = self.context - len(prompt)
        sampling = {
            "temperature": temperature,
            "max_new_tokens": most if most_tokens is None else min(most, most_tokens),
            "custom_params": _params_of(chunk, custom_params) or None,
        }
        encoded = custom_params.get(AUDIO_CTX, self._encoder_tokens)
        first = encoded + prompt.index(self.vocabulary.start)
        asked: dict[str, Any] = {"return_logprob": True, "logprob_start_len": first}
        asked |= {"token_ids_logprob": [self.vocabulary.no_speech], "stream": stream}
        request = self._request(chunk, prompt, sampling, **asked)
        tokens: list[int] = []
        logprobs: list[float] = []
        incremental = stream and self._manager.incremental_streaming_output
        no_speech = math.nan
        async for output in self._manager.generate_request(request):
            meta = checked_meta(output)
            if not incremental:
                tokens, logprobs = [], []
            tokens += output["output_ids"]
            logprobs += [value for value, *_ in meta.get("output_token_logprobs") or ()]
            if math.isnan(no_speech):
                no_speech = _no_speech_prob(meta)
            reason = meta.get("finish_reason")
            yield Decoded(
                tokens=tuple(token for token in tokens if token != self.vocabulary.end),
                logprobs=tuple(logprobs),
                no_speech_prob=no_speech,
                temperature=temperature,
                finished=reason is not None and reason.get("type") == "stop",
                frames=self._frames(tokens, meta),
            )

    def _frames(self, tokens: list[int], meta: Mapping[str, Any]) -> tuple[int, ...]:
        """Decoded.frames of an output."""
        frames = meta.get(FRAMES) or ()
        # Pieces of a stream may have those of their own tokens alone.
        if len(frames) != len(tokens):
            return ()
        end = self.vocabulary.end
        # <|endoftext|> looks at where a token does that is written from no sound.
        sinks = range(0)
        if end in tokens:
            sink = frames[tokens.index(end)]
            sinks = range(sink - _SINK_FRAMES, sink + _SINK_FRAMES + 1)
        return tuple(
            -1 if frame in sinks else frame
            for frame, token in zip(frames, tokens, strict=True)
            if token != end
        )

    def _request(
        self, chunk: Chunk, prompt: list[int], sampling: dict[str, Any], **more: Any
    ) -> Any:
        from sglang.srt.managers.io_struct import GenerateReqInput

        return GenerateReqInput(
            rid=f"trsc-{uuid.uuid4().hex}",
            input_ids=prompt,
            audio_data=[PcmAudio(chunk.samples)],
            sampling_params=sampling,
            modalities=["audio"],
            **more,
        )


def _params_of(chunk: Chunk, params: Mapping[str, Any]) -> dict[str, Any]:
    """A request's custom_params, for a chunk: behind its audio no frame is asked about."""
    made = dict(params)
    if FRAMES in made:
        made[FRAMES] = min(made[FRAMES], max(1, math.ceil(chunk.duration / FRAME_S)))
    return made


def _no_speech_prob(meta: Mapping[str, Any]) -> float:
    """The probability of <|nospeech|> after <|startoftranscript|>, nan where it did not come."""
    # The first entry is of <|startoftranscript|> itself, which nothing predicts.
    positions = [entry for entry in meta.get("input_token_ids_logprobs") or () if entry]
    return math.exp(positions[0][0][0]) if positions else math.nan
