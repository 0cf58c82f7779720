"""A model of one GPU step: Llama-3-8B in bfloat16 on an H100 SXM. Nothing here was measured on one.

The constants are arithmetic on public figures (below), the host's times are what this project's
code took on a server core. Figures that come from it are called `model_...` wherever they appear.

Weights. Llama-3-8B: hidden size 4096, 32 layers, 8 KV heads of 128, MLP 14336, vocabulary 128256.
A layer's linear parts have 4096 * (6144 + 4096 + 3 * 14336) = 218 M weights, the LM head 525 M:
7.50 G in all, 15.0 GB, read once a pass. An H100 SXM reads 3.35 TB/s at most and 3.0 in practice.
Computing. Two operations a weight and token; 989 TFLOP/s (dense bfloat16) at most, 700 in
large products. The two overlap, less so near the knee of 233 tokens: their fourth powers add.
KV. 2 * 32 layers * 8 heads * 128 * 2 bytes = 131,072 bytes a token. 64 requests of 2,048 tokens
hold 17.2 GB: as much as the weights. A masked verify reads it slower than a plain decode step does,
but once for all of a request's nodes: with 4 query heads a KV head, 16 nodes are one tile of 64.
Besides. Norms, rotary embedding and activations move 5.3 MB a token (1.8 us) and take some 1.5 us
of kernel time each, 6 a layer. Sampling reads and writes a float32 row of 0.5 MB a few times.
Verifying walks the trees and moves accepted KV: a few small kernels behind the graph.
Host. What the device waits for a step that looks, of this project's code on one server core, which
took at batch 1 / 16 / 64: retrieval 0.05 / 0.25 / 0.9 ms, calibration and choice 0.1 / 0.25 / 0.7,
packing 0.01 / 0.07 / 0.2. To that come, assumed, the copy that is waited for, the requests' tables,
staging, the attention's plan and the launches: 0.5 / 0.6 / 1.1 ms.
"""

from dataclasses import dataclass

import numpy as np

# Batches that graphs are captured for; a smaller batch is padded to the next.
BATCHES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
WIDTHS = (1, 2, 4, 8, 16)
# Seconds of the host's part by batch, without and with drafts to pack and stage.
_LOOK = ((1, 16, 64), (0.45e-3, 0.8e-3, 2.0e-3))
_STAGE = ((1, 16, 64), (0.20e-3, 0.35e-3, 0.9e-3))


def padded(batch: int) -> int:
    """Requests that the captured graph runs for a batch of so many."""
    return next(size for size in BATCHES if size >= batch)


@dataclass(frozen=True)
class Gpu:
    """Seconds of a step's parts.

    Attributes:
        weight_bytes, flop_per_token: of the linear layers.
        bytes_per_s, flop_per_s: what the device reaches.
        kv_bytes: a token's K and V of all layers.
        plain_kv_bytes_per_s, verify_kv_bytes_per_s: how fast decode attention reads them, and
            prefill attention under a custom mask.
        kernels_s, token_s: of a pass besides the products, as it is and by token.
        sample_s, sample_row_s: of sampling, as it is and by row of logits.
        verify_s, verify_node_s: of acceptance and moving KV, as it is and by node.
        host: a factor on the host's part.
    """

    weight_bytes: float = 15.0e9
    bytes_per_s: float = 3.0e12
    flop_per_token: float = 15.0e9
    flop_per_s: float = 700e12
    kv_bytes: float = 131_072.0
    plain_kv_bytes_per_s: float = 2.6e12
    verify_kv_bytes_per_s: float = 2.0e12
    kernels_s: float = 32 * 6 * 1.5e-6
    token_s: float = 1.8e-6
    sample_s: float = 40e-6
    sample_row_s: float = 0.7e-6
    verify_s: float = 120e-6
    verify_node_s: float = 0.25e-6
    host: float = 1.0

    def linear_s(self, tokens: float) -> float:
        """The linear layers, over so many tokens."""
        reading = self.weight_bytes / self.bytes_per_s
        computing = tokens * self.flop_per_token / self.flop_per_s
        return float((reading**4 + computing**4) ** 0.25)

    def step_s(self, rows: int, width: int, read: float) -> float:
        """The device's part of a step; width 1 is plain SGLang's decode step.

        Args:
            rows: requests, padding included.
            read: KV entries of all requests.
        """
        tokens = rows * width
        common = (
            self.linear_s(tokens)
            + self.kernels_s
            + tokens * (self.token_s + self.sample_row_s)
            + self.sample_s
        )
        if width == 1:
            return common + read * self.kv_bytes / self.plain_kv_bytes_per_s
        verify = self.verify_s + tokens * self.verify_node_s
        return common + verify + read * self.kv_bytes / self.verify_kv_bytes_per_s

    def look_s(self, batch: int) -> float:
        """What the device waits for a step that looks for drafts.

        From the last step's tokens being on the device to the next pass's launch: one copy to the
        host, the requests' tables, retrieval, the choice of a width, the attention's plan and the
        graph's launch.
        """
        return self.host * float(np.interp(batch, *_LOOK))

    def stage_s(self, batch: int) -> float:
        """What it waits besides where drafts are verified: packing and staging them."""
        return self.host * float(np.interp(batch, *_STAGE))

    def kv_entry_s(self) -> float:
        """What the product assumes of reading a KV entry (costs.kv_read_s)."""
        return self.kv_bytes / self.bytes_per_s
