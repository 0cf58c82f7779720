"""`sglang-ext ops list` and `ops write FOLDER`: files to run a server by (docs/operations.md)."""

import argparse
import shutil
import sys
from importlib import resources
from pathlib import Path

FILES = {
    "dashboard.json": "Grafana: requests, speculation, datastore",
    "alerts.yaml": "Prometheus: alert rules",
    "prometheus.yaml": "Prometheus: what is scraped, and the alerts",
    "compose.yaml": "server, Prometheus and Grafana with the dashboard",
    "compose.gpu.yaml": "for compose.yaml: gives the server all GPUs",
    "grafana-datasource.yaml": "for compose.yaml: where Grafana finds Prometheus",
    "grafana-dashboards.yaml": "for compose.yaml: where Grafana finds the dashboard",
    "Dockerfile": "sglang-ext on SGLang's image",
    "sglang-ext.service": "systemd: one server, with the command that wrote the file",
    "kubernetes.yaml": "a StatefulSet and its Service",
}
"""What the pack holds, by name."""

_PACK = resources.files(__name__) / "pack"
# In the unit: the command. systemd looks for none and takes whole paths only.
_COMMAND = "@SGLANG_EXT@"


class PackError(ValueError):
    """The pack cannot be written; the message says why."""


def add_commands(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `ops` to the command line. Its handlers are `args.func(args) -> exit code`.

    Exit codes: 0 done, 1 it cannot be written, 2 an unknown file.
    """
    parser = subparsers.add_parser(
        "ops", help="write a dashboard, alerts, and files for containers, systemd and Kubernetes"
    )
    commands = parser.add_subparsers(dest="ops_command", metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="show what there is")
    listing.set_defaults(func=_list)
    writing = commands.add_parser("write", help="write the files to a folder")
    writing.add_argument("folder", metavar="FOLDER", type=Path, help="made if it is not there")
    writing.add_argument(
        "names", nargs="*", metavar="FILE", default=[], help="these alone (default: all)"
    )
    writing.add_argument("--force", action="store_true", help="write over files that are there")
    writing.set_defaults(func=_write)


def read(name: str) -> str:
    """A file of the pack, one of FILES, as it is in the package."""
    return (_PACK / name).read_text(encoding="utf-8")


def write(folder: Path, names: list[str], *, force: bool = False) -> list[Path]:
    """Write files of the pack: all or none, where some are there already.

    Args:
        names: of FILES; none: all.
        force: write over what is there.

    Raises:
        PackError: a file is there.
        OSError: one cannot be written.
    """
    paths = {name: folder / name for name in names or FILES}
    there = [str(path) for path in paths.values() if path.exists()]
    if there and not force:
        raise PackError(f"{', '.join(there)}: there already; name another folder, or --force")
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in paths.items():
        text = read(name).replace(_COMMAND, _command())
        path.write_text(text, encoding="utf-8")
    return list(paths.values())


def _command() -> str:
    """The whole path of the command `sglang-ext` of this installation."""
    beside = Path(sys.executable).with_name("sglang-ext")
    return str(beside) if beside.exists() else (shutil.which("sglang-ext") or str(beside))


def _list(args: argparse.Namespace) -> int:
    width = max(map(len, FILES))
    for name, text in FILES.items():
        print(f"{name:<{width}}  {text}")
    return 0


def _write(args: argparse.Namespace) -> int:
    unknown = [name for name in args.names if name not in FILES]
    if unknown:
        return _fail(f"there is no file {unknown[0]!r}; there are: {', '.join(FILES)}", 2)
    try:
        for path in write(args.folder, args.names, force=args.force):
            print(path)
    except (PackError, OSError) as error:
        return _fail(error, 1)
    return 0


def _fail(message: object, code: int) -> int:
    print(f"sglang-ext: error: {message}", file=sys.stderr)
    return code
