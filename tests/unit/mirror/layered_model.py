"""A small causal stack as SGLang's and transformers' models look, for tests of the early exit."""

import torch

VOCAB, SIZE, DEPTH = 40, 12, 4


class Norm(torch.nn.Module):
    """RMS norm; of a pair, SGLang's fused add: (norm of the sum, the sum)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(1 + 0.1 * torch.randn(SIZE), requires_grad=False)

    def forward(self, x, residual=None):
        if residual is not None:
            x = x + residual
        normed = x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt() * self.weight
        return normed if residual is None else (normed, x)


class Layer(torch.nn.Module):
    """Returns the whole state, as transformers' layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(SIZE, SIZE)

    def added(self, state):
        return torch.tanh(self.mix(state))

    def forward(self, state):
        return state + self.added(state)


class PairLayer(Layer):
    """Returns what it adds and the residual before it, as older layers of SGLang's do."""

    def forward(self, added, residual):
        residual = added if residual is None else added + residual
        return self.added(residual), residual


class CapturingLayer(Layer):
    """Shows its input's whole state to `capture_output`, as SGLang 0.5.23's layers do."""

    def forward(self, state, capture_output=None):
        if capture_output is not None:
            capture_output(state, owned=False)
        return super().forward(state)


class Body(torch.nn.Module):
    def __init__(self, layer: type[Layer]) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(VOCAB, SIZE)
        self.layers = torch.nn.ModuleList(layer() for _ in range(DEPTH))
        self.norm = Norm()

    def forward(self, tokens):
        state, residual = self.embed_tokens(tokens), None
        for i, layer in enumerate(self.layers):
            if isinstance(layer, PairLayer):
                state, residual = layer(state, residual)
            elif isinstance(layer, CapturingLayer):
                state = layer(state, capture_output=self.captures.get(i))
            else:
                state = layer(state)
        return self.norm(state) if residual is None else self.norm(state, residual)[0]

    captures: dict = {}  # noqa: RUF012 - by layer, as EAGLE-3 would have them


class LayeredModel(torch.nn.Module):
    """Tokens in, logits out: int64[T] to float[T, VOCAB]."""

    def __init__(self, layer: type[Layer] = Layer, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = Body(layer)
        self.lm_head = torch.nn.Linear(SIZE, VOCAB, bias=False)
        self.requires_grad_(False)

    def forward(self, tokens):
        return self.lm_head(self.model(tokens))

    def states(self, tokens) -> list[torch.Tensor]:
        """The state before each layer and behind the last, computed plainly."""
        state = self.model.embed_tokens(tokens)
        states = [state]
        for layer in self.model.layers:
            state = state + layer.added(state)
            states.append(state)
        return states
