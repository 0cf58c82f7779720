"""What surrounds the block drafter's decoder as compiled loops for CPUs, with weights in 8 bits.

What is remembered of tokens, and the decoder's input: of torch some forty small operators a
step, each of which takes 20 to 50 us between a target's passes.
"""

import numba
import numpy as np

from sglang_ext.block_drafter.decoder_kernel import (
    _linear,
    _norm_row,
    _of_normed,
)
from sglang_ext.cpu.addresses import pointer_to


@numba.njit(nogil=True)
def _add_place(row, place, rates):
    """row [width] += the sinusoids of a place; rates: float32[width / 2]."""
    half = len(rates)
    for i in range(half):
        angle = np.float32(place) * rates[i]
        row[i] += np.sin(angle)
        row[half + i] += np.cos(angle)


@numba.njit(nogil=True, cache=True)
def entries_of_states(states, even, of_states, threads):
    """float32[m, width or more], what a linear layer makes of a target's states.

    Args:
        states: float32[m, states.width].
        even: float32[2, states.width], ones and zeros: a state's direction counts.
        of_states: the layer.
        threads: how many share the work.
    """
    return _of_normed(states, even, np.float32(1e-5), of_states, threads)


@numba.njit(nogil=True, cache=True)
def remember(
    read, norm, epsilon, kind, places, rates, keys_values, rooms, capacities, slots, threads
):  # fmt: skip
    """float32[m, width], entries of tokens; writes their keys and values to where they go.

    Args:
        read: float32[m, width or more], embeddings, or of `entries_of_states`.
        norm: float32[2, width], of entries; epsilon: what it adds to variances.
        kind: float32[width], what each is told.
        places: int64[m], where in the source or the output each lies.
        rates: float32[width / 2], of sinusoids.
        keys_values: of all decoder layers, one behind the other.
        rooms: int64[m], the address of each one's float32[layers, 2, capacity, width].
        capacities, slots: int64[m], entries that there is room for, and each one's place there.
        threads: how many share the work.
    """
    width = len(kind)
    entries = np.empty((len(read), width), np.float32)
    for row in range(len(read)):
        _norm_row(read[row, :width], norm, epsilon, entries[row])
        entries[row] += kind
        _add_place(entries[row], places[row], rates)
    made = _linear(entries, keys_values, threads)
    parts = len(keys_values[3]) // width  # keys and values of each layer
    for row in range(len(read)):
        room = numba.carray(pointer_to(rooms[row]), (parts, capacities[row], width), np.float32)
        for part in range(parts):
            room[part, slots[row]] = made[row, part * width : (part + 1) * width]
    return entries


@numba.njit(nogil=True, cache=True)
def slots_of(last, committed, before, of_before, embedding, scale, slots, rates):
    """float32[n, 1 + block, width], the decoder's input, as BlockModel.slots_of.

    Args:
        last: int64[n], rows of the last committed tokens; committed: int64[n], how many there are.
        before: float32[n, width], the entries before them; of_before: the layer that reads these.
        embedding: float32[rows, width], to be multiplied by `scale`.
        slots: float32[1 + block, width], what each slot is; behind the first, of a mask.
    """
    width = slots.shape[1]
    told = _linear(before, of_before, 1)
    made = np.empty((len(last), *slots.shape), np.float32)
    for request in range(len(last)):
        for slot in range(len(slots)):
            row = made[request, slot]
            row[:] = slots[slot] + told[request, :width]
            _add_place(row, max(committed[request] - 1 + slot, 0), rates)
        made[request, 0] += scale * embedding[last[request]]
    return made
