"""The frames that tokens attend to, against dense attention."""

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.whisper.cross_attention import FrameReader, heads_to_read

CONFIG = SimpleNamespace(encoder_layers=2, decoder_layers=4, decoder_attention_heads=3)
HEADS, SIZE, SLOTS = 3, 8, 200


def test_the_checkpoints_heads_are_read_and_else_those_of_the_upper_half():
    # Behind two layers of the encoder and four of self-attention.
    assert heads_to_read(CONFIG, [[1, 2], [3, 0], [3, 1]]) == {7: [2], 9: [0, 1]}
    assert heads_to_read(CONFIG, None) == {8: [0, 1, 2], 9: [0, 1, 2]}


@pytest.mark.parametrize("pair", [[4, 0], [0, 3], [-1, 0]])
def test_a_head_that_is_not_there_is_named(pair):
    with pytest.raises(ValueError, match=f"head {pair[1]} of layer {pair[0]}"):
        heads_to_read(CONFIG, [pair])


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def layers(generator):
    """Queries of five tokens and keys of a pool, of two layers."""
    return [
        (
            torch.randn(5, HEADS, SIZE, generator=generator),
            torch.randn(SLOTS, HEADS, SIZE, generator=generator),
        )
        for _ in range(2)
    ]


def dense(layers, heads, tokens, slots, scale=0.5):
    """The argmax of the mean of these heads' weights."""
    weights = []
    for (query, keys), chosen in zip(layers, heads, strict=True):
        for head in chosen:
            scores = query[tokens, head].double() @ keys[slots.long(), head].double().T
            weights.append((scores * scale).softmax(-1))
    return torch.stack(weights).mean(0).argmax(-1).tolist()


def test_each_request_reads_its_own_frames(layers, generator):
    table = torch.stack([torch.randperm(SLOTS, generator=generator)[:60] for _ in range(4)]).int()
    rows = torch.tensor([3, 1, 3, 0, 1])
    reader = FrameReader({8: [0, 2], 9: [1]})
    for asking in ({3: 40, 1: 25}, {1: 60}):
        reader.watch(asking)
        for layer, (query, keys) in zip((8, 9), layers, strict=True):
            reader.read(layer, query, keys, table, rows, 0.5)
            reader.read(7, query * 9, keys, table, rows, 0.5)  # a layer that tells nothing
        wanted = [-1] * 5
        for row, frames in asking.items():
            tokens = [i for i, r in enumerate(rows.tolist()) if r == row]
            found = dense(layers, [[0, 2], [1]], tokens, table[row, :frames])
            for token, frame in zip(tokens, found, strict=True):
                wanted[token] = frame
        assert reader.frames() == wanted
    reader.watch({})
    assert reader.frames() == []
