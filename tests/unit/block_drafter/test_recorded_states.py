"""States that were recorded as outputs were written: their folder, and training on them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError, read_manifest
from sglang_ext.block_drafter.recorded_states import keep_recorded, recorded_states
from sglang_ext.block_drafter.shapes import TargetStates
from sglang_ext.block_drafter.state_log import StateLog, folder_of, read_records
from sglang_ext.block_drafter.states_on_disk import StatesAt
from sglang_ext.block_drafter.target_models import load_target
from sglang_ext.block_drafter.training_data import header, read_files, source_rule
from tests.unit.block_drafter.toy_drafters import FIRST, repeating
from tests.unit.commands.test_drafter_commands import QUICK, error_of, make_target, run

STATES = TargetStates(layer=3, width=8)
RNG = np.random.default_rng(0)


def rows(count: int) -> np.ndarray:
    return RNG.standard_normal((count, STATES.width)).astype(np.float16)


def log_of(folder: Path, records: dict[int, tuple[int, np.ndarray]]) -> None:
    log = StateLog(folder, STATES)
    for number, (begin, states) in records.items():
        log.add(number, begin, states)
    log.close()


def read(folder: Path, number: int) -> np.ndarray:
    found = read_records(folder)
    assert found is not None and found.states == STATES
    at = found.places[number]
    stored = np.fromfile(at.path, np.float16).reshape(-1, STATES.width)
    return stored[at.first : at.first + at.count]


def test_a_log_is_read_back_and_gone_on_with(tmp_path):
    first, second, third = rows(3), rows(5), rows(2)
    log_of(tmp_path / "a", {7: (1, first), 0: (2, second)})
    log_of(tmp_path / "a", {9: (0, third)})
    for number, states in ((7, first), (0, second), (9, third)):
        assert np.array_equal(read(tmp_path / "a", number), states)
    again = rows(4)
    log_of(tmp_path / "a", {7: (1, again)})
    assert np.array_equal(read(tmp_path / "a", 7), again)
    assert read_records(tmp_path) is None


def test_what_a_kill_leaves_is_cut_off(tmp_path):
    kept, lost, later = rows(3), rows(5), rows(2)
    log_of(tmp_path, {1: (0, kept), 2: (0, lost)})
    # Of the second record the rows did not all reach the disk; of a third the line did not.
    states = tmp_path / "states.f16"
    states.write_bytes(states.read_bytes()[: 2 * 8 * 6 + 3])
    with (tmp_path / "index.jsonl").open("ab") as index:
        index.write(b'{"number": 3, "beg')
    found = read_records(tmp_path)
    assert found is not None and list(found.places) == [1]
    log_of(tmp_path, {4: (0, later)})
    found = read_records(tmp_path)
    assert found is not None and list(found.places) == [1, 4]
    assert np.array_equal(read(tmp_path, 1), kept)
    assert np.array_equal(read(tmp_path, 4), later)


def test_another_layers_folder_is_refused(tmp_path):
    log_of(tmp_path, {1: (0, rows(3))})
    with pytest.raises(BlockDrafterError, match="behind layer 3 of width 8, not 2 of 8"):
        StateLog(tmp_path, replace(STATES, layer=2))
    (tmp_path / "index.jsonl").write_text('{"format": 1, "layer": 3, "width": 8}\n{"number": 1}\n')
    with pytest.raises(BlockDrafterError, match=r"is damaged: .* is no record"):
        read_records(tmp_path)


def test_training_reads_what_was_recorded_of_several_files(tmp_path):
    target = make_target(tmp_path / "parrot", ["say", "a", "b", "c"])
    loaded = load_target(target)
    states = {}
    for name, numbers in (("one", range(5)), ("two", range(10, 16))):
        path = tmp_path / f"{name}.jsonl"
        lines = [
            {"n": n, "prompt": [3, 4 + n % 3, 4, 4], "output": [4, 5, n % 2 + 4, 1]}
            for n in numbers
        ]
        heads = [header(loaded), *lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in heads))
        states |= {(name, n): rows(4 + 3 - 1) for n in numbers if n != 12}
        own = {n: (1, kept) for (file, n), kept in states.items() if file == name}
        log_of(folder_of(path), own)
    data = read_files([tmp_path / "one.jsonl", tmp_path / "two.jsonl"], loaded, 1 << 20)
    rule = source_rule(data, 16)
    assert rule.before == (3,) and len(data.examples) == 11
    assert keep_recorded(data, 2, rule) is None and len(data.examples) == 11
    assert keep_recorded(data, 0, rule) == STATES
    assert len(data.examples) == 10 and data.left_out == 1  # n 12 was not recorded
    found = recorded_states(data.examples, rule, STATES)
    assert found.source_lengths.tolist() == [3] * 10
    for number, key in enumerate(states):
        source, output = found.read(number)
        assert np.array_equal(np.concatenate([source, output]), states[key])
    found.close()


def test_examples_whose_states_begin_too_late_are_left_out(tmp_path):
    data = repeating(20)
    rule = source_rule(data, 16)
    length = len(data.examples[0].prompt) + len(data.examples[0].output) - 1
    assert len(rule.before) == 2 and data.examples[0].prompt[2] == FIRST

    def at(begin: int, count: int) -> StatesAt:
        return StatesAt(tmp_path / "states.f16", STATES, begin, 0, count)

    places = [at(2, length - 2), at(0, length), at(3, length - 3), at(2, length - 3), None]
    data.examples[:] = [
        replace(example, states=place)
        for example, place in zip(data.examples, places, strict=False)
    ]
    assert keep_recorded(data, 3, rule) == STATES
    assert [example.states for example in data.examples] == places[:2] and data.left_out == 3


def test_states_of_another_layer_are_not_learned_from(tmp_path):
    data = repeating(20)
    rule = source_rule(data, 16)
    length = len(data.examples[0].prompt) + len(data.examples[0].output) - 1
    other = replace(STATES, layer=2)
    data.examples[:] = [
        replace(each, states=StatesAt(tmp_path / "s", STATES if n % 2 else other, 0, 0, length))
        for n, each in enumerate(data.examples)
    ]
    assert keep_recorded(data, 0, rule) is None and len(data.examples) == 20
    assert keep_recorded(data, 2, rule) == other and len(data.examples) == 10
    assert {each.states.kind for each in data.examples} == {other}


@pytest.fixture
def distilled(tmp_path) -> tuple[list[object], Path]:
    """Outputs of a target without weights, whose states were recorded: arguments, and the file."""
    target = make_target(tmp_path / "parrot", ["say", *"abcdefghijkl"])
    path = tmp_path / "data.jsonl"
    lines = [{"n": n, "prompt": [3, 4 + n, 4], "output": [4 + n, 4 + n, 1]} for n in range(12)]
    head = json.dumps(header(load_target(target))) + "\n"
    path.write_text(head + "".join(json.dumps(line) + "\n" for line in lines))
    log_of(folder_of(path), {n: (1, rows(4)) for n in range(12)})
    return ["--model", target, "--data", path], path


def test_recorded_states_train_and_score_a_drafter_without_the_targets_weights(
    tmp_path, distilled, capsys
):
    given, _ = distilled
    made = tmp_path / "made"
    assert run("drafter", "train", "--encoder", "target", *given, "--out", made, *QUICK) == 0
    assert read_manifest(made).states == STATES
    capsys.readouterr()
    assert run("drafter", "eval", made, *given, "--json", "--most", 5) == 0
    scores = json.loads(capsys.readouterr().out)
    assert 1 <= scores["accepted_per_step_k4"] <= 2


def test_held_out_outputs_without_states_beside_data_with_them_are_refused(
    tmp_path, distilled, capsys
):
    given, path = distilled
    held = tmp_path / "held.jsonl"
    held.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    asked = ["train", "--encoder", "target", *given, "--held-out", held, "--out", tmp_path / "d"]
    assert "--held-out has none" in error_of(capsys, *asked)
