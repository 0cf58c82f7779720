"""`sglang-ext datastore build | add | info | merge | verify | delete | snapshot | push | ...`."""

from sglang_ext.commands.datastore.subcommands import add_commands

__all__ = ["add_commands"]
