"""Prefill and decode on servers of their own: our workers there, and `sglang-ext pd`.

arrivals.py and handoff.py: a decode server's requests, before and when their KV is there;
on_cpu.py: without a GPU; transfer.py: whether KV can be moved here; mini_router.py: what SGLang's
mini load balancer leaves out; cluster.py: all servers and the router, for commands/pd.py.
"""
