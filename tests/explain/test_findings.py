"""What `explain` recommends, and its numbers against what the remedy does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxdist
from jaxdist import partition


def only(report: Any, kind: str) -> Any:
    """The one finding of a report, which shows it."""
    [found] = [f for f in report.findings if f.kind == kind]
    assert found.what in str(report)
    assert found.remedy in str(report)
    return found


def of_step(strategy: jaxdist.Strategy, step: object, *args: object, **more: object) -> Any:
    report = jaxdist.explain(strategy.lower(step, args, **more))  # pyrefly: ignore
    assert type(report).__name__ == "ProgramReport"
    return report


# Arrays


def test_a_replicated_parameter_among_cut_ones_is_found_with_what_a_rule_leaves() -> None:
    strategy = jaxdist.MirroredStrategy()
    model = nnx.Sequential(
        nnx.Linear(512, 1024, use_bias=False, rngs=nnx.Rngs(0)),
        nnx.Linear(1024, 512, use_bias=False, rngs=nnx.Rngs(0)),
    )
    rules = [("layers/0/*", partition.Shard(0)), ("layers/1/*", partition.Replicate())]
    partition.place(strategy, model, rules)
    report = jaxdist.explain(model, strategy)
    found = only(report, "replicated")
    assert found.what.startswith("layers/1/kernel, float32[1024, 512], is whole on each of 8")
    partition.place(strategy, model, [("*", partition.Shard(0))])
    after = jaxdist.explain(model, strategy)
    one = jax.devices()[0]
    assert report.bytes_on(one) - after.bytes_on(one) == found.num_bytes
    assert "leaves 256 KiB on each device" in found.remedy
    assert after.findings == ()


def test_whole_optimizer_state_is_found_with_what_sharded_update_keeps() -> None:
    strategy = jaxdist.MirroredStrategy()
    params = {"w": jax.device_put(jnp.ones((512, 1024)), strategy.replicated_sharding)}
    with strategy.scope():
        whole = strategy.run(optax.adam(0.1).init, (params,))
        cut = strategy.run(jaxdist.sharded_update(optax.adam(0.1)).init, (params,))
    before, after = jaxdist.explain(whole, strategy), jaxdist.explain(cut, strategy)
    found = only(before, "replicated")
    one = jax.devices()[0]
    assert abs(before.bytes_on(one) - after.bytes_on(one) - found.num_bytes) < 64
    assert after.findings == ()


def test_an_array_of_the_host_is_found_with_what_each_call_copies() -> None:
    strategy = jaxdist.MirroredStrategy()
    images = np.ones((1024, 512), np.float32)
    found = only(jaxdist.explain({"images": images}, strategy), "host")
    # `run` copies it to each device.
    taken = strategy.run(lambda x: x, (images,))
    assert found.num_bytes == sum(s.data.nbytes for s in taken.addressable_shards)
    assert "128 rows, 256 KiB for each replica" in found.remedy
    # Values of replicas go to one device each.
    apart = jaxdist.PerReplica(list(images.reshape(8, 128, 512)))
    report = jaxdist.explain(apart, strategy)
    assert report.host_bytes == images.nbytes
    assert jaxdist.explain({"images": images}).findings == ()


def test_an_array_on_other_devices_is_found_with_what_each_call_moves() -> None:
    strategy = jaxdist.MirroredStrategy()
    x = jax.device_put(jnp.ones((1024, 512)), SingleDeviceSharding(jax.devices()[3]))
    found = only(jaxdist.explain(x, strategy), "resharding")
    assert found.num_bytes == 7 * x.nbytes
    assert f"Place it once, {x.nbytes >> 20} MiB on each device" in found.remedy
    placed = jax.device_put(x, strategy.replicated_sharding)
    assert jaxdist.explain(placed, strategy).findings == ()
    # A device that has a piece already needs the others.
    mesh = jax.make_mesh((8,), ("other",))
    cut = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "other")))
    assert only(jaxdist.explain(cut, strategy), "resharding").num_bytes == 7 * x.nbytes


# Programs


def test_a_batch_that_every_replica_gets_whole_is_found() -> None:
    strategy = jaxdist.MirroredStrategy()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jnp.mean(x)

    batch = jnp.ones((1024, 512))
    before = of_step(strategy, step, jnp.float32(0), batch)
    found = only(before, "replicated")
    assert "args[1], float32[1024, 512], is whole on each of 8 replicas" in found.what
    rows = jaxdist.PerReplica.of_global(jax.device_put(batch, strategy.per_replica_sharding))
    after = of_step(strategy, step, jnp.float32(0), rows)
    assert after.findings == ()
    assert before.memory.arguments - after.memory.arguments == found.num_bytes


def test_state_that_is_not_donated_is_found_with_the_positions() -> None:
    strategy = jaxdist.MirroredStrategy()
    params = jax.device_put({"w": jnp.ones((1024, 512))}, strategy.replicated_sharding)

    def step(scale: jax.Array, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return jax.tree.map(lambda x: x * scale, params)

    before = of_step(strategy, step, jnp.float32(1), params)
    found = only(before, "kept state")
    assert "donate_argnums=(1,)" in found.remedy
    options = jaxdist.RunOptions(donate_argnums=(1,))
    after = of_step(strategy, step, jnp.float32(1), params, options=options)
    assert after.findings == ()
    assert before.memory.total - after.memory.total == found.num_bytes


def test_a_gather_of_the_same_array_in_a_loop_is_found_with_what_it_repeats() -> None:
    strategy = jaxdist.MirroredStrategy()
    params = partition.place(strategy, {"w": jnp.ones((64, 64))}, partition.fsdp(min_bytes=0))

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda y: jnp.tanh(y @ jnp.asarray(params["w"])))
        return layer(layer(x)).sum()

    def grad(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        return jax.grad(loss)(params, x)

    x = jaxdist.PerReplica([jnp.ones((8, 64))] * 8)
    report = of_step(strategy, jaxdist.accumulate_gradients(grad, 4), params, x)
    found = only(report, "gather in a loop")
    rows = [r for r in report.communication.compiled if r.kind == "all-gather" and r.in_loop]
    assert {(row.times, row.num_bytes) for row in rows} == {(4, 64 * 64 * 4)}
    # Versions of JAX recompute one or both layers in the backward pass.
    assert found.num_bytes == sum(3 * row.num_bytes * row.count for row in rows)
    assert "4 times, 16 KiB each" in found.what
    assert "test_findings.py" in found.what


def test_a_layout_that_xla_changes_in_a_step_is_found_with_what_a_device_sends() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))
    w = jax.device_put(jnp.ones((1024, 512)), NamedSharding(mesh, PartitionSpec("model", None)))
    options = jaxdist.RunOptions(donate_argnums=(0,))

    def step(w: jax.Array) -> jax.Array:
        return partition.constrain(w * 2, partition.Split(1))

    report = of_step(strategy, step, w, options=options)
    rows = report.communication.compiled
    # To the layout that the step asks for, and back to that of the state.
    assert [(r.kind, r.added, r.num_bytes) for r in rows] == [
        ("all-to-all", True, w.nbytes // 2)
    ] * 2
    # Each of two logical devices sends the half of its half that the other one needs.
    assert [f.num_bytes for f in report.findings] == [w.nbytes // 4] * 2
    kept = of_step(strategy, lambda w: partition.constrain(w * 2, 0), w, options=options)
    assert kept.findings == ()


def test_parameters_that_a_step_only_reads_are_no_batch() -> None:
    strategy = jaxdist.MirroredStrategy()
    params = jax.device_put(
        {"w": jnp.ones((1024, 512)), "b": jnp.ones(512)}, strategy.replicated_sharding
    )
    x = jaxdist.PerReplica([jnp.ones((2, 1024))] * 8)
    report = of_step(strategy, lambda p, x: x @ p["w"] + p["b"][None], params, x)
    assert report.findings == ()


@pytest.mark.parametrize("rows", [1, 7])
def test_small_values_are_no_findings(rows: int) -> None:
    strategy = jaxdist.MirroredStrategy()
    value = {"a": np.ones((rows, 4), np.float32), "b": jnp.ones((rows, 4))}
    assert jaxdist.explain(value, strategy).findings == ()
    report = of_step(strategy, lambda x: jax.tree.map(jnp.sin, x), value)
    assert report.findings == ()


def test_a_random_key_is_an_argument_of_its_own_bytes() -> None:
    strategy = jaxdist.MirroredStrategy()
    report = of_step(strategy, lambda key: jax.random.uniform(key, (2,)), jax.random.key(0))
    assert report.memory.arguments == report.arguments[0].leaf.device_bytes == 8
