"""States of each kind, for checkpoints that several processes write and read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxdist
from jaxdist import partition
from jaxdist.training import Checkpoints

KINDS = ("replicated", "fsdp", "sharded_update", "variables")


class Net(nnx.Module):
    """Two layers, with dims that 2, 4 and 8 divide, and one that they do not."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.last = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """Return the outputs."""
        return self.last(nnx.relu(self.first(x)))


def _context() -> Any:
    context = jaxdist.get_replica_context()
    assert context is not None
    return context


def make_state(strategy: jaxdist.Strategy, kind: str) -> dict[str, Any]:
    """Make an untrained state."""
    with strategy.scope():
        if kind == "variables":
            how, sync = jaxdist.VariableAggregation, jaxdist.VariableSynchronization
            return {
                "mirrored": jaxdist.Variable(np.zeros(3, "float32"), aggregation=how.SUM),
                "sums": jaxdist.Variable(
                    np.zeros(3, "float32"), synchronization=sync.ON_READ, aggregation=how.SUM
                ),
                "means": jaxdist.Variable(
                    np.zeros(2, "float32"), synchronization=sync.ON_READ, aggregation=how.MEAN
                ),
            }
        model = Net(nnx.Rngs(0))
        if kind == "sharded_update":
            state = _SHARDED.init(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
            return {"w": nnx.to_pure_dict(nnx.state(model, nnx.Param)), "state": state}
    if kind == "fsdp":
        partition.place(strategy, model, partition.fsdp(min_bytes=0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    return {"model": model, "optimizer": optimizer, "key": jax.random.key(3)}


def _step_of_variables(state: Any, x: Any) -> None:
    share = 1 / _context().num_replicas_in_sync
    state["mirrored"].assign_add(jnp.full(3, share))
    state["sums"].assign_add(jnp.full(3, share))
    state["means"].assign_add(jnp.full(2, 2.0))


def _step_of_sharded_update(state: Any, x: Any) -> Any:
    def loss_of(w: Any) -> Any:
        y = jax.nn.relu(x @ w["first"]["kernel"] + w["first"]["bias"])
        return ((y @ w["last"]["kernel"] + w["last"]["bias"]) ** 2).mean()

    grads = jax.grad(loss_of)(state["w"])
    updates, new = _SHARDED.update(grads, state["state"], state["w"])
    return {"w": optax.apply_updates(state["w"], updates), "state": new}


def _step_of_nnx(state: Any, x: Any) -> None:
    grads = nnx.grad(lambda model: (model(x) ** 2).mean())(state["model"])
    state["optimizer"].update(state["model"], _context().all_reduce("mean", grads))


_SHARDED = jaxdist.sharded_update(optax.adam(1e-2))
_STEPS = {
    "replicated": _step_of_nnx,
    "fsdp": _step_of_nnx,
    "sharded_update": _step_of_sharded_update,
    "variables": _step_of_variables,
}


def train(strategy: jaxdist.Strategy, kind: str, state: dict[str, Any], steps: int) -> Any:
    """Train some steps, on batches that do not depend on the number of replicas."""
    rows = np.random.default_rng(0).normal(size=(steps, 8, 8)).astype("float32")
    for batch in rows:
        count = strategy.num_replicas_in_sync
        part = 8 // count
        values = strategy.experimental_distribute_values_from_function(
            lambda c, b=batch, p=part: b[c.replica_id_in_sync_group * p :][:p]
        )
        result = strategy.run(_STEPS[kind], (state, values))
        state = result if kind == "sharded_update" else state
    return state


def read(kind: str, state: dict[str, Any]) -> list[np.ndarray]:
    """Return the values of a state, whole, on the host. In a job all processes call it."""
    if kind == "variables":
        return [np.asarray(state[n].value()) for n in sorted(state)]
    if kind == "sharded_update":
        return [np.asarray(x) for x in jax.tree.leaves(state["w"])]
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state((state["model"], state["optimizer"]))))
    whole = [_to_whole(x) for x in leaves]
    return [*whole, np.asarray(jax.random.key_data(state["key"]))]


def _to_whole(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_replicated and not x.is_fully_addressable:
        everywhere = jax.sharding.NamedSharding(x.sharding.mesh, jax.P())
        x = jax.jit(lambda x: x, out_shardings=everywhere)(x)
    return np.asarray(x)


def save(strategy: jaxdist.Strategy, kind: str, folder: str) -> list[np.ndarray]:
    """Train three steps, save them in the background, and train two more."""
    state = train(strategy, kind, make_state(strategy, kind), 3)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(3, state, {"kind": kind})
        at_save = read(kind, state)
        train(strategy, kind, state, 2)
    return at_save


def restore(strategy: jaxdist.Strategy, kind: str, folder: str) -> Any:
    """Restore into an untrained state, and return the values, and those after two more steps."""
    state = make_state(strategy, kind)
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.restore(state)
        assert restored is not None
        assert (restored.step, restored.notes) == (3, {"kind": kind})
    values = read(kind, restored.state)
    return values, read(kind, train(strategy, kind, restored.state, 2))


def save_all(folder: str) -> dict[str, list[np.ndarray]]:
    """Save a state of each kind in this process of a job."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    return {kind: save(strategy, kind, f"{folder}/{kind}") for kind in KINDS}


def restore_all(folder: str) -> dict[str, Any]:
    """Restore a state of each kind in this process of a job."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    return {kind: restore(strategy, kind, f"{folder}/{kind}") for kind in KINDS}
