"""The data-parallel training step, through jaxdist and as an expert would write it by hand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.flatten_util
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxdist
from benchmarks._loop import Loop
from benchmarks._models import Batch, Loss, Params, model, sgd

P = PartitionSpec
AXIS = "replica"

# Hand-written loops wait for a result this often, as they have to on CPU: JAX 0.10.2 aborts when
# more than some 32 steps with a collective are in flight.
STEPS_IN_FLIGHT = 16

Step = Callable[[Params, Batch], tuple[Params, jax.Array]]


def mesh(n: int) -> Mesh:
    """The mesh of hand-written programs: the first `n` devices."""
    return Mesh(jax.devices()[:n], (AXIS,), axis_types=(AxisType.Auto,))


def strategy(n: int) -> jaxdist.MirroredStrategy:
    """The strategy over the same devices."""
    return jaxdist.MirroredStrategy(jax.devices()[:n])


def per_replica(n: int, value: Any) -> Any:
    """`value`, a global array, as what a step of `n` replicas takes: split over them."""
    held = jax.device_put(value, NamedSharding(mesh(n), P(AXIS)))
    return jaxdist.PerReplica.of_global(held) if n > 1 else held


def api_step(loss_fn: Loss) -> Step:
    """The step as a user of jaxdist writes it."""

    def step(params: Params, batch: Batch) -> tuple[Params, jax.Array]:
        found = jax.value_and_grad(loss_fn)(params, batch)
        loss, grads = jaxdist.get_replica_context().all_reduce("mean", found)
        return sgd(params, grads), loss

    return step


DONATE = jaxdist.RunOptions(donate_argnums=(0,))


def hand_step(loss_fn: Loss, n: int, *, is_packed: bool = False) -> Any:
    """The same step by hand: `jit(shard_map)`, gradients kept local until the one `pmean`.

    If `is_packed`, all of them are one vector there, as `all_reduce` makes it on CPU devices.
    """

    def step(params: Params, batch: Batch) -> tuple[Params, jax.Array]:
        found = jax.value_and_grad(loss_fn)(params, batch)
        if is_packed:
            vector, unpack = jax.flatten_util.ravel_pytree(found)
            loss, grads = unpack(jax.lax.pmean(vector, AXIS))
        else:
            loss, grads = jax.lax.pmean(found, AXIS)
        return sgd(params, grads), loss

    return jax.jit(
        jax.shard_map(step, mesh=mesh(n), in_specs=(P(), P(AXIS)), out_specs=P(), check_vma=False),
        donate_argnums=0,
    )


def training_loop(call: Step, params: Params, batch: Batch, *, wait_every: int | None) -> Loop:
    """Carry the parameters through `call`, waiting every few steps and at the end."""
    held: dict[str, Any] = {"params": params, "loss": None}

    def run(steps: int) -> None:
        params = held["params"]
        loss = None
        for i in range(1, steps + 1):
            params, loss = call(params, batch)
            if wait_every and i % wait_every == 0:
                jax.block_until_ready(loss)
        held["params"], held["loss"] = params, loss
        jax.block_until_ready((params, loss))

    return Loop(run, facts=lambda: {"loss": float(held["loss"].ravel()[0])})


def api_training(name: str, n: int) -> Loop:
    """Training through `strategy.run`."""
    params, batch, loss_fn = model(name)
    chosen = strategy(n)
    step = api_step(loss_fn)
    params = jax.device_put(params, chosen.replicated_sharding)
    split = jax.tree.map(lambda x: per_replica(n, x), batch)

    def call(params: Params, batch: Batch) -> tuple[Params, jax.Array]:
        result: tuple[Params, jax.Array] = chosen.run(step, (params, batch), options=DONATE)
        return result

    # jaxdist keeps the steps in flight few by itself.
    return training_loop(call, params, split, wait_every=None)


def hand_training(name: str, n: int) -> Loop:
    """Training by hand with `jit(shard_map)`."""
    params, batch, loss_fn = model(name)
    params = jax.device_put(params, NamedSharding(mesh(n), P()))
    batch = jax.device_put(batch, NamedSharding(mesh(n), P(AXIS)))
    return training_loop(hand_step(loss_fn, n), params, batch, wait_every=STEPS_IN_FLIGHT)
