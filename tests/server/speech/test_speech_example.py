"""The speech example runs as it is shown, against a server that other tests use too."""

from tests.server.conftest import run_example


def test_a_file_is_transcribed_with_times(whisper_server):
    lines = run_example("transcribe_file.py", whisper_server, "--language", "en").splitlines()
    assert "printing" in lines[0].lower() and lines[0].lstrip().startswith("0.0 to ")
    assert lines[-1].startswith("english, 9.")
