"""Proves and measures the CUDA path on a machine with a GPU, in nine minutes: docs/gpu.md.

python -m scripts.gpu_kit --out DIR [--minutes 9] [--phases 1,2] [--shape 1b|8b]
python -m scripts.gpu_kit --dry-run --out DIR          on a CPU, everything emulated
python -m scripts.gpu_kit --list-carry                 what a bare GPU machine needs, with sizes
python -m scripts.gpu_kit --pack FILE                  make that archive
python -m scripts.gpu_kit --unpack FILE --into DIR     lay it out there
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

USAGE_ERROR = 2


def main() -> int:
    args = _arguments()
    if args.list_carry or args.pack:
        from scripts.gpu_kit import carry

        if args.pack:
            return carry.pack(args.pack, args.prebuilt)
        return carry.list_carry(args.json, args.prebuilt, args.fast)
    if args.unpack:
        from scripts.gpu_kit import unpack

        return unpack.unpack(args.unpack, args.into)
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    from scripts.gpu_kit.kit import Kit
    from scripts.gpu_kit.phase_runner import run
    from scripts.gpu_kit.schedule import chosen

    if args.dry_run:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    try:
        phases = chosen(args.phases)
        device = "emulated on a CPU" if args.dry_run else _gpu_name()
    except ValueError as error:
        print(f"gpu_kit: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with _work(args.work) as folder:
        kit = Kit(
            out=str(out),
            work=folder,
            shape_name="tiny" if args.dry_run else args.shape,
            seed=args.seed,
            emulated=args.dry_run,
            device_name=device,
            parts=tuple(filter(None, args.parts.split(","))),
            memory_fraction=args.memory_fraction,
        )
        try:
            passed = run(kit, phases, 60 * args.minutes)
        except ValueError as error:
            print(f"gpu_kit: error: {error}", file=sys.stderr)
            return USAGE_ERROR
    print(f"{'every phase passed' if passed else 'not every phase passed'}: {out}")
    return 0 if passed else 1


@contextmanager
def _work(given: Path | None) -> Iterator[str]:
    """Where the checkpoint and notes lie: kept in a folder that was given."""
    if given is None:
        with tempfile.TemporaryDirectory(prefix="gpu-kit-") as folder:
            yield folder
        return
    given.mkdir(parents=True, exist_ok=True)
    yield str(given.resolve())


def _gpu_name() -> str:
    import torch

    if not torch.cuda.is_available():
        raise ValueError("no CUDA device here; --dry-run runs every phase on emulations instead")
    return str(torch.cuda.get_device_name(0))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu_kit", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="every phase on a CPU, emulated")
    what.add_argument("--list-carry", action="store_true", help="what must be brought, with sizes")
    what.add_argument("--pack", type=Path, metavar="FILE", help="make the archive to bring")
    what.add_argument("--unpack", type=Path, metavar="FILE", help="lay such an archive out")
    parser.add_argument("--out", type=Path, default=Path("gpu-kit"), help="results [gpu-kit]")
    parser.add_argument("--minutes", type=float, default=9, help="for all phases together [9]")
    parser.add_argument(
        "--phases", default="1,2,3,4,5,6", help="numbers or names, comma-separated [all]"
    )
    parser.add_argument("--parts", default="", help="of the phases, to run these alone [all]")
    parser.add_argument(
        "--memory-fraction", type=float, default=0.7,
        help="of the GPU's memory for a server; less where two kits run side by side [0.7]",
    )  # fmt: skip
    parser.add_argument("--shape", choices=("1b", "8b"), default="1b", help="the target [1b]")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts [0]")
    parser.add_argument(
        "--work", type=Path, metavar="DIR",
        help="for the checkpoint and notes, kept and used again [a temporary folder]",
    )  # fmt: skip
    parser.add_argument("--prebuilt", type=Path, metavar="DIR", help="kernels to bring: prebuild")
    parser.add_argument("--into", type=Path, default=Path("site"), help="--unpack's folder [site]")
    parser.add_argument("--fast", action="store_true", help="--list-carry: an upper bound")
    parser.add_argument("--json", type=Path, metavar="FILE", help="--list-carry's figures")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
