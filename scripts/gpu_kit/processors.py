"""The custom logit processor that the kit's traffic asks for."""

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class BanFirstCandidates(CustomLogitProcessor):
    """Takes away the tokens that a request's custom_params name under `banned`."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            logits[row, params.get("banned", [])] = float("-inf")
        return logits
