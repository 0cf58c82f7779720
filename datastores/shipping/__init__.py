"""Datastores that travel: copies of running ones, to and from any fsspec address, with a card."""

from .card import Card, note_source, read_card, write_card
from .pull import Pulled, pull
from .push import Pushed, push
from .snapshots import Copied, snapshot_folder

__all__ = [
    "Card",
    "Copied",
    "Pulled",
    "Pushed",
    "note_source",
    "pull",
    "push",
    "read_card",
    "snapshot_folder",
    "write_card",
]
