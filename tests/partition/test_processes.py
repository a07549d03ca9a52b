"""Rules of partition in several processes."""

import numpy as np
import pytest

from jaxdist.testing import launch


def _place_two_modules() -> list[np.ndarray]:
    import jax
    from flax import nnx

    import jaxdist
    from jaxdist import partition

    strategy = jaxdist.MultiWorkerMirroredStrategy()
    # Other weights in each process, as without a seed.
    rngs = nnx.Rngs(jax.process_index())
    modules = (nnx.Linear(2, 3, rngs=rngs), nnx.Linear(2, 3, rngs=rngs))
    partition.place(strategy, modules, partition.replicated())
    return [np.asarray(m.kernel.get_raw_value().addressable_data(0)) for m in modules]


@pytest.mark.slow
def test_modules_with_equal_paths_each_get_their_own_values_of_process_0() -> None:
    first, second = launch(_place_two_modules, 2, timeout_seconds=200)
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first[0], first[1])
