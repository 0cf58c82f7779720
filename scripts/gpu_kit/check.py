"""The kit's figures for scripts/check_cuda_path.py: what is carried, and the dry run's phases."""

import json
import sys
import tempfile
from pathlib import Path

from scripts.gpu_kit.lines import NAME, PASSED
from scripts.gpu_kit.schedule import SECONDS
from sglang_ext.servers.processes import run

# Far more than it takes on two quiet cores, for machines that others use too.
MINUTES, QUICK_MINUTES = 20, 8
# The one that loads no model and whose parts import little.
QUICK_PHASES = "kernels"
EVERY_PHASE = ",".join(SECONDS)
LONGEST_LISTING_S = 900


def kit_figures(quick: bool) -> dict[str, float]:
    """Run `--list-carry` and `--dry-run`.

    Returns:
        carry_mib (quick: carry_fast_mib, which is more: compressed worse); kit_phases, how many
        were to run; kit_phases_passed and kit_cases of the dry run; kit_emulated_lines, the share
        of its lines that say so.
    """
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "carry.json"
        fast = ["--fast"] if quick else []
        _kit("--list-carry", *fast, "--json", str(listed), timeout=LONGEST_LISTING_S)
        carry_mib = json.loads(listed.read_text())["figures"]["carry_mib"]
        minutes, phases = (QUICK_MINUTES, QUICK_PHASES) if quick else (MINUTES, EVERY_PHASE)
        _kit(
            *("--dry-run", "--out", folder, "--minutes", str(minutes), "--phases", phases),
            timeout=60 * minutes + 60,
        )
        lines = [json.loads(line) for line in (Path(folder) / NAME).read_text().splitlines()]
    done = [line for line in lines if "case" not in line]
    return {
        "carry_fast_mib" if quick else "carry_mib": carry_mib,
        "kit_phases": len(phases.split(",")),
        "kit_phases_passed": sum(line["status"] == PASSED for line in done),
        "kit_cases": len(lines) - len(done),
        "kit_emulated_lines": sum(line["emulated"] is True for line in lines) / len(lines),
    }


def _kit(*arguments: str, timeout: float) -> None:
    """The kit's exit code is not looked at: what failed is in its lines."""
    run([sys.executable, "-m", "scripts.gpu_kit", *arguments], timeout=timeout)
