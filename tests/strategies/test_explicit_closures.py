"""Arrays on the user's mesh with Explicit axes that a step closes over."""

import contextlib
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist import PerReplica
from jaxdist.errors import ContextError
from tests.tables import sampled

W = np.arange(16, dtype=np.float32).reshape(4, 4) / 8
X = [np.full((2, 4), n + 1.0, np.float32) for n in range(2)]

USES: dict[str, Callable[[Any, Any], Any]] = {
    "a product": lambda w, x: x @ w,
    "the array on the left": lambda w, x: (w @ x.T).T,
    "an operator": lambda w, x: w * 2 + x[:1],
    "where": lambda w, x: jnp.where(w > 1, w, 0) + x[:1],
    "einsum": lambda w, x: jnp.einsum("ij,kj->ik", x, w),
    "a function of lax": lambda w, x: jax.lax.sin(w) + x[:1],
    "reshape": lambda w, x: w.reshape(2, 8)[:, :4] + x,
    "an index": lambda w, x: w[1:2] + x,
    "a traced index": lambda w, x: w[jnp.int32(x[0, 0])][None] + x,
    "concatenate": lambda w, x: jnp.concatenate([w, x]),
    "a loop": lambda w, x: jax.lax.fori_loop(0, 2, lambda i, y: jnp.tanh(y @ w), x),
    "a scan over it": lambda w, x: jax.lax.scan(lambda y, row: (y + row[None], None), x, w)[0],
    "jit": lambda w, x: jax.jit(lambda w, x: x @ w)(w, x),
    "in a jit": lambda w, x: jax.jit(lambda x: x @ w)(x),
    "checkpoint": lambda w, x: jax.checkpoint(lambda x: jnp.sin(x @ w))(x),
    "a gradient": lambda w, x: jax.grad(lambda x: jnp.sin(x @ w).sum())(x),
    "vmap": lambda w, x: jax.vmap(lambda row: w @ row)(x),
    "a sum over replicas": lambda w, x: jaxdist.get_replica_context().all_reduce("sum", x @ w),
    "alone": lambda w, x: w,
}
SPECS = (P(), P("data"), P("model"), P(None, "data"), P("data", "model"), P(("data", "model")))
TABLE = [*itertools.product(USES, SPECS, (False, True))]


def _name(row: tuple[str, P, bool]) -> str:
    return f"{row[0]}, {row[1]}, {'op by op' if row[2] else 'compiled'}"


@pytest.mark.parametrize("row", sampled(TABLE, 30, name=_name))
def test_an_array_on_the_users_mesh_is_whole_in_a_step_that_closes_over_it(row: Any) -> None:
    use, spec, eagerly = row
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    w = jax.device_put(W, NamedSharding(mesh, spec))
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))
    plain = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    whole = jnp.asarray(W)
    wanted = plain.run(lambda x: USES[use](whole, x), (PerReplica(X),))
    try:
        with jaxdist.config.run_eagerly(eagerly):
            found = strategy.run(lambda x: USES[use](w, x), (PerReplica(X),))
    except ContextError as error:
        # JAX itself looks at the type first.
        is_asked = eagerly or use in ("an index", "a scan over it")
        if not is_asked or not re.search(r"closes over w,(.|\n)*args=\(w, \.\.\.\)", str(error)):
            raise
        return
    results = zip(
        strategy.experimental_local_results(found),
        plain.experimental_local_results(wanted),
        strict=False,
    )
    for a, b in results:
        np.testing.assert_allclose(a, b, rtol=1e-6)


CALLS: dict[str, Callable[[jaxdist.Strategy, Any, Any], Any]] = {
    "run": lambda strategy, step, x: strategy.run(step, (x,)),
    "run in jit": lambda strategy, step, x: jax.jit(lambda x: strategy.run(step, (x,)))(x),
    "run in a function": lambda strategy, step, x: jaxdist.function(
        lambda x: strategy.run(step, (x,))
    )(x),
}


@pytest.mark.parametrize("is_set", [False, True], ids=["no mesh", "set_mesh"])
@pytest.mark.parametrize("is_global", [False, True], ids=["values", "one array"])
@pytest.mark.parametrize("call", CALLS)
def test_rows_enter_a_step_on_an_explicit_mesh_from_every_call(
    call: str, is_global: bool, is_set: bool
) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    w = jax.device_put(W, NamedSharding(mesh, P("data")))
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))
    rows = jax.device_put(np.concatenate(X), strategy.per_replica_sharding)
    x = PerReplica.of_global(rows) if is_global else PerReplica(X)

    def step(x: Any) -> Any:
        return jaxdist.get_replica_context().all_reduce("sum", x @ w)

    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        found = CALLS[call](strategy, step, x)
    np.testing.assert_allclose(found, sum(part @ W for part in X), rtol=1e-6)
