"""The process of a draft executor.

    python -m sglang_ext.mirror.draft_process --channel PATH --model DIR ...

`executor_client` starts it; it ends with a STOP, with an exit code where something is wrong, or
with whoever started it (servers/supervisor.py).
"""

import argparse
import logging
import os
import sys

from sglang_ext.mirror.draft_devices import DraftDevice

_CANNOT = 2
_NICE = 10


def main() -> int:
    """Load the model, then draft until it is told to stop."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--channel", required=True)
    made.add_argument("--model", required=True)
    made.add_argument("--weights", required=True)
    made.add_argument("--device", required=True)
    made.add_argument("--window", type=int, required=True)
    made.add_argument("--cache-mb", type=float, required=True)
    made.add_argument("--guesses", type=int, required=True)
    made.add_argument("--streams", default="")
    options = made.parse_args()
    logging.basicConfig(level=logging.INFO, format="draft process: %(message)s")
    device = DraftDevice.parse(options.device)
    # Before torch is there: its threads take both from the process.
    os.environ["OMP_NUM_THREADS"] = str(device.threads)
    if device.torch_name == "cpu":
        # Whoever else needs a core takes the draft's time before the target's, which waits for none
        # of what is drafted ahead.
        os.nice(_NICE)
    try:
        device.bind()
        _draft(options, device)
    except ValueError as error:
        logging.error("%s", error)
        return _CANNOT
    return 0


def _draft(options: argparse.Namespace, device: DraftDevice) -> None:
    import numba
    import torch

    from sglang_ext.mirror import lm_loading
    from sglang_ext.mirror.channel import Channel
    from sglang_ext.mirror.executor import Executor
    from sglang_ext.mirror.streaming.stream_files import load_streams
    from sglang_ext.mirror.weight_formats import PACKED

    torch.set_num_threads(device.threads)
    # Starts numba's team: one that starts behind `torch.set_num_threads(1)` takes twice as long.
    numba.set_num_threads(min(device.threads, numba.config.NUMBA_NUM_THREADS))
    channel = Channel.open(options.channel)
    model = lm_loading.load(options.model, options.weights, device.torch_name)
    if device.torch_name == "cpu" and options.weights in PACKED:
        # The products have threads of their own, which were counted when they were made. A second
        # team, of torch's small operators, would spin where these are to run.
        torch.set_num_threads(1)
    if options.streams:
        _, streams = load_streams(options.streams, options.model)
        try:
            model.use_streams(streams)
        except ValueError as error:
            raise ValueError(f"--mirror-streams {options.streams}: {error}") from None
    retrieves = bool(options.guesses)
    Executor(channel, model, options.window, retrieves, options.cache_mb).run()


if __name__ == "__main__":
    sys.exit(main())
