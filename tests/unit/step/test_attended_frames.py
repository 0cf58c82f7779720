"""Frames of the tokens that steps commit: each request's own, in the order of its output."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_ext.step.attended_frames import AttendedFrames, frames_asked
from sglang_ext.step.token_info import FRAMES
from sglang_ext.tree import TokenTree, pack
from sglang_ext.whisper.cross_attention import FrameReader


def request(asked, output=()):
    params = None if asked is None else {FRAMES: asked}
    return SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=params),
        output_ids=list(output),
        customized_info=None,
    )


def batch_of(*reqs, **fields):
    rows = torch.tensor([5 + 2 * i for i in range(len(reqs))])
    lens = torch.full((len(reqs),), 1500)
    made = {"req_pool_indices": rows, "encoder_lens": lens, "chunked_req": None}
    return SimpleNamespace(reqs=list(reqs), **(made | fields))


class Reader(FrameReader):
    """Token i of a pass attends to frame 10 + i."""

    def frames(self):
        return list(range(10, 50))


@pytest.fixture
def attended():
    return AttendedFrames(SimpleNamespace(reader=None), Reader({}))


@pytest.mark.parametrize("asked", [None, 0, -3, 1501, "9", 2.0, True])
def test_a_request_that_asks_nothing_or_nonsense_is_not_read(attended, asked):
    req = request(asked)
    assert frames_asked(req) == 0
    attended.begin(batch_of(req))
    assert not attended.asked
    attended.note_plain(batch_of(req))
    assert req.customized_info is None


def test_only_frames_that_are_the_requests_own_are_read(attended):
    lens = torch.tensor([1500, 200, 0])
    attended.begin(batch_of(request(300), request(300), request(300), encoder_lens=lens))
    assert attended._reader.asking == {5: 300, 7: 200}
    attended.begin(batch_of(request(300), encoder_lens=None))
    assert not attended.asked


def test_prompts_end_where_first_tokens_are_predicted(attended):
    first, plain, part = request(100), request(None), request(100)
    batch = batch_of(first, plain, part, extend_lens=[4, 2, 3], chunked_req=part)
    attended.begin(batch)
    attended.note_prefill(batch)
    assert first.customized_info == {FRAMES: [13]}
    assert plain.customized_info is None and part.customized_info is None


def test_a_step_adds_to_what_the_output_has(attended):
    one, other = request(100, [7, 8]), request(100, [7])
    one.customized_info = {FRAMES: [3, 4, 5]}  # the last one's token was cut off
    batch = batch_of(one, request(None, [1]), other)
    attended.begin(batch)
    attended.note_plain(batch)
    assert one.customized_info == {FRAMES: [3, 4, 10]}
    # A first token that another server predicted came without.
    assert other.customized_info == {FRAMES: [-1, 12]}


@pytest.mark.parametrize("ragged", [True, False])
def test_tokens_behind_accepted_nodes_have_the_nodes_frames(attended, ragged):
    tree = TokenTree(np.array([4, 5, 6]), np.array([-1, -1, 1], np.int32), np.ones(3, np.float32))
    packed = pack([1, 2, 3], [TokenTree.chain([9]), tree, TokenTree.empty()], 4)
    # Of the second request the root, its second child and the child of that.
    index = torch.tensor([[0, 1, -1, -1], [4, 6, 7, -1], [8, -1, -1, -1]], dtype=torch.int32)
    accepted = SimpleNamespace(
        accept_index=index, accept_lens=torch.tensor([2, 3, 1], dtype=torch.int32)
    )
    reqs = [request(100), request(100), request(100)]
    batch = batch_of(*reqs)
    attended.begin(batch)
    attended.note_verified(batch, packed, accepted, ragged)
    made = [req.customized_info[FRAMES] for req in reqs]
    # Without padding the pass has 2, 4 and 1 tokens.
    assert made == ([[10, 11], [12, 14, 15], [16]] if ragged else [[10, 11], [14, 16, 17], [18]])
