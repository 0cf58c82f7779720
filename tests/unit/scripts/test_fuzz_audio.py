"""The audio fuzzer: a short run of it, its restarts, and that it sees what goes wrong."""

import io
import json
import os
import signal

import pytest

from scripts import fuzz_audio
from scripts.fuzz_audio import decode_all, figures_of, outcome
from scripts.lib.audio_mutations import CLASSES, mutant
from scripts.lib.audio_seeds import missing, seeds
from speech.audio import decode
from speech.decoders import DecoderPool

FILES = 12 * len(CLASSES)


def test_a_short_run_decodes_or_refuses_every_file():
    counts, peak = decode_all(seed=1, offset=0, files=FILES)
    figures = figures_of(counts, peak)
    assert figures["files"] == FILES
    assert (figures["crashes"], figures["5xx"], figures["wrong_outputs"]) == (0, 0, 0)
    assert figures["decoded"] + figures["refused"] + figures["decoder_deaths"] == FILES
    assert figures["decoded"] > FILES // 5 and figures["refused"] > FILES // 5
    assert figures["peak_mib"] <= 400


def test_a_file_is_the_same_for_the_same_numbers_and_another_else():
    for number in range(2 * len(CLASSES)):
        kind, data = mutant(3, number)
        assert kind == CLASSES[number % len(CLASSES)]
        assert (kind, data) == mutant(3, number)
    assert len({mutant(3, n)[1] for n in range(200)}) > 150


def test_every_container_is_there_and_its_valid_files_are_decoded():
    assert missing() == []
    containers = {seed.container for seed in seeds()}
    assert containers >= {"wav", "flac", "ogg", "mp3", "mp4", "mov", "webm", "matroska", "adts"}
    for seed in seeds():
        assert len(decode(io.BytesIO(seed.data))) > 1000, seed.name


class Pool(DecoderPool):
    """A pool whose files end as they are told."""

    def __init__(self, fault: Exception | None = None):
        super().__init__(1)
        self.fault = fault

    def open(self, file, max_seconds=float("inf")):
        if self.fault:
            raise self.fault
        return super().open(file, max_seconds)


def test_what_a_client_would_get_a_500_for_is_an_error():
    pool = Pool(AttributeError("'AudioStream' has no attribute 'rate'"))
    assert outcome(pool, b"x") == "error"
    pool.fault = None
    assert outcome(pool, b"x") == "refused"
    assert outcome(pool, seeds()[0].data) == "decoded"
    pool.close()


def ends_at_three(seed, start, end, pipe):
    """Stands for decode_files: the file number 3 ends the process."""
    for number in range(start, end):
        if number == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        pipe.send(("decoded", 1.0))


def test_a_process_that_ends_is_a_crash_and_the_next_goes_on(monkeypatch, tmp_path):
    monkeypatch.setattr(fuzz_audio, "decode_files", ends_at_three)
    counts, _ = decode_all(seed=0, offset=1, files=5, keep=tmp_path / "kept")
    assert counts == {"files": 5, "decoded": 4, "crashed": 1}
    assert (tmp_path / "kept" / "0-3").read_bytes() == mutant(0, 3)[1]


def test_figures_are_written_under_their_names(monkeypatch, tmp_path):
    argv = ["fuzz_audio", "--files", "10", "--json", str(tmp_path / "f")]
    monkeypatch.setattr("sys.argv", argv)
    assert fuzz_audio.main() == 0
    figures = json.loads((tmp_path / "f").read_text())["figures"]
    assert {"files", "decoder_deaths", "crashes", "5xx", "peak_mib"} <= figures.keys()
    monkeypatch.setattr("sys.argv", [*argv, "--files", "0"])
    with pytest.raises(SystemExit):
        fuzz_audio.main()
