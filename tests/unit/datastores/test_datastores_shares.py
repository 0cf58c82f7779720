"""No namespace pushes out of memory what others have less of."""

import numpy as np

from datastores import Datastore


def test_a_namespace_that_fills_the_datastore_pushes_out_its_own():
    rng = np.random.default_rng(0)
    with Datastore(vocab_size=1000, max_tokens=20_000) as store:
        store.add(rng.integers(0, 1000, 500), namespace="small", name="s")
        store.flush(60)
        for number in range(120):
            store.add(rng.integers(0, 1000, 500), namespace="greedy", name=str(number))
            store.flush(60)
        held = store.namespaces()
        assert held["small"] == 500
        assert 5_000 < held["greedy"] <= 19_500
        for number in range(120):  # who comes later gets as much as there is for each
            store.add(rng.integers(0, 1000, 500), namespace="late", name=str(number))
            store.flush(60)
        held = store.namespaces()
        assert held["small"] == 500 and sum(held.values()) <= 20_000
        assert min(held["late"], held["greedy"]) > 4_000, held
