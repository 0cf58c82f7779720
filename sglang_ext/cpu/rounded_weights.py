"""Weight matrices in bfloat16 whose products round their rows too, for an encoder's layers.

oneDNN's products, with AMX no slower than those of 8 bits and without what those take to bring rows
to 8 bits and back (speech/bf16_products.py). A row's bits may depend on how many rows there are
(float_weights.py), so they are for layers that see one request's rows at a time.
"""

import torch

from speech.bf16_products import Bf16Product


class RoundedWeight:
    """A float matrix [N, K], with the product x @ weight.T + bias in bfloat16.

    Attributes:
        product: it, of bfloat16 rows.
        nbytes: what it reads of the weight.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.product = Bf16Product(weight)
        self.nbytes = self.product.nbytes

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N], of x's dtype."""
        return self.product(x.to(torch.bfloat16), bias).to(x.dtype)
