"""`serve --datastore ADDRESS`: the datastore there, in the user's cache, for a server to use.

Layout: CACHE/datastores/NAME-HASH/ for an address, in it a folder for each datastore that was seen
there, and LAST, which names the newest. A server writes to its folder; another datastore at the
address gets another folder, so that nothing that was learned is lost.
"""

import hashlib
import os
import re
import sys
from pathlib import Path

from filelock import FileLock
from tqdm import tqdm

from datastores import DatastoreError
from datastores.files import replace_file
from datastores.manifest import check_same_tokenizer, read_manifest
from datastores.shipping.pull import find_shipment, pull, pulled_identity
from datastores.shipping.remote import RemoteFolder, full_address, is_address, shown_address
from sglang_ext.models import default_cache_dir
from sglang_ext.models.tokenizers import fingerprint

__all__ = ["is_address", "local_datastore"]

_LAST = "LAST"
_FOLDER_NAME = re.compile(r"[0-9a-f]{16}", re.ASCII)


def local_datastore(address: str, tokenizer_path: str) -> str:
    """The folder of the cache that holds the datastore at an address, fetched if it does not yet.

    Where the address cannot be asked, the one that came from there last, and a line that says so.
    Several servers may ask at once. tokenizer_path: the served model's.
    Raises DatastoreError, in one line: it cannot be had, or is another tokenizer's.
    """
    from transformers import AutoTokenizer

    mine = fingerprint(AutoTokenizer.from_pretrained(tokenizer_path))
    base = cache_folder(address)
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    with FileLock(base / ".lock"):
        try:
            remote = RemoteFolder(address)
            shipment = find_shipment(remote)
        except DatastoreError as error:
            folder = _last(base)
            if folder is None:
                raise
            manifest = read_manifest(str(folder))
            assert manifest is not None
            check_same_tokenizer(str(folder), manifest, None, mine)
            print(f"{error}; serving what came from there last: {folder}", file=sys.stderr)
            return str(folder)
        check_same_tokenizer(remote.shown, shipment.manifest, None, mine)
        folder = base / shipment.identity[:16]
        if pulled_identity(str(folder)) != shipment.identity:
            with tqdm(
                desc=f"fetching {remote.shown}", unit="B", unit_scale=True, disable=None
            ) as bar:

                def report(done: int, total: int) -> None:
                    bar.total = total
                    bar.update(done - bar.n)

                pull(address, folder, tokenizer_fingerprint=mine, report=report)
        with replace_file(str(base / _LAST)) as file:
            file.write(folder.name.encode())
    return str(folder)


def cache_folder(address: str) -> Path:
    """Where the datastores of an address lie."""
    full = full_address(address)
    name = re.sub(r"[^A-Za-z0-9]+", "-", shown_address(full).partition("://")[2]).strip("-")[-40:]
    digest = hashlib.sha256(full.encode()).hexdigest()[:12]
    return default_cache_dir().absolute() / "datastores" / f"{name or 'datastore'}-{digest}"


def _last(base: Path) -> Path | None:
    try:
        name = (base / _LAST).read_text()
    except OSError:
        return None
    folder = base / name
    known = _FOLDER_NAME.fullmatch(name) and os.path.isdir(folder)
    return folder if known and pulled_identity(str(folder)) else None
