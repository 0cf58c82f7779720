"""`sglang-ext sweep`: throughput against latency, of our methods beside their peers.

commands/sweep.py -> plan.py, workloads.py, methods.py
           -> runner.py: servers.py (the servers), load.py (the load generator),
              quality.py (what outputs are worth), results.py
           -> report.py: summary.py, result_tables.py, plots.py
"""
