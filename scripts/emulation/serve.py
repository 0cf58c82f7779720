"""`sglang-ext serve` on the CPU whose steps take the CUDA path.

python -m scripts.emulation.serve serve --model NAME [flags of sglang-ext serve]
"""

# SGLang spawns its processes, which import this module again: so this is installed in all of them.
from sglang_ext.cpu.install import install as install_cpu_engine

install_cpu_engine()

import sys  # noqa: E402

from scripts.emulation import device_path  # noqa: E402

device_path.install()

from sglang_ext.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
