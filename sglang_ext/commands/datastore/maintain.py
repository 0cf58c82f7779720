"""`sglang-ext datastore merge` and `verify`."""

import os
from collections.abc import Sequence
from dataclasses import replace

from datastores import DatastoreError, merge_folders, verify_folder
from datastores.shipping import read_card, write_card
from sglang_ext.commands.datastore.build_progress import Waiting


def merge(target: str, folders: Sequence[str]) -> int:
    """Copies each folder into the target; returns the exit code."""
    seen = [os.path.realpath(target)]
    for folder in folders:
        if os.path.realpath(folder) in seen:
            raise DatastoreError(f"{folder} is named twice")
        seen.append(os.path.realpath(folder))
    for folder in folders:
        with Waiting(f"merging {folder}"):
            tokens = sum(merge_folders([folder], target).values())
        _merge_cards(target, folder)
        print(f"{folder}: {tokens:,} tokens copied into {target}")
    return 0


def _merge_cards(target: str, folder: str) -> None:
    mine, its = read_card(target), read_card(folder)
    tokenizer = mine.tokenizer or its.tokenizer
    write_card(target, replace(mine, tokenizer=tokenizer, sources={**its.sources, **mine.sources}))


def verify(folder: str) -> int:
    """Prints what is wrong; returns 1 if anything is."""
    with Waiting(f"checking {folder}"):
        problems = verify_folder(folder)
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{folder}: all is well")
    return 1 if problems else 0
