"""The drafter that writes down the target's states."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_ext.block_drafter.state_log import read_records
from sglang_ext.drafters import DrafterError, DraftRequest, SequenceStates
from sglang_ext.drafters.state_recorder import StateRecorder

WIDTH = 8


def context(folder: object, layer: int = 2) -> SimpleNamespace:
    return SimpleNamespace(options=SimpleNamespace(record_states=str(folder), record_layer=layer))


def request(number: int, known: int, begin: int = 1) -> DraftRequest:
    """A finished one of 3 + 4 tokens, of which the first `known` have states: their places."""

    def states(first: int, end: int) -> SequenceStates:
        places = torch.arange(min(known, end) - first)
        rows = (first + places)[:, None].expand(-1, WIDTH).half()
        return SequenceStates(rows, places)

    params = {"recorder": {"number": number, "begin": begin}}
    return DraftRequest("r", [1, 2, 3], [4, 5, 6, 7], params, target_states=states)


def test_finished_requests_are_written_down(tmp_path):
    recorder = StateRecorder(context(tmp_path / "states"))
    assert recorder.states_layer == 2 and not recorder.uses_early_exit
    asked = request(5, known=6)
    assert [len(tree) for tree in recorder.propose([asked], 8)] == [0]
    recorder.finish(asked, True)
    recorder.finish(request(6, known=5), True)  # a state is missing
    recorder.finish(request(7, known=6), False)  # aborted
    recorder.finish(request(8, known=6, begin=0), True)
    found = read_records(tmp_path / "states")
    assert found is not None and list(found.places) == [5, 8]
    rows = np.fromfile(tmp_path / "states" / "states.f16", np.float16).reshape(-1, WIDTH)
    assert rows[:, 0].tolist() == [1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    assert recorder.counters == {"records": 2, "tokens": 11, "not_recorded": 1}


def test_a_full_disk_ends_recording_and_not_the_server(tmp_path, caplog):
    (tmp_path / "states.f16").symlink_to("/dev/full")
    recorder = StateRecorder(context(tmp_path))
    for number in range(3):
        recorder.finish(request(number, known=6), True)
    assert caplog.text.count("no states are recorded any more") == 1
    assert recorder.counters["records"] == 0


def test_what_cannot_be_recorded_is_told():
    with pytest.raises(DrafterError, match="--record-states and --record-layer"):
        StateRecorder(context(""))
    StateRecorder.check({"recorder": {"number": 3}})
    with pytest.raises(ValueError, match=r"custom_params.recorder.number must be a whole number"):
        StateRecorder.check({"recorder": {"number": -1}})
