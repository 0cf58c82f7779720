"""Decoders die and the server lives: each fault costs its own file one AudioError, no more."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import SpooledTemporaryFile

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest

from scripts.speech_data import FORMATS, Clip, encode
from speech import decoder_client, decoders
from speech.audio import BLOCK_SAMPLES, SAMPLE_RATE, decode
from speech.audio_errors import AudioError, AudioTooLong, DecoderDied, DecodersBusy
from speech.decoders import DecoderPool
from tests.eventually import eventually

FAULTY = "tests.unit.speech.faulty_decoder"
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_client, "MODULE", FAULTY)


@pytest.fixture
def pools() -> Iterator[Callable[..., DecoderPool]]:
    made: list[DecoderPool] = []

    def make(*args: float, **options: float) -> DecoderPool:
        made.append(DecoderPool(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def noise(seconds: float, seed: int = 0) -> bytes:
    samples = np.random.default_rng(seed).normal(0, 0.1, (1, int(seconds * SAMPLE_RATE)))
    return encode(Clip("noise", samples.astype(np.float32), SAMPLE_RATE), "flac")


def decoded(pool: DecoderPool, data: bytes) -> np.ndarray:
    with pool.open(io.BytesIO(data)) as audio:
        return np.concatenate([np.empty(0, np.float32), *audio.blocks()])


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_another_process_gives_the_same_samples(pools, format):
    clip = Clip("x", np.random.default_rng(1).normal(0, 0.1, (2, 44_100)).astype("f4"), 44_100)
    data = encode(clip, format)
    np.testing.assert_array_equal(decoded(pools(1), data), decode(io.BytesIO(data)))


def test_files_in_memory_on_disk_and_half_way_are_the_same(pools, tmp_path: Path):
    pool, data = pools(1), noise(1)
    (tmp_path / "a").write_bytes(data)
    small, large = SpooledTemporaryFile(1 << 20), SpooledTemporaryFile(16)  # noqa: SIM115
    for file in (small, large):
        file.write(data)
    with (tmp_path / "a").open("rb") as opened:
        opened.seek(100)
        for file in (tmp_path / "a", opened, small, large, io.BytesIO(data)):
            with pool.open(file) as audio:  # type: ignore[arg-type]
                assert len(np.concatenate(list(audio.blocks()))) == SAMPLE_RATE
    with pytest.raises(OSError, match="no regular file"):
        pool.open(Path("/dev/zero"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        pool.open(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"crash", "ended with SIGSEGV"),
        (b"abort", "ended with SIGABRT"),
        (b"memory", "more than 64 MiB of memory"),
        (b"loop /dev/null", "more than 0.3 seconds of CPU time"),
    ],
)
def test_a_fault_costs_one_file_and_the_next_is_decoded(pools, data, said, monkeypatch):
    monkeypatch.setattr(decoders, "_WALL_SECONDS", 1e6)  # CPU time alone ends the loop
    pool = pools(1, 8, 64, 0.3)
    assert len(decoded(pool, noise(0.1)))
    for _ in range(2):
        with pytest.raises(DecoderDied, match=said):
            decoded(pool, data)
        assert len(decoded(pool, noise(0.1))) == SAMPLE_RATE // 10


def test_a_decoder_that_waits_for_ever_is_ended_too(pools):
    with pytest.raises(DecoderDied, match="CPU time"):
        decoded(pools(1, 8, 64, 0.1), b"sleep")


def test_a_fault_of_ours_costs_one_file_too(pools):
    with pytest.raises(AudioError, match=r"KeyError.*a fault of ours"):
        decoded(pools(1), b"fault")


def test_a_process_that_was_damaged_before_costs_nobody_an_answer(pools):
    pool = pools(1)
    decoded(pool, noise(0.1))
    os.kill(pool.idle_pids[0], signal.SIGKILL)
    assert len(decoded(pool, noise(0.1))) == SAMPLE_RATE // 10
    assert pool.deaths == 1


def test_processes_are_few_and_used_again(pools):
    pool = pools(2)
    threads = [threading.Thread(target=decoded, args=(pool, noise(1, i))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert 1 <= len(pool.idle_pids) <= 2
    assert set(pids(pool, 6)) <= set(pool.idle_pids)


def pids(pool: DecoderPool, count: int) -> list[int]:
    found = []
    for _ in range(count):
        with pytest.raises(AudioError) as raised:
            decoded(pool, b"pid")
        found.append(int(str(raised.value).split()[1]))
    return found


def test_long_audio_goes_on_where_another_file_took_its_place(pools, monkeypatch):
    data = noise(100)
    expected = decode(io.BytesIO(data))
    pool = pools(1)
    with pool.open(io.BytesIO(data)) as audio:
        blocks = []
        for block in audio.blocks(1):
            blocks.append(block)
            assert len(pids(pool, 1)) == 1  # it has no process of its own
    assert [len(block) for block in blocks[:-1]] == [BLOCK_SAMPLES] * (len(blocks) - 1)
    np.testing.assert_array_equal(np.concatenate(blocks), expected)
    assert audio.seconds_read == 100


def test_long_audio_stays_in_its_process_while_there_is_another(pools, monkeypatch):
    pool, jobs = pools(2), []
    run = decoder_client.DecoderProcess.run

    def watched(process, job, *args):
        jobs.append((process.pid, job["session"], job["skip"]))
        return run(process, job, *args)

    monkeypatch.setattr(decoder_client.DecoderProcess, "run", watched)
    with pool.open(io.BytesIO(noise(100))) as audio:
        for _ in audio.blocks(1):
            decoded(pool, noise(0.1))
    mine = [(pid, skip) for pid, session, skip in jobs if session == jobs[0][1]]
    assert [skip for _, skip in mine] == [0, 1, 3]
    assert len({pid for pid, _ in mine}) == 1


def test_more_than_may_wait_are_refused_and_the_others_served(pools, tmp_path: Path):
    pool, pid_file = pools(1, 1, 64, 600.0), tmp_path / "pid"
    ends: list[object] = []

    def work(data: bytes) -> None:
        try:
            ends.append(len(decoded(pool, data)))
        except AudioError as error:
            ends.append(error)

    threads = [threading.Thread(target=work, args=(b"loop " + bytes(pid_file),))]
    threads[0].start()
    eventually(lambda: pid_file.is_file() and pid_file.read_text())
    threads.append(threading.Thread(target=work, args=(noise(0.1),)))
    threads[1].start()
    eventually(lambda: pool.waiting == 1)
    with pytest.raises(DecodersBusy, match="1 audio files wait"):
        decoded(pool, noise(0.1))
    os.kill(int(pid_file.read_text()), signal.SIGSEGV)
    for thread in threads:
        thread.join(WAIT_S)
    assert isinstance(ends[0], DecoderDied) and ends[1] == SAMPLE_RATE // 10


def test_a_file_that_was_begun_is_not_refused_for_the_queue(pools, tmp_path: Path):
    pool, pid_file = pools(1, 1, 64, 600.0), tmp_path / "pid"
    loop, done = b"loop " + bytes(pid_file), list[object]()

    def work(data: bytes) -> None:
        with pytest.raises(DecoderDied):
            decoded(pool, data)

    def read_on() -> None:
        done.append(sum(map(len, blocks)))

    with pool.open(io.BytesIO(noise(60))) as audio:
        blocks = audio.blocks(1)
        next(blocks)
        threads = [threading.Thread(target=work, args=(data,)) for data in (loop, b"crash")]
        threads[0].start()
        eventually(lambda: pid_file.is_file() and pid_file.read_text())
        threads[1].start()
        eventually(lambda: pool.waiting == 1)
        threads.append(threading.Thread(target=read_on))
        threads[2].start()
        eventually(lambda: pool.waiting == 2)
        os.kill(int(pid_file.read_text()), signal.SIGPROF)  # what the time limit sends
        for thread in threads:
            thread.join(WAIT_S)
    assert done == [60 * SAMPLE_RATE - BLOCK_SAMPLES]


def test_a_full_disk_is_not_the_files_fault(pools, monkeypatch):
    full = Path("/dev/full").open("wb")  # noqa: SIM115
    monkeypatch.setattr(decoders.tempfile, "TemporaryFile", lambda **_: full)
    with pytest.raises(RuntimeError, match="cannot be written"):
        decoded(pools(1), noise(0.1))


def test_limits_of_length_hold_there_too(pools):
    with pytest.raises(AudioTooLong), pools(1).open(io.BytesIO(noise(3)), 2.5) as audio:
        list(audio.blocks())


def test_the_file_is_free_once_its_reader_is_gone(pools, tmp_path: Path):
    path, pool = tmp_path / "long", pools(1)
    path.write_bytes(noise(60))
    audio = pool.open(path)
    next(audio.blocks(1))
    worker = psutil.Process(pool.idle_pids[0])
    assert str(path) in [file.path for file in worker.open_files()]
    audio.close()
    eventually(lambda: str(path) not in [file.path for file in worker.open_files()])


def test_what_does_not_start_is_the_servers_fault(pools, monkeypatch):
    monkeypatch.setattr(decoder_client, "MODULE", "speech.there_is_no_such_module")
    pool = pools(1)
    for _ in range(2):  # its place is free again
        with pytest.raises(RuntimeError, match="does not start"):
            decoded(pool, noise(0.1))


def test_secrets_of_the_server_are_not_handed_over(pools, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    pool = pools(1)
    decoded(pool, noise(0.1))
    assert "OPENAI_API_KEY" not in psutil.Process(pool.idle_pids[0]).environ()


PARENT = """
import io, os, sys, threading
from speech import decoder_client, decoders
decoder_client.MODULE = sys.argv[1]
pool = decoders.DecoderPool(2, cpu_seconds=3600)
def work(data):
    try:
        list(pool.open(io.BytesIO(data)).blocks())
    except ValueError:
        pass
work(b"nothing")
print(pool.idle_pids[0], flush=True)
threading.Thread(target=work, args=(b"pid",)).start()
work(b"loop " + os.fsencode(sys.argv[2]))
"""


def test_decoders_end_with_the_server_also_in_a_loop(tmp_path: Path):
    pid_file = tmp_path / "pid"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, FAULTY, str(pid_file)],
        stdout=subprocess.PIPE,
        cwd=Path(decoders.__file__).parents[1],
    )
    assert parent.stdout is not None
    started = []
    try:
        started.append(psutil.Process(int(parent.stdout.readline())))
        eventually(lambda: pid_file.is_file() and pid_file.read_text())
        started.append(psutil.Process(int(pid_file.read_text())))
        assert all(process.is_running() for process in started)
        parent.kill()
        parent.wait()
        eventually(lambda: not any(process.is_running() for process in started))
    finally:
        for process in (parent, *started):
            with contextlib.suppress(psutil.Error):
                process.kill()
        parent.wait()
        parent.stdout.close()
