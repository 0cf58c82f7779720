"""How often an outcome falls outside of what the exit foresaw, by kappa and depth, drawn."""

from pathlib import Path

from scripts.lib.mirror_results import Results
from sglang_ext.sweep.plots import panels, save, style

NAME = "mirror_fallbacks"


def write_plots(folder: Path, results: Results) -> None:
    """Write DIR/mirror_fallbacks.png and .svg (the paper's Fig. 7)."""
    folder.mkdir(parents=True, exist_ok=True)
    with style():
        figure, [[axis]] = panels(1, 1)
        for layer, shares in sorted(results.fallbacks().items()):
            axis.plot(list(shares), list(shares.values()), marker="o", label=f"exit {layer}")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("candidates behind each node (kappa)")
        axis.set_ylabel("outcomes that were not foreseen")
        axis.set_ylim(0, 1)
        axis.legend()
        save(figure, folder, NAME)
    print(f"written: {folder / NAME}.png, .svg")
