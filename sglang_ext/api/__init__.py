"""HTTP routes that SGLang does not have, and their way to the scheduler's datastore.

HTTP server process                          scheduler process (tensor-parallel rank 0)
routes.py, corpora.py -> control_client.py  == Unix socket ==>  control.py -> Datastore
"""
