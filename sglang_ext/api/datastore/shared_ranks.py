"""Data-parallel ranks, each a scheduler of its own, share one datastore."""

import os

from datastores import MEMORY_TOKENS
from sglang_ext.api.datastore import protocol
from sglang_ext.options import Options, env_name


def share_among_ranks(dp_size: int) -> None:
    """Have the schedulers to come use one folder, each taking in what it serves.

    Without `--datastore` that is one beside the control sockets, which the next server's start
    removes (protocol.make_folder), and which holds no more than a datastore in memory.
    """
    if dp_size < 2:
        return
    options = Options.from_env()
    os.environ[env_name("datastore_shared")] = "1"
    if options.datastore:
        return
    os.environ[env_name("datastore")] = str(protocol.folder() / "datastore")
    if not options.datastore_max_tokens:
        os.environ[env_name("datastore_max_tokens")] = str(MEMORY_TOKENS)
