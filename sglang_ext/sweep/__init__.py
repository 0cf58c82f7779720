"""`sglang-ext sweep`: throughput against latency, of our methods beside their peers.

command.py -> plan.py, workloads.py, methods.py
           -> runner.py: servers.py (the servers), load.py (the load generator),
              quality.py (what outputs are worth), results.py
           -> report.py: summary.py, tables.py, plots.py
"""

from sglang_ext.commands.sweep import add_commands

__all__ = ["add_commands"]
