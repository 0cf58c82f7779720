"""What the fork server imports, and gets ready, before it forks (fork_server.py)."""

import gc
import importlib

from sglang_ext.cpu.fork_server import stand_between
from sglang_ext.cpu.install import hide_gpu_packages, install

_MODULES = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
)

stand_between()
install()
hide_gpu_packages()
for _module in _MODULES:
    importlib.import_module(_module)
gc.collect()
gc.freeze()  # else the first collection of each fork copies all pages
