"""The stand-in for sgl_kernel: when it is there, and what it says about what it lacks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BROKEN = "raise ImportError('libcuda.so.1: cannot open shared object file')\n"
WORKING = """
import torch
library = torch.library.Library("sgl_kernel", "DEF")
library.define("verify_tree_greedy_cpu(Tensor a) -> Tensor")
real = True
"""


def run(code: str, *paths: Path, **environment: str) -> str:
    ours = "SGLANG", "GOMP", "OMP", "NUMBA_NUM_THREADS"
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    env = inherited | {"PYTHONPATH": os.pathsep.join([*map(str, paths), str(ROOT)])} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def package(tmp_path: Path, source: str) -> Path:
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").write_text(
        "from sgl_kernel.version import v\n" + source
    )
    (tmp_path / "sgl_kernel" / "version.py").write_text("v = 1\n")
    return tmp_path


IMPORT = "from sglang_ext.cpu.install import install; print(install()); import sgl_kernel; "


def test_a_package_that_fails_is_replaced(tmp_path):
    code = IMPORT + (
        "from sgl_kernel import verify_tree_greedy_cpu as f;"
        "from sgl_kernel.speculative import reconstruct_indices_from_tree_mask;"
        "print(f.__module__, hasattr(sgl_kernel, 'v'))"
    )
    path = package(tmp_path, BROKEN)
    printed = run(code, path, SGLANG_USE_CPU_ENGINE="1").split("\n")
    assert printed == ["True", "sglang_ext.cpu.kernels False"]


def test_a_package_that_works_is_left_alone(tmp_path):
    code = IMPORT + "print(sgl_kernel.real, sgl_kernel.v)"
    path = package(tmp_path, WORKING)
    assert run(code, path, SGLANG_USE_CPU_ENGINE="1").split("\n") == ["True", "True 1"]


def test_nothing_happens_where_the_user_says_so():
    code = (
        "import os, sys; from sglang_ext.cpu.install import install; n = len(sys.meta_path);"
        "e = dict(os.environ); print(install(), len(sys.meta_path) == n, e == dict(os.environ))"
    )
    assert run(code, SGLANG_USE_CPU_ENGINE="0") == "False True True"


def test_settings_of_the_user_stay():
    code = (
        "import os; from sglang_ext.cpu.install import install; install(); install();"
        "import sys; print(os.environ['OMP_NUM_THREADS'], os.environ.get('GOMP_SPINCOUNT'),"
        "sum(type(f).__module__ == 'sglang_ext.cpu.install' for f in sys.meta_path))"
    )
    given = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "passive"}
    assert run(code, **given) == "3 None 1"


@pytest.mark.parametrize(("given", "expected"), [("1", "1 1"), ("1,2", "1 1"), ("2", "2 2")])
def test_compiled_loops_leave_torch_its_threads(given, expected):
    code = (
        "from sglang_ext.cpu.install import install; install()\n"
        "import torch, numba; from sglang_ext.cpu.group_weights import GroupWeight\n"
        "GroupWeight(torch.ones(32, 32), 8).linear(torch.ones(2, 32))\n"
        "print(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)"
    )
    assert run(code, SGLANG_USE_CPU_ENGINE="1", OMP_NUM_THREADS=given) == expected


def test_spawned_children_find_it(tmp_path):
    script = tmp_path / "launcher.py"
    script.write_text(
        "import multiprocessing as mp\n"
        "from sglang_ext.cpu.install import install\n"
        "install()\n"
        "def child():\n"
        "    from sgl_kernel import fill_bonus_tokens_cpu\n"
        "    print(fill_bonus_tokens_cpu.__module__)\n"
        "if __name__ == '__main__':\n"
        "    p = mp.get_context('spawn').Process(target=child)\n"
        "    p.start(); p.join()\n"
    )
    package(tmp_path, BROKEN)
    # As a program: spawn imports the main module by its path.
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "sglang_ext.cpu.kernels", done.stderr


def test_what_is_missing_is_named():
    import sgl_kernel

    from sglang_ext.cpu.install import is_stand_in

    if not is_stand_in(sgl_kernel):
        pytest.skip("this machine has a working sgl_kernel")
    with pytest.raises(ImportError, match="rmsnorm"):
        from sgl_kernel import rmsnorm  # noqa: F401
    with pytest.raises(AttributeError, match=r"sgl_kernel\.rmsnorm has no CPU version"):
        _ = sgl_kernel.rmsnorm
    with pytest.raises(ModuleNotFoundError, match=r"sgl_kernel\.mamba is not available"):
        import sgl_kernel.mamba


@pytest.mark.parametrize("on_cpu", ["0", "1"])
def test_a_server_on_a_cpu_does_without_kernels_for_gpus(on_cpu, tmp_path):
    (tmp_path / "flashinfer.py").write_text("")
    code = (
        "from importlib.util import find_spec; import sglang_ext.cli;"
        "print(find_spec('flashinfer') is not None)"
    )
    assert run(code, tmp_path, SGLANG_USE_CPU_ENGINE=on_cpu) == str(on_cpu == "0")
