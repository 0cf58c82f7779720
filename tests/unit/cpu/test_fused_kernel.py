"""Fused decoder layers: their parts' numbers, and of a row the same bits in any company."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sglang_ext.cpu.attention_kernel import attend
from sglang_ext.cpu.float_weights import FloatWeight
from sglang_ext.cpu.fused_kernel import ADDRESSES, run_layers
from sglang_ext.cpu.group_weights import GroupWeight
from sglang_ext.cpu.layer_room import LayerRoom, Weight, columns_of
from sglang_ext.cpu.layer_rows import multiplier_of
from sglang_ext.cpu.rotary import rotate

HEADS, KV_HEADS, SIZE, COLUMNS, GATE, LAYERS = 6, 2, 32, 96, 160, 2
SLOTS, EPSILON = 256, 1e-5
WEIGHTS = ((HEADS + 2 * KV_HEADS) * SIZE, COLUMNS), (COLUMNS, HEADS * SIZE), (2 * GATE, COLUMNS), (
    COLUMNS, GATE,
)  # fmt: skip


@dataclass
class Layer:
    weights: list[Weight]
    norms: list[np.ndarray]
    biases: list[np.ndarray]
    keys: np.ndarray
    values: np.ndarray


def in_pool(numbers: torch.Tensor, kept: torch.dtype) -> np.ndarray:
    """Numbers as a KV pool of this dtype holds them."""
    return numbers.numpy() if kept == torch.float32 else numbers.to(kept).view(torch.uint16).numpy()


def from_pool(pool: np.ndarray) -> np.ndarray:
    """float32."""
    if pool.dtype == np.float32:
        return pool
    return torch.from_numpy(pool).view(torch.bfloat16).float().numpy()


def layers(bits: int, with_biases: bool, kept: torch.dtype = torch.float32) -> list[Layer]:
    """Layers whose K and V are `kept` in float32 or bfloat16."""
    generator = torch.Generator().manual_seed(bits)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return [
        Layer(
            [
                (GroupWeight if bits < 16 else FloatWeight)(
                    numbers(*shape) * shape[1] ** -0.5, bits
                )
                for shape in WEIGHTS
            ],
            [(1 + 0.1 * numbers(COLUMNS)).numpy() for _ in range(2)],
            [numbers(WEIGHTS[i][0] if with_biases else 0).numpy() for i in range(2)],
            *(in_pool(numbers(SLOTS, KV_HEADS, SIZE), kept) for _ in range(2)),
        )
        for _ in range(LAYERS)
    ]


@dataclass
class Pass:
    """Tokens of one request: token t, at position 20 + t, sees the slots up to its own."""

    x: np.ndarray

    def __post_init__(self) -> None:
        count = len(self.x)
        self.positions = np.arange(20, 20 + count)
        self.slots = np.arange(20, 20 + count)
        self.table = np.arange(SLOTS, dtype=np.int32)[None]
        self.zeros = np.zeros(count, np.int64)
        generator = np.random.default_rng(0)
        self.cos_sin = generator.standard_normal((SLOTS, SIZE)).astype(np.float32)

    def seen(self) -> tuple:
        none = np.zeros(1, np.int64)
        counts = self.positions + 1
        return (self.table, self.zeros, self.zeros, counts, none, self.zeros, self.zeros,
                np.float32(SIZE**-0.5), np.float32(0))  # fmt: skip

    def rows(self, first: int, last: int) -> "Pass":
        part = Pass(self.x[first:last])
        part.positions, part.slots = self.positions[first:last], self.slots[first:last]
        return part


def run(
    made: list[Layer],
    tokens: Pass,
    norm: np.ndarray,
    threads: int = 2,
    small_threads: int = 2,
    room: LayerRoom | None = None,
) -> tuple:
    """The residual stream behind the layers, and what the final norm makes of it."""
    room = room or LayerRoom(HEADS, SIZE, made[0].weights)
    count, bits = len(made), made[0].weights[0].bits
    form = bits, multiplier_of(bits)
    addresses, numbers = np.empty((count, ADDRESSES), np.int64), np.empty((count, 6), np.float32)
    for i, layer in enumerate(made):
        qkv, out, up, down = map(columns_of, layer.weights)
        biases = [[bias.ctypes.data, bias.size] for bias in layer.biases]
        addresses[i] = [
            *(norm.ctypes.data for norm in layer.norms), *qkv, *biases[0], *out, *biases[1], *up,
            *down,
        ]  # fmt: skip
        factors = [getattr(weight, "factor", 1.0) for weight in layer.weights]
        numbers[i] = [EPSILON, *factors[:2], EPSILON, *factors[2:]]
    pools = np.array([[each.keys.ctypes.data, each.values.ctypes.data] for each in made])
    out, normed = np.empty_like(tokens.x), np.empty_like(tokens.x)
    run_layers(
        tokens.x, out, room.of(len(tokens.x)), addresses, numbers, form, HEADS,
        KV_HEADS, SIZE, pools, SLOTS, made[0].keys[:0], tokens.positions, tokens.cos_sin, True,
        tokens.slots, norm, np.float32(EPSILON), normed, *tokens.seen(), threads, threads,
        small_threads,
    )  # fmt: skip
    return out, normed


def by_parts(made: list[Layer], tokens: Pass) -> torch.Tensor:
    """The same by torch's operators and the compiled parts that SGLang's modules call."""
    x, count = torch.from_numpy(tokens.x), len(tokens.x)
    for layer in made:
        qkv, out, up, down = layer.weights
        first, second = (torch.from_numpy(norm) for norm in layer.norms)
        bias, out_bias = (torch.from_numpy(b) if b.size else None for b in layer.biases)
        both = qkv.linear(F.rms_norm(x, (COLUMNS,), first, EPSILON), bias)
        q, k, v = both.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], dim=1)
        for part, to in ((q, queries := torch.empty(q.shape)), (k, keys := torch.empty(k.shape))):
            rotate(part.numpy(), tokens.positions, tokens.cos_sin, to.numpy(), SIZE, True)
        for pool, own in ((layer.keys, keys), (layer.values, v)):
            kept = torch.float32 if pool.dtype == np.float32 else torch.bfloat16
            pool[tokens.slots] = in_pool(own.reshape(count, KV_HEADS, SIZE), kept)
        attended = np.empty((count, HEADS, SIZE), np.float32)
        attend(queries.view(attended.shape).numpy(), layer.keys, layer.values, attended,
               *tokens.seen(), 1)  # fmt: skip
        x = x + out.linear(torch.from_numpy(attended).view(count, -1), out_bias)
        gate, more = up.linear(F.rms_norm(x, (COLUMNS,), second, EPSILON)).split(GATE, dim=1)
        x = x + down.linear(F.silu(gate) * more)
    return x


def inputs(count: int) -> Pass:
    x = np.random.default_rng(count).standard_normal((count, COLUMNS)).astype(np.float32)
    return Pass(x)


NORM = np.linspace(0.5, 1.5, COLUMNS, dtype=np.float32)
NO_NORM = np.empty(0, np.float32)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_biases", [False, True])
@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("bits", [8, 4, 32, 16])
def test_layers_are_what_their_parts_are(bits, count, with_biases, kept):
    made, tokens = layers(bits, with_biases, kept), inputs(count)
    expected = by_parts(made, tokens)
    keys = [from_pool(layer.keys).copy() for layer in made]
    out, normed = run(made, tokens, NORM)
    # A level more or less where a row's number lies between two; floats have none.
    most, mean = (0.1, 5e-3) if bits < 16 or kept == torch.bfloat16 else (1e-4, 1e-5)
    torch.testing.assert_close(torch.from_numpy(out), expected, rtol=0, atol=most)
    assert np.abs(out - expected.numpy()).mean() < mean
    expected_norm = F.rms_norm(torch.from_numpy(out), (COLUMNS,), torch.from_numpy(NORM), EPSILON)
    torch.testing.assert_close(torch.from_numpy(normed), expected_norm)
    for layer, before in zip(made, keys, strict=True):
        np.testing.assert_allclose(from_pool(layer.keys), before, atol=0.1)


@pytest.mark.parametrize("bits", [8, 32])
def test_a_room_is_kept_from_pass_to_pass_and_changes_nothing(bits):
    made = layers(bits, with_biases=True)
    room = LayerRoom(HEADS, SIZE, made[0].weights)
    for count in (1, 12, 5, 13, 200, 2):
        expected, kept = run(made, inputs(count), NORM), run(made, inputs(count), NORM, room=room)
        np.testing.assert_array_equal(kept, expected)
    assert np.shares_memory(room.of(2)[0], room.of(13)[0])
    assert not np.shares_memory(room.of(200)[0], room.of(13)[0])


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4, 32, 16])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(bits, kept):
    made, tokens = layers(bits, with_biases=True, kept=kept), inputs(40)
    whole, normed = run(made, tokens, NORM)
    for first, last in ((0, 1), (1, 3), (3, 8), (8, 40)):  # as a prompt, chunks and single tokens
        part, part_normed = run(made, tokens.rows(first, last), NORM)
        np.testing.assert_array_equal(part, whole[first:last])
        np.testing.assert_array_equal(part_normed, normed[first:last])


@pytest.mark.parametrize("bits", [4, 32])
def test_results_do_not_depend_on_threads(bits):
    made, tokens = layers(bits, with_biases=False), inputs(33)
    alone = run(made, tokens, NORM, 1, 1)[0]
    np.testing.assert_array_equal(alone, run(made, tokens, NORM, 2, 2)[0])
    np.testing.assert_array_equal(alone, run(made, tokens, NORM, 2, 1)[0])


def test_layers_can_be_run_one_by_one():
    made, tokens = layers(8, with_biases=False), inputs(3)
    whole, _ = run(made, tokens, NO_NORM)
    x = tokens.x
    for layer in made:
        x, _ = run([layer], Pass(x), NO_NORM)
    np.testing.assert_array_equal(x, whole)
