"""What a datastore was made of and what may be done with it: CARD.json in its folder, and the
README.md that travels with it, laid out as a Hugging Face dataset card."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..config import DatastoreError
from ..files import open_file, replace_file

NAME = "CARD.json"
README = "README.md"
_MAX_BYTES = 1 << 20
_MAX_TEXT = 4096
_MOST_SOURCES = 1000


@dataclass(frozen=True)
class Card:
    """What nobody can tell from the tokens."""

    tokenizer: str = ""
    """The model that it was built for: a name, a path's last part, or a hub id."""
    licence: str = ""
    """Of the texts; on the Hub an identifier such as `apache-2.0`."""
    description: str = ""
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By corpus: the names of the files that it was built from, or what else it came from."""


def read_card(folder: str) -> Card:
    """The folder's card, an empty one where it has none. DatastoreError if it is damaged."""
    path = os.path.join(folder, NAME)
    try:
        with open_file(path) as file:
            text = file.read(_MAX_BYTES)
        return card_of(json.loads(text))
    except FileNotFoundError:
        return Card()
    except OSError as error:
        raise DatastoreError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise DatastoreError(f"{path} is not a card: {error}; mend or remove it") from None


def card_of(content: Any) -> Card:
    """The card of a JSON object. ValueError says what is wrong with it."""
    if not isinstance(content, dict):
        raise ValueError("it must be a JSON object")
    texts = {name: content.get(name, "") for name in ("tokenizer", "licence", "description")}
    for name, text in texts.items():
        if not isinstance(text, str) or len(text) > _MAX_TEXT:
            raise ValueError(f"{name} must be a text of up to {_MAX_TEXT} characters")
    sources = content.get("sources", {})
    if not isinstance(sources, dict) or len(sources) > _MOST_SOURCES:
        raise ValueError("sources must be an object of lists by corpus")
    for names in sources.values():
        if not isinstance(names, list) or len(names) > _MOST_SOURCES:
            raise ValueError(f"sources must hold lists of up to {_MOST_SOURCES} names")
        if not all(isinstance(name, str) and len(name) <= _MAX_TEXT for name in names):
            raise ValueError(f"sources must hold texts of up to {_MAX_TEXT} characters")
    return Card(**texts, sources={corpus: tuple(names) for corpus, names in sources.items()})


def write_card(folder: str, card: Card) -> None:
    """Replaces the folder's card. DatastoreError if it cannot be written."""
    with replace_file(os.path.join(folder, NAME)) as file:
        file.write(json.dumps(asdict(card), indent=1).encode() + b"\n")


def note_source(folder: str, corpus: str, sources: Sequence[str], tokenizer: str) -> None:
    """Notes in the folder's card what a corpus was built from."""
    card = read_card(folder)
    names = tuple(name[:_MAX_TEXT] for name in sources[:_MOST_SOURCES])
    write_card(
        folder,
        replace(
            card, tokenizer=card.tokenizer or tokenizer, sources={**card.sources, corpus: names}
        ),
    )


def readme(card: Card, facts: Mapping[str, str], corpora: Mapping[str, int]) -> str:
    """The card as Markdown. facts: lines of its table; corpora: tokens by corpus."""
    head = {"pretty_name": "SSSD datastore", "tags": ["sglang-ext", "speculative-decoding"]}
    if card.licence:
        head = {"license": card.licence, **head}
    # JSON is YAML, and quotes whatever a card holds.
    front = "\n".join(f"{name}: {json.dumps(value)}" for name, value in head.items())
    rows = {"Tokenizer": card.tokenizer or "not noted", **facts}
    rows["Licence"] = card.licence or "not stated: ask whoever sent it before you share it"
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows.items())
    listed = [
        f"| {_cell(name)} | {tokens:,} | {_cell(', '.join(card.sources.get(name, ())) or '-')} |"
        for name, tokens in sorted(corpora.items())
    ]
    sources = "\n".join(["| corpus | tokens | sources |", "| --- | --- | --- |", *listed])
    parts = [
        f"---\n{front}\n---",
        "# Datastore for speculative decoding",
        card.description or "Texts as token ids, indexed for SSSD's drafts in SGLang.",
        f"| | |\n| --- | --- |\n{table}",
        sources,
        "Serve it with `sglang-ext serve --datastore ADDRESS`; a server with another tokenizer "
        "refuses it. `DATASTORE.json` says the same to programs, with a checksum of every block.",
        "Whoever can read these files can read the texts in them.",
    ]
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
