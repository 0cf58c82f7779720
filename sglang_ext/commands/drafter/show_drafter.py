"""`sglang-ext drafter show` and `list`: what drafters are, and whose data they saw."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from sglang_ext.block_drafter.drafter_manifest import (
    NAME,
    BlockDrafterError,
    Manifest,
    read_manifest,
)


def show(folder: Path, as_json: bool) -> int:
    """Prints what a drafter's directory states; returns the exit code."""
    manifest = read_manifest(folder)
    if as_json:
        print(manifest.as_json(), end="")
        return 0
    print(f"drafter {folder}")
    for name, value in _lines(manifest):
        print(f"  {name:<11} {value}")
    return 0


def list_drafters(folders: Sequence[Path], saw: str | None) -> int:
    """Prints a line for each drafter below the folders; returns the exit code.

    Args:
        saw: only those that were trained on outputs of this namespace.
    """
    found = 0
    for folder in _drafters(folders):
        manifest = read_manifest(folder)
        if saw is not None and saw not in manifest.namespaces:
            continue
        found += 1
        seen = f", {manifest.namespaces[saw]:,} tokens of {saw}" if saw is not None else ""
        print(f"{folder}: for {manifest.target}, k {manifest.shape.block}{seen}")
    if not found:
        print("none" if saw is None else f"none was trained on outputs of {saw!r}")
    return 0


def _drafters(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        if not folder.is_dir():
            raise BlockDrafterError(f"there is no folder {folder}")
        yield from sorted(path.parent for path in folder.rglob(NAME))


def _lines(manifest: Manifest) -> Iterator[tuple[str, str]]:
    shape, data, training = manifest.shape, manifest.data, manifest.training
    yield "target", f"{manifest.target} (tokenizer {manifest.tokenizer})"
    yield "k", f"{shape.block}, behind a window of {shape.window} tokens"
    layers = f"{shape.encoder_layers}-{shape.decoder_layers}"
    if manifest.states is not None:
        read = f"the target behind layer {manifest.states.layer}"
        yield "encoder", f"{read}, states of {manifest.states.width} numbers"
        layers = str(shape.decoder_layers)
    yield (
        "shape",
        f"{layers} layers, width {shape.width}, {manifest.outputs:,} tokens can be drafted",
    )
    rule = manifest.source
    template = len(rule.before) + len(rule.after)
    yield "source", f"at most {rule.most_tokens} tokens, without a template of {template}"
    yield "data", f"{data.get('origin')}: {data.get('examples')} outputs"
    for name, tokens in manifest.namespaces.items():
        yield "namespace", f"{name}: {tokens:,} tokens"
    yield "training", f"{training.get('steps')} steps"
    for k, score in manifest.scores.get("accepted_per_step", {}).items():
        yield f"k {k}", f"{score:.2f} accepted tokens a step, held out"
