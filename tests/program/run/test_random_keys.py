"""Steps that take and return typed random keys, on the C++ call path."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import partition
from tests.program.run.files_of_calls import files_of_calls


def _draw(key: Any, x: Any) -> Any:
    own = jax.random.fold_in(key, jaxdist.get_replica_context().replica_id_in_sync_group)
    later = {"x": x + jax.random.uniform(key, (2,)), "key": jax.random.fold_in(key, 1)}
    return later, own, None


def _again(key: Any) -> Any:
    return jax.random.fold_in(key, 3)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_keys_of_a_loop_are_those_of_plain_jax_at_every_call(count: int) -> None:
    strategy = jaxdist.MirroredStrategy([f"cpu:{n}" for n in range(count)])
    later = {"x": jnp.zeros(2), "key": jax.random.key(0)}
    expected, key = np.zeros(2, "float32"), jax.random.key(0)
    for _ in range(5):
        with files_of_calls() as files:
            later, own, _ = strategy.run(_draw, (later["key"], later["x"]))
        again = strategy.experimental_local_results(strategy.run(_again, (own,)))
        expected = expected + jax.random.uniform(key, (2,))
        for n, found in enumerate(again):
            wanted = jax.random.fold_in(jax.random.fold_in(key, n), 3)
            np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(wanted))
        key = jax.random.fold_in(key, 1)
        np.testing.assert_array_equal(jax.random.key_data(later["key"]), jax.random.key_data(key))
        np.testing.assert_allclose(later["x"], expected, rtol=1e-6)
    assert not [name for name in files if name.endswith(("run/step.py", "stages.py"))]


def _step_with_pieces(w: Any, key: Any) -> Any:
    return {"w": jax.tree.map(lambda x: x + 1, w), "key": jax.random.fold_in(key, 1)}


def test_padded_pieces_beside_a_key_keep_all_their_elements_at_every_call() -> None:
    strategy = jaxdist.MirroredStrategy([f"cpu:{n}" for n in range(3)])
    rules = partition.Rules({"w": partition.Shard(0, pad=True)})
    # Three replicas do not divide ten elements, so the pieces are padded.
    held = partition.place(strategy, {"w": np.arange(10, dtype="float32")}, rules)
    later = {"w": held["w"], "key": jax.random.key(0)}
    for turn in range(1, 5):
        later = strategy.run(_step_with_pieces, (later["w"], later["key"]))
        np.testing.assert_array_equal(np.asarray(later["w"]), np.arange(10) + turn)
