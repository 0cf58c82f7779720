"""Runs one part of a phase: `python -m scripts.gpu_kit.part PHASE PART`, started by the kit.

It imports SGLang while the part before it still runs, then waits for a line on its standard input:
the seconds it has. Its exit code is 0 where every case passed.
"""

# Before anything of SGLang, in this process and in those that it spawns (they import this module
# again): see sglang_ext/cli.py.
from sglang_ext.cpu.install import install

install()

import importlib  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402

from scripts.gpu_kit.kit import Kit, Part, last_lines  # noqa: E402
from scripts.gpu_kit.lines import FAILED_CASES, KIT_VARIABLE  # noqa: E402


def _emulate() -> None:
    """The dry run's device: scripts/emulation/device_path.py."""
    kit = os.environ.get(KIT_VARIABLE)
    if kit and Kit.from_json(kit).emulated:
        from scripts.emulation import device_path

        device_path.install()


def main() -> int:
    phase, name = sys.argv[1:3]
    kit = Kit.from_json(os.environ[KIT_VARIABLE])
    error, run = None, None
    try:
        module = importlib.import_module(f"scripts.gpu_kit.phases.{phase}")
        run = module.PARTS[name]
        if getattr(module, "USES_ENGINE", False):
            _emulate()
            importlib.import_module("sglang.srt.entrypoints.engine")
    except Exception:
        error = last_lines()
    seconds = sys.stdin.readline()
    if not seconds:
        return 1  # the kit is gone, or will not need this part
    part = Part(kit, phase, time.monotonic() + float(seconds))
    if run is not None and error is None:
        try:
            run(part)
        except Exception:
            error = last_lines()
    if error is not None:
        part.result(name, False, error=error)
    return FAILED_CASES if part.failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # SGLang leaves threads that would be waited for
elif __name__ == "__mp_main__":
    _emulate()
