"""`place`: models, optimizers and abstract shapes get the layout of their rules."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core.meta import Partitioned
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

import jaxdist
from jaxdist import Sharded, partition
from jaxdist.training import Checkpoints
from tests.partition.test_rules import grid
from tests.partition.transformer import Transformer, batches, filled, train_step


def made(tx: Any = None) -> tuple[Transformer, Any]:
    model = filled(lambda: Transformer(nnx.Rngs(0), 1))
    return model, nnx.Optimizer(model, tx or optax.adam(1e-2), wrt=nnx.Param)


def raw(node: Any) -> dict[str, Any]:
    """Raw values by path."""
    return {
        "/".join(map(str, path)): v.get_raw_value()
        for path, v in nnx.iter_graph(node)
        if isinstance(v, nnx.Variable)
    }


def bytes_on(device: Any, node: Any) -> int:
    arrays = [getattr(v, "held", v) for v in raw(node).values()]
    return sum(
        s.data.nbytes for a in arrays if a.ndim for s in a.addressable_shards if s.device == device
    )


def test_model_and_optimizer_are_changed_in_place_and_state_follows_its_parameter() -> None:
    strategy = grid(4, 2)
    model, optimizer = made()
    kernel = model.layers[0].mlp.up.kernel
    same = partition.place(
        strategy, (model, optimizer), partition.fsdp_tensor_parallel(min_bytes=0)
    )
    assert same[0] is model
    assert same[1] is optimizer
    assert model.layers[0].mlp.up.kernel is kernel
    params, state = raw(model), raw(optimizer)
    for path, value in params.items():
        for moment in ("mu", "nu"):
            held = state[f"opt_state/0/{moment}/{path}"]
            assert type(held) is type(value), path
            assert getattr(held, "cut", None) == getattr(value, "cut", None)
            one, other = (getattr(x, "held", x) for x in (value, held))
            assert other.sharding == one.sharding, path
    assert state["opt_state/0/count"].sharding == strategy.replicated_sharding
    up = params["layers/0/mlp/up/kernel"]
    assert (up.dim, up.split, up.held.sharding.spec) == (0, 1, PartitionSpec("replica", "logical"))


def test_each_device_holds_one_part_in_r_of_parameters_and_optimizer_state() -> None:
    strategy = grid(8, 1)
    model, optimizer = made()
    partition.place(strategy, (model, optimizer), partition.replicated())
    whole = [bytes_on(d, (model, optimizer)) for d in jax.devices()]
    partition.place(strategy, (model, optimizer), partition.fsdp(min_bytes=0))
    in_pieces = [bytes_on(d, (model, optimizer)) for d in jax.devices()]
    assert in_pieces == [w // 8 for w in whole]


def test_placing_again_moves_and_keeps_the_values() -> None:
    model, _ = made()
    before = {k: np.asarray(v) for k, v in raw(model).items()}
    for strategy, rules in (
        (grid(8, 1), partition.fsdp(min_bytes=0)),
        (grid(2, 4), partition.tensor_parallel()),
        (jaxdist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]), partition.fsdp(min_bytes=0)),
        (grid(1, 1), partition.fsdp(min_bytes=0)),
    ):
        partition.place(strategy, model, rules)
        for path, value in raw(model).items():
            whole = value.whole() if isinstance(value, Sharded) else value
            np.testing.assert_array_equal(whole, before[path])
    assert not any(isinstance(v, Sharded) for v in raw(model).values())


def test_pytrees_and_train_states_are_put_together_again() -> None:
    strategy = grid(4, 1)
    params = {"up": {"kernel": jnp.ones((4, 12)), "bias": jnp.ones(12)}, "name": "net"}
    arrays = {"up": params["up"]}
    tx = optax.chain(optax.scale_by_adam(), optax.scale(-1.0))
    rules = partition.Rules({"kernel": partition.Shard(), "bias": partition.Replicate()})
    both: Any = partition.place(strategy, (params, tx.init(arrays)), rules)
    placed, state = both
    assert placed["name"] == "net"
    assert state[0].mu["up"]["kernel"].cut == placed["up"]["kernel"].cut
    assert state[0].nu["up"]["bias"].is_fully_replicated
    train_state = TrainState.create(apply_fn=lambda x: x, params=arrays, tx=tx)
    moved: Any = partition.place(strategy, train_state, rules)
    assert moved.params["up"]["kernel"].cut == moved.opt_state[0].mu["up"]["kernel"].cut
    assert moved.opt_state[0].count.is_fully_replicated


def test_state_of_other_shapes_than_the_parameters_is_replicated() -> None:
    strategy = grid(4, 1)
    model, optimizer = made(optax.adafactor(1e-2, min_dim_size_to_factor=4))
    partition.place(strategy, (model, optimizer), partition.fsdp(min_bytes=0))
    rows = [v for k, v in raw(optimizer).items() if "v_row" in k and "kernel" in k]
    assert rows
    assert all(not isinstance(v, Sharded) and v.is_fully_replicated for v in rows)


@pytest.mark.parametrize("is_placed_first", [False, True], ids=["state_first", "placed_first"])
def test_state_that_belongs_to_no_parameter_is_updated_in_nnx_too(is_placed_first: bool) -> None:
    strategy = grid(2, 1)
    tx = jaxdist.sharded_update(optax.contrib.muon(1e-2, ns_steps=1), min_bytes=0)
    net = filled(lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    whole = filled(lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    if is_placed_first:
        partition.place(strategy, net, partition.fsdp(min_bytes=0))
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
    if not is_placed_first:
        partition.place(strategy, (net, optimizer), partition.fsdp(min_bytes=0))
    [name] = [k for k in raw(optimizer) if "ns_coeffs" in k]
    assert isinstance(raw(optimizer)[name], Sharded) is is_placed_first
    of_whole = nnx.Optimizer(whole, optax.contrib.muon(1e-2, ns_steps=1), wrt=nnx.Param)

    def step(net: Any, optimizer: Any, x: jax.Array) -> None:
        grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(net)
        optimizer.update(net, jaxdist.get_replica_context().all_reduce("mean", grads))

    x = np.eye(8, dtype="float32")
    for _ in range(2):
        strategy.run(step, (net, optimizer, jax.device_put(x, strategy.per_replica_sharding)))
        jaxdist.OneDeviceStrategy("cpu:0").run(step, (whole, of_whole, x))
    for path, value in raw(whole).items():
        np.testing.assert_allclose(raw(net)[path].whole(), value, rtol=1e-4, atol=1e-6)


def test_state_that_is_gathered_in_every_step_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    strategy = grid(2, 1)
    tx = jaxdist.sharded_update(optax.sgd(0.1, momentum=0.9), min_bytes=0)

    def step(net: Any, optimizer: Any, x: jax.Array) -> None:
        optimizer.update(net, nnx.grad(lambda m: jnp.mean(m(x) ** 2))(net))

    x = jax.device_put(np.eye(8, dtype="float32"), strategy.per_replica_sharding)
    told = []
    for is_in_scope in (True, False):
        net = filled(lambda: nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0)))
        with strategy.scope() if is_in_scope else contextlib.nullcontext():
            optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
        caplog.clear()
        strategy.run(step, (net, optimizer, x))
        told.append([r.getMessage() for r in caplog.records if "came in whole" in r.getMessage()])
        kept = [v for k, v in raw(optimizer).items() if "trace" in k]
        assert [isinstance(v, Sharded) for v in kept] == [is_in_scope]
    assert told[0] == []
    assert len(told[1]) == 1
    assert "128 bytes: opt_state/0/trace/kernel" in told[1][0]


@pytest.mark.parametrize("placed", [0, 1], ids=["model", "optimizer"])
def test_model_that_is_placed_without_its_optimizer_is_told(placed: int) -> None:
    def step(net: Any, optimizer: Any, x: jax.Array) -> None:
        grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(net)
        optimizer.update(net, jaxdist.get_replica_context().all_reduce("mean", grads))

    strategy = grid(2, 1)
    net = filled(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    both = (net, nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param))
    partition.place(strategy, both[placed], partition.fsdp(min_bytes=0))
    with pytest.raises(jaxdist.errors.ReplicaValueError, match=r"\(model, optimizer\), rules"):
        strategy.run(step, (*both, np.ones((2, 4), "float32")))


def test_state_without_its_module_is_placed_as_the_module() -> None:
    strategy = grid(2, 1)
    model = nnx.Dict(up=nnx.Linear(4, 8, rngs=nnx.Rngs(0)), norm=nnx.BatchNorm(8, rngs=nnx.Rngs(0)))
    params = nnx.state(model, nnx.Param)
    before: Any = (nnx.state(model), optax.adam(0.1).init(params))
    rules = partition.Rules({"up/kernel": partition.Shard(0)}, partition.Shard())
    state, of_optimizer = partition.place(strategy, before, rules)
    assert before[0]["up"]["kernel"].get_raw_value().shape == (4, 8)
    for tree in (state, of_optimizer[0].mu):
        assert type(tree["up"]["kernel"]) is nnx.Param
        assert tree["up"]["kernel"].get_raw_value().dim == 0
        assert isinstance(tree["norm"]["scale"].get_raw_value(), Sharded)
    assert state["norm"]["mean"].get_raw_value().sharding == strategy.replicated_sharding


def test_boxes_of_linen_keep_their_names_and_are_placed_by_them() -> None:
    def boxed(*names: str) -> Any:
        return Partitioned(jnp.ones((8, 4)), names=names)

    params = {"up": {"kernel": boxed("embed", "mlp")}, "down": {"kernel": boxed("mlp", "out")}}
    rules = partition.Rules(
        {"*/kernel": partition.ByNames({"embed": "replica", "mlp": "logical", "out": None})}
    )
    both: Any = (params, optax.adam(0.1).init(params))
    placed, state = partition.place(grid(2, 2), both, rules)
    for tree in (placed, state[0].mu):
        up, down = tree["up"]["kernel"], tree["down"]["kernel"]
        assert (up.names, down.names) == (("embed", "mlp"), ("mlp", "out"))
        assert (up.value.dim, up.value.split) == (0, 1)
        assert down.value.sharding.spec == PartitionSpec("logical")


def test_what_is_no_parameter_is_replicated() -> None:
    model = nnx.Sequential(nnx.BatchNorm(8, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    partition.place(grid(4, 1), model, partition.fsdp(min_bytes=0))
    found = {k: isinstance(v, Sharded) for k, v in raw(model).items()}
    assert {k for k, is_cut in found.items() if is_cut} == {"layers/0/bias", "layers/0/scale"}


def test_abstract_model_gets_layouts_and_a_program() -> None:
    strategy = grid(4, 2)
    model, optimizer = nnx.eval_shape(made)
    rules = partition.fsdp_tensor_parallel(min_bytes=0)
    partition.place(strategy, (model, optimizer), rules)
    real, its_optimizer = partition.place(strategy, made(), rules)
    for abstract, concrete in zip(raw(model).values(), raw(real).values(), strict=True):
        a, c = getattr(abstract, "held", abstract), getattr(concrete, "held", concrete)
        assert isinstance(a, jax.ShapeDtypeStruct)
        assert (a.shape, a.sharding, getattr(abstract, "cut", None)) == (
            c.shape,
            c.sharding,
            getattr(concrete, "cut", None),
        )
    batch = jax.device_put(batches(1)[0], strategy.per_replica_sharding)
    planned = strategy.lower(train_step, (model, optimizer, batch))
    assert planned.inputs == strategy.lower(train_step, (real, its_optimizer, batch)).inputs


def test_arrays_cannot_lie_on_described_devices_nor_pieces_on_virtual_replicas() -> None:
    virtual = jaxdist.MirroredStrategy(deterministic=True)
    with pytest.raises(jaxdist.errors.ArgumentError, match="deterministic=True"):
        partition.place(virtual, {"w": jnp.ones((8, 8))}, partition.fsdp(min_bytes=0))
    with pytest.raises(jaxdist.errors.ContextError, match="JAX traces"):
        jax.jit(lambda w: partition.place(grid(2, 1), {"w": w}, partition.replicated()))(1.0)


def test_checkpoint_of_sharded_parameters_is_restored_on_other_replicas(tmp_path: Any) -> None:
    def small() -> Any:
        net = filled(lambda: nnx.Linear(16, 5, rngs=nnx.Rngs(0)))
        return net, nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)

    def step(net: Any, optimizer: Any, x: jax.Array) -> Any:
        grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(net)
        optimizer.update(net, jaxdist.get_replica_context().all_reduce("mean", grads))

    first, second = grid(8, 1), jaxdist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    held = partition.place(first, small(), partition.fsdp(min_bytes=0))
    x = np.ones((24, 16), "float32")
    first.run(step, (*held, jax.device_put(x, first.per_replica_sharding)))
    with Checkpoints(tmp_path) as saved:
        saved.save(1, nnx.state(held), {})
        other = partition.place(second, small(), partition.fsdp(min_bytes=0))
        nnx.update(other, saved.restore(1, like=nnx.state(other)).state)
    assert other[0].bias.get_raw_value().held.shape == (6,)
    for number in range(2):
        for (path, before), after in zip(raw(held).items(), raw(other).values(), strict=True):
            was, now = (x.whole() if isinstance(x, Sharded) else x for x in (before, after))
            np.testing.assert_allclose(
                np.asarray(was), np.asarray(now), rtol=1e-6 * number, err_msg=path
            )
        first.run(step, (*held, jax.device_put(x, first.per_replica_sharding)))
        second.run(step, (*other, jax.device_put(x, second.per_replica_sharding)))
