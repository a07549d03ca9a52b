"""Valid calls of values, variables and what makes programs of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdist
from tests.bad_inputs.call import Call, entered, identity, in_replica, in_scope, strategy, variable


def _slices() -> jaxdist.IndexedSlices:
    return jaxdist.IndexedSlices(jnp.ones((1,)), jnp.array([1]), (3,))


def _whole() -> jax.Array:
    return jax.device_put(np.arange(4.0, dtype=np.float32), strategy().per_replica_sharding)


def _sharded() -> jaxdist.Sharded:
    return jaxdist.Sharded(_whole(), 0, 4)


def _assign(method: str) -> Call:
    return Call(lambda: getattr(variable(), method), lambda: {_VALUE[method]: jnp.ones(3)})


_VALUE = {"assign": "value", "assign_add": "delta", "assign_sub": "delta"}


def _scatter(method: str) -> Call:
    return Call(lambda: getattr(variable(), method), lambda: {"sparse_delta": _slices()})


def _params() -> dict[str, jax.Array]:
    return {"w": jnp.ones((4, 2))}


def _trains(tx: optax.GradientTransformation) -> None:
    """Use a transformation as a step does."""
    with strategy().scope():
        state = tx.init(_params())

    def step(state: Any) -> Any:
        return tx.update(_params(), state, _params())

    strategy().run(step, (state,))


def _updates_with(tx: optax.GradientTransformation, **given: Any) -> Any:
    with strategy().scope():
        arguments = {"updates": _params(), "state": tx.init(_params()), "params": _params()}

    def step(arguments: dict[str, Any]) -> Any:
        all_given = {**arguments, **given}
        first = [all_given.pop(name) for name in ("updates", "state", "params")]
        return tx.update(*first, **all_given)

    return strategy().run(step, (arguments,))


def _applied(**given: Any) -> Any:
    tx = jaxdist.sharded_update(optax.adam(0.1), min_bytes=0)
    with strategy().scope():
        arguments = {"grads": _params(), "state": tx.init(_params()), "params": _params()}
    return strategy().run(lambda a: tx.apply_gradients(**{**a, **given}), (arguments,))


def _grads(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.value_and_grad(lambda w, x: jnp.mean(w * x))(w, x)


def _sum(total: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return total + x.sum(), total


def _mesh_of_pairs() -> jaxdist.MirroredStrategy:
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices("cpu")[:4])
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))


def _schedule(name: str) -> Call:
    return Call(
        lambda: getattr(jaxdist.nn.schedules, name),
        lambda: {"stages": 2, "micro_batches": 4, "chunks": 1},
        use=str,
    )


def _constrained(**given: Any) -> Any:
    owner = _mesh_of_pairs()
    return owner.run(lambda _: jaxdist.partition.constrain(**given), (jnp.float32(1),))


def _rules() -> jaxdist.partition.Rules:
    return jaxdist.partition.Rules([("w", jaxdist.partition.Shard(dim=0))])


def _scatter_nd(method: str) -> Call:
    return Call(
        lambda: getattr(variable(), method),
        lambda: {"indices": jnp.array([[1]]), "updates": jnp.ones(1)},
    )


def _look_up(method: str, **given: Any) -> Call:
    return Call(lambda: getattr(variable(), method), lambda: dict(given))


CALLS = {
    "jaxdist.DistributedValues": Call(lambda: jaxdist.DistributedValues),
    "jaxdist.PerReplica": Call(
        lambda: jaxdist.PerReplica, lambda: {"values": [1.0, 2.0]}, use=repr
    ),
    "jaxdist.PerReplica.of_global": Call(
        lambda: jaxdist.PerReplica.of_global,
        lambda: {"array": _whole(), "scalars": False},
        use=lambda value: value.values,
    ),
    "jaxdist.Sharded": Call(
        lambda: jaxdist.Sharded, lambda: {"array": _whole(), "dim": 0, "size": 4}, use=repr
    ),
    "jaxdist.Sharded.whole": Call(lambda: _sharded().whole),
    "jaxdist.IndexedSlices": Call(
        lambda: jaxdist.IndexedSlices,
        lambda: {
            "values": jnp.ones((1, 2)),
            "indices": jnp.array([1]),
            "dense_shape": (3, 2),
        },
        use=lambda slices: slices.to_dense(),
    ),
    "jaxdist.IndexedSlices.to_dense": Call(lambda: _slices().to_dense),
    "jaxdist.Variable": Call(
        in_scope(jaxdist.Variable),
        lambda: {"initial_value": 1.0, "name": "v"},
        use=lambda v: v.read_value(),
    ),
    **{f"jaxdist.Variable.{m}": _assign(m) for m in ("assign", "assign_add", "assign_sub")},
    **{
        f"jaxdist.Variable.scatter_{m}": _scatter(f"scatter_{m}")
        for m in ("add", "div", "max", "min", "mul", "sub", "update")
    },
    **{
        f"jaxdist.Variable.{m}": Call(lambda m=m: getattr(variable(), m))
        for m in ("experimental_ref", "get_shape", "numpy", "read_value", "ref", "value")
    },
    **{
        f"jaxdist.Variable.scatter_nd_{m}": _scatter_nd(f"scatter_nd_{m}")
        for m in ("add", "max", "min", "sub", "update")
    },
    **{
        f"jaxdist.Variable.{m}": _look_up(m, **given)
        for m, given in {
            "__getitem__": {"index": 1},
            "gather_nd": {"indices": [[1]]},
            "is_initialized": {},
            "load": {"value": [1.0, 2.0, 3.0]},
            "set_shape": {"shape": (3,)},
            "sparse_read": {"indices": [1]},
        }.items()
    },
    **{
        f"jaxdist.Variable(...)[...].{method}": Call(
            lambda method=method: getattr(variable()[:2], method),
            lambda given=given: {} if given is None else {given: jnp.ones(2)},
        )
        for method, given in {
            "assign": "value",
            "assign_add": "delta",
            "assign_sub": "delta",
            "value": None,
        }.items()
    },
    "jaxdist.Variable(...)[...].__getitem__": Call(
        lambda: lambda **given: variable()[:2].__getitem__(**given), lambda: {"index": 1}
    ),
    "jaxdist.Variable.batch_scatter_update": Call(
        lambda: variable().batch_scatter_update,
        lambda: {"sparse_delta": jaxdist.IndexedSlices(jnp.ones(1), jnp.array([1]), (3,))},
    ),
    # Programs.
    "jaxdist.RunOptions": Call(
        lambda: jaxdist.RunOptions,
        use=lambda options: strategy().run(lambda x, n: x, (1.0, 2.0), options=options),
    ),
    "jaxdist.function": Call(
        lambda: jaxdist.function, lambda: {"func": identity}, use=lambda f: f(jnp.float32(1))
    ),
    "jaxdist.assume_replicated": Call(
        in_replica(jaxdist.assume_replicated), lambda: {"value": jnp.ones(2)}
    ),
    "jaxdist.Program.compile": Call(lambda: strategy().lower(identity, (1.0,)).compile),
    "jaxdist.Program.explain": Call(lambda: strategy().lower(identity, (1.0,)).explain),
    "jaxdist.explain": Call(
        lambda: jaxdist.explain,
        lambda: {"value": {"w": jnp.ones(2)}, "strategy": strategy()},
        use=str,
    ),
    "jaxdist.Program.compile_for": Call(
        lambda: strategy().lower(identity, (np.ones((8, 4), np.float32),)).compile_for,
        lambda: {"topology": "v5e:2x2", "global_batch": None, "quick": True},
    ),
    "jaxdist.config.processes": Call(
        lambda: jaxdist.config.processes,
        lambda: {
            "quiet_seconds": 60.0,
            "heartbeat_seconds": 10.0,
            "join_seconds": 300.0,
            "abort_seconds": None,
            "collective_seconds": 1800.0,
            "rpc_seconds": 60.0,
        },
    ),
    "jaxdist.config.run_eagerly": Call(
        lambda: jaxdist.config.run_eagerly, lambda: {"enabled": True}, use=entered
    ),
    "jaxdist.config.steps_run_eagerly": Call(lambda: jaxdist.config.steps_run_eagerly),
    "jaxdist.accumulate_gradients": Call(
        lambda: jaxdist.accumulate_gradients,
        lambda: {"grad_fn": _grads, "num_microbatches": 2},
        use=lambda f: f(jnp.float32(2), jnp.arange(8.0)),
    ),
    "jaxdist.multi_step": Call(
        lambda: jaxdist.multi_step,
        lambda: {"step_fn": _sum},
        use=lambda f: f(jnp.float32(0), [jnp.ones(2), jnp.ones(2)]),
    ),
    "jaxdist.sharded_update": Call(
        lambda: jaxdist.sharded_update,
        lambda: {"tx": optax.adam(0.1), "min_bytes": 0},
        use=_trains,
    ),
    "jaxdist.compressed_update": Call(
        lambda: jaxdist.compressed_update,
        lambda: {"tx": optax.sgd(0.1), "compression": "int8", "workers": 2},
        use=_trains,
    ),
    "jaxdist.sharded_update(...).init": Call(
        lambda: in_scope(jaxdist.sharded_update(optax.adam(0.1)).init)(),
        lambda: {"params": _params()},
    ),
    "jaxdist.compressed_update(...).init": Call(
        lambda: in_scope(jaxdist.compressed_update(optax.adam(0.1), workers=2).init)(),
        lambda: {"params": _params()},
    ),
    "jaxdist.sharded_update(...).update": Call(
        lambda: lambda **given: _updates_with(jaxdist.sharded_update(optax.adam(0.1)), **given)
    ),
    "jaxdist.compressed_update(...).update": Call(
        lambda: (
            lambda **given: _updates_with(
                jaxdist.compressed_update(optax.adam(0.1), workers=2), **given
            )
        )
    ),
    "jaxdist.sharded_update(...).apply_gradients": Call(
        lambda: _applied,
    ),
    "jaxdist.shard_state": Call(
        lambda: jaxdist.shard_state,
        lambda: {"state": optax.adam(0.1).init(_params()), "strategy": strategy(), "min_bytes": 0},
    ),
    # Losses and random streams.
    "jaxdist.nn.compute_average_loss": Call(
        in_replica(jaxdist.nn.compute_average_loss),
        lambda: {
            "per_example_loss": jnp.ones(2),
            "sample_weight": jnp.ones(2),
            "global_batch_size": 4,
        },
    ),
    "jaxdist.nn.scale_regularization_loss": Call(
        in_replica(jaxdist.nn.scale_regularization_loss),
        lambda: {"regularization_loss": jnp.float32(1)},
    ),
    "jaxdist.nn.example_keys": Call(
        in_replica(jaxdist.nn.example_keys),
        lambda: {"key": jax.random.key(0), "num_local_examples": 2},
    ),
    "jaxdist.nn.pipeline_loss": Call(
        lambda: jaxdist.nn.pipeline_loss,
        lambda: {
            "embed": lambda e, rows: rows[:, :1] * e[:1],
            "layer": lambda w, x, keys: x @ w,
            "head": lambda h, x, rows: jnp.mean(x @ h),
            "parts": (jnp.eye(2), jnp.ones((2, 2, 2)), jnp.ones((2, 1))),
            "batch": jnp.ones((4, 2)),
            "micro_batches": 2,
            "axis": "stage",
            "schedule": "1f1b",
            "chunks": 1,
            "key": jax.random.key(0),
            "reduce": "mean",
            "has_aux": False,
        },
    ),
    "jaxdist.nn.vocabulary_head": Call(
        lambda: jaxdist.nn.vocabulary_head,
        lambda: {"labels": lambda rows: rows, "weights": None, "norm": None},
    ),
    "jaxdist.nn.schedules.gpipe": _schedule("gpipe"),
    "jaxdist.nn.schedules.one_f_one_b": _schedule("one_f_one_b"),
    "jaxdist.nn.schedules.zero_bubble": _schedule("zero_bubble"),
    "jaxdist.nn.experts": Call(
        in_replica(jaxdist.nn.experts),
        lambda: {
            "expert": lambda w, rows: rows * w,
            "router": jnp.ones((3, 4)),
            "weights": jnp.ones((4, 1, 1)),
            "x": jnp.ones((2, 2, 3)),
            "top_k": 2,
        },
    ),
    # Long sequences.
    "jaxdist.nn.attention": Call(
        in_replica(jaxdist.nn.attention),
        lambda: dict.fromkeys("qkv", jnp.ones((2, 4, 2, 3))),
    ),
    "jaxdist.nn.split_positions": Call(
        in_replica(jaxdist.nn.split_positions), lambda: {"x": jnp.ones((2, 4))}
    ),
    "jaxdist.nn.positions": Call(in_replica(jaxdist.nn.positions), lambda: {"n": 4}),
    # Where parameters are.
    "jaxdist.partition.constrain": Call(
        lambda: _constrained,
        lambda: {"value": jnp.ones((2, 2)), "placement": jaxdist.partition.Split(1)},
    ),
    "jaxdist.partition.gather": Call(
        in_replica(jaxdist.partition.gather), lambda: {"tree": _params(), "dtype": None}
    ),
    "jaxdist.partition.remat_policy": Call(
        lambda: jaxdist.partition.remat_policy, lambda: {"primitive": jax.lax.sin_p}
    ),
    "jaxdist.partition.place": Call(
        lambda: jaxdist.partition.place,
        lambda: {"strategy": strategy(), "tree": _params(), "rules": _rules()},
    ),
    "jaxdist.partition.ByNames": Call(
        lambda: jaxdist.partition.ByNames, lambda: {"axes": {"embed": "model"}}
    ),
    "jaxdist.partition.Replicate": Call(lambda: jaxdist.partition.Replicate),
    "jaxdist.partition.Shard": Call(
        lambda: jaxdist.partition.Shard,
        use=lambda rule: jaxdist.partition.place(strategy(), _params(), [("w", rule)]),
    ),
    "jaxdist.partition.Split": Call(
        lambda: jaxdist.partition.Split,
        lambda: {"dim": 0},
        use=lambda rule: jaxdist.partition.place(_mesh_of_pairs(), _params(), [("w", rule)]),
    ),
    "jaxdist.partition.Stage": Call(
        lambda: jaxdist.partition.Stage,
        use=lambda rule: jaxdist.partition.place(strategy(), _params(), [("w", rule)]),
    ),
    "jaxdist.partition.Rules.on_stages": Call(
        lambda: _rules().on_stages,
        lambda: {"pattern": "w", "axis": "stage", "chunks": 1},
    ),
    "jaxdist.partition.fsdp": Call(
        lambda: jaxdist.partition.fsdp,
        use=lambda rules: jaxdist.partition.place(strategy(), _params(), rules),
    ),
    "jaxdist.partition.fsdp_tensor_parallel": Call(
        lambda: jaxdist.partition.fsdp_tensor_parallel,
        use=lambda rules: jaxdist.partition.place(
            strategy(), {"up": {"kernel": jnp.ones((4, 2))}}, rules
        ),
    ),
    "jaxdist.partition.replicated": Call(lambda: jaxdist.partition.replicated),
    "jaxdist.partition.tensor_parallel": Call(lambda: jaxdist.partition.tensor_parallel),
    "jaxdist.partition.Rules": Call(
        lambda: jaxdist.partition.Rules,
        lambda: {"rules": [("w", jaxdist.partition.Shard(dim=0))]},
        use=lambda rules: jaxdist.partition.place(strategy(), _params(), rules),
    ),
    "jaxdist.partition.Rules.constrain": Call(
        lambda: (
            jaxdist.partition.Rules(
                [], activations={"hidden": jaxdist.partition.Replicate()}
            ).constrain
        ),
        lambda: {"value": jnp.ones((2, 2)), "name": "hidden"},
    ),
    "jaxdist.partition.Rules.placement_of": Call(
        lambda: _rules().placement_of, lambda: {"path": "w"}
    ),
    "jaxdist.function(...).__call__": Call(
        lambda: lambda: jaxdist.function(identity)(jnp.float32(1))
    ),
    "jaxdist.function(...).experimental_get_tracing_count": Call(
        lambda: jaxdist.function(identity).experimental_get_tracing_count
    ),
    "jaxdist.PerReplica.__getitem__": Call(lambda: lambda: jaxdist.PerReplica([1, 2])),
    "jaxdist.Sharded.__getitem__": Call(lambda: lambda: _sharded()[0:1]),
}
