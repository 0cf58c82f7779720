"""The commands of `sglang-ext`, a file or a folder each; `serve` is in cli.py."""

from sglang_ext.commands import captions, datastore, drafter, models, ops, pd, sweep, transcribe

# In the order of the help.
ALL = (pd, transcribe, captions, sweep, models, datastore, drafter, ops)
# Functions of commands that hand flags that they do not know on to a server.
TAKE_SERVER_FLAGS = (pd.run, transcribe.run)
