"""`sglang-ext drafter distill | train | eval | show | list`."""

from sglang_ext.commands.drafter.drafter_subcommands import add_commands

__all__ = ["add_commands"]
