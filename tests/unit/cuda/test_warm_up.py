"""Kernels that no graph holds run once for each width before there are requests."""

import sglang_ext.cuda.warm_up as module
from sglang_ext.cuda.warm_up import warm_up


def test_every_width_but_a_plain_steps_is_walked_and_masked(monkeypatch):
    walked, masked = [], []
    walk, mask = module.walk_on_device, module.full_mask

    def noted_walk(said, verify_input):
        found = walk(said, verify_input)
        walked.append((verify_input.draft_token_num, found.accept_lens.tolist()))
        return found

    def noted_mask(tree, lens, starts, total):
        masked.append(mask(tree, lens, starts, total).tolist())
        return masked[-1]

    monkeypatch.setattr(module, "walk_on_device", noted_walk)
    monkeypatch.setattr(module, "full_mask", noted_mask)
    warm_up((1, 2, 8), "cpu")
    assert walked == [(2, [1]), (8, [1])]
    assert [len(found) for found in masked] == [2 * 3, 8 * 9]
