"""Names of compiled functions: a process may load what two others compiled."""

import subprocess
import sys

# Prints each function that numba is given, with what it is made of: a line each. It runs in a
# process of its own because the modules are mostly there already.
COMPILED = """
import importlib, pathlib
from numba.core.dispatcher import Dispatcher
import sglang_ext

def parts(function):
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [described(cell) for cell in cells]

def described(value):
    inner = getattr(value, "py_func", getattr(value, "_defn", None))
    return repr(value) if inner is None else f"{inner.__qualname__} of {parts(inner)}"

def init(self, py_func, *args, **kwargs):
    made.append(py_func)
    return before(self, py_func, *args, **kwargs)

made, before, Dispatcher.__init__ = [], Dispatcher.__init__, init
root = pathlib.Path(sglang_ext.__file__).parent
for path in sorted(root.rglob("*.py")):
    if "numba.njit" in path.read_text():
        importlib.import_module(".".join(path.relative_to(root.parent).with_suffix("").parts))
for function in made:
    print(f"{function.__module__}.{function.__qualname__}", *parts(function), sep="\\t")
"""


def test_functions_that_differ_have_names_that_differ():
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILED], capture_output=True, text=True, check=True
    )
    of_name: dict[str, str] = {}
    for line in made.stdout.splitlines():
        name, _, parts = line.partition("\t")
        if name.startswith("sglang_ext."):
            assert of_name.setdefault(name, parts) == parts, f"{name} names two functions"
    assert "sglang_ext.cpu.fused_kernel.run_layers" in of_name
