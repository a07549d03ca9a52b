"""Sharded parameters in a step: a layer gathers those that it uses; the gradient is the mean."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import PerReplica, Sharded, partition
from jaxdist.partition import Replicate, Rules, Shard
from tests.partition.test_rules import grid, mesh
from tests.partition.transformer import filled


class Net(nnx.Module):
    """Layers of Flax that use their parameters in different ways."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(12, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.conv = nnx.Conv(8, 8, kernel_size=(3,), rngs=rngs)
        self.einsum = nnx.Einsum("btd,df->btf", (8, 12), (12,), rngs=rngs)
        self.group = nnx.GroupNorm(12, num_groups=2, rngs=rngs)
        self.general = nnx.LinearGeneral((12,), (3, 4), rngs=rngs)
        self.w = nnx.Param(jnp.full((12, 12), 0.1))
        self.out = nnx.Linear(12, 9, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.attention(self.norm(self.embed(tokens)))
        x = self.group(self.einsum(self.conv(x)))
        x = self.general(x).reshape(x.shape)
        w: Any = self.w
        x = x @ w + jnp.dot(x, w[...]) + jnp.matmul(x, w.get_value()) + (2 * w + 1).mean()
        return self.out(x + w.T[:1, None] + w[1:2, None, :]).astype(jnp.float32)


def test_layers_of_flax_work_unchanged_and_give_the_same_loss_and_gradients() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    whole = filled(lambda: Net(nnx.Rngs(0)))
    in_pieces = nnx.clone(whole)
    partition.place(strategy, in_pieces, Rules({"*": Shard(pad=True)}))
    assert isinstance(in_pieces.attention.query.kernel.get_raw_value(), Sharded)

    def step(nets: Any, tokens: jax.Array) -> Any:
        context = jaxdist.get_replica_context()

        def loss_of(net: Net) -> jax.Array:
            picked = jax.nn.one_hot(tokens[:, 1:], 9)
            return -(jax.nn.log_softmax(net(tokens[:, :-1])) * picked).sum(-1).mean()

        found = [nnx.value_and_grad(loss_of)(net) for net in nets]
        return context.all_reduce(
            "mean", [(loss, nnx.to_pure_dict(nnx.state(g))) for loss, g in found]
        )

    tokens = np.random.default_rng(0).integers(0, 9, (8, 6))
    batch = jax.device_put(tokens, strategy.per_replica_sharding)
    (loss, grads), (sharded_loss, sharded_grads) = strategy.run(step, ([whole, in_pieces], batch))
    assert float(loss) == pytest.approx(float(sharded_loss), rel=1e-6)
    leaves, treedef = jax.tree.flatten(grads)
    pieces = treedef.flatten_up_to(sharded_grads)
    assert all(isinstance(p, Sharded) for p in pieces)
    for one, other in zip(leaves, pieces, strict=True):
        np.testing.assert_allclose(np.asarray(other.whole()), one, rtol=2e-5, atol=1e-6)


SHAPES = [(5,), (3, 4)]
AXES: list[Any] = [None, ("a",), ("b",)]


@pytest.mark.parametrize(
    "eagerly", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["compiled", "op_by_op"]
)
def test_gathered_is_the_array_and_its_gradient_the_mean_over_all_replicas(eagerly: bool) -> None:
    strategy = jaxdist.MirroredStrategy(mesh=mesh((2, 3), ("a", "b")), replica_axes=("a", "b"))
    rng = np.random.default_rng(0)
    whole, rules = {}, []
    for (i, shape), axes in itertools.product(enumerate(SHAPES), AXES):
        for dim in range(len(shape)):
            name = f"{i}_{dim}_{'all' if axes is None else axes[0]}"
            whole[name] = rng.normal(size=shape).astype("float32")
            rules.append((name, Shard(dim, axes=axes, pad=True)))
    if eagerly:
        whole = {k: v for k, v in whole.items() if k[0] == "1"}
        rules = [r for r in rules if r[0] in whole]
    placed = partition.place(strategy, whole, Rules(rules))
    weights = {k: rng.normal(size=(6, *v.shape)).astype("float32") for k, v in whole.items()}

    def step(params: Any, weights: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            arrays = partition.gather(params)
            return jnp.asarray(sum(jnp.sum(arrays[k] ** 2 * weights[k][0]) for k in arrays))

        grads = jax.grad(loss_of)(params)
        total = jaxdist.get_replica_context().all_reduce("sum", grads)
        # Elementwise arithmetic on pieces is that of the array.
        return jax.tree.map(lambda p, g: 3 * p - g, params, total), partition.gather(params)

    batches = {k: jax.device_put(v, strategy.per_replica_sharding) for k, v in weights.items()}
    with jaxdist.config.run_eagerly(eagerly):
        stepped, gathered = strategy.run(step, (placed, batches))
    for name, array in whole.items():
        np.testing.assert_array_equal(gathered[name], array, err_msg=name)
        grad = 2 * array * weights[name].sum(0)
        assert stepped[name].cut == placed[name].cut
        np.testing.assert_allclose(
            np.asarray(stepped[name].whole()), 3 * array - grad, rtol=1e-4, atol=1e-5, err_msg=name
        )


def test_split_dim_stays_split_while_the_other_is_gathered() -> None:
    strategy = grid(4, 2)
    params = partition.place(strategy, {"up": np.eye(8, 32, dtype="float32")}, {"*": Shard(0, 1)})

    def step(params: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ params["up"]).sum(axis=1)

    x = jax.device_put(np.ones((8, 8), "float32"), strategy.per_replica_sharding)
    [gathered] = [
        c for c in strategy.lower(step, (params, x)).compile().collectives if c.kind == "all-gather"
    ]
    assert gathered.bytes_per_device == 8 * 32 // 2 * 4
    assert {len(group) for group in gathered.groups} == {4}


def test_last_uneven_batch_and_a_scan_of_steps_take_parameters_in_pieces() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    params = partition.place(strategy, {"w": np.ones((3, 2), "float32")}, {"*": Shard(pad=True)})

    def step(params: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: jnp.sum(x @ p["w"]))(params)
        return jax.tree.map(lambda p, g: p - g, params, grads)

    rows = [np.ones((2, 3), "float32"), np.full((1, 3), 4, "float32")]
    with pytest.warns(jaxdist.errors.UnevenMeanWarning, match="the gradient of arrays in pieces"):
        found = strategy.run(step, (params, PerReplica(rows)))
    np.testing.assert_array_equal(found["w"].whole(), np.full((3, 2), 1 - (2 + 4) / 2))

    even = jax.device_put(np.ones((4, 3), "float32"), strategy.per_replica_sharding)

    @jax.jit
    def many(params: Any, x: jax.Array) -> Any:
        def body(params: Any, _: None) -> Any:
            return strategy.run(step, (params, PerReplica.of_global(x))), None

        return jax.lax.scan(body, params, None, length=3)[0]

    np.testing.assert_array_equal(many(params, even)["w"].whole(), np.full((3, 2), 1 - 3 * 2))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_policy_gathers_again_and_keeps_nothing_whole(dtype: Any) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    net = nnx.Sequential(*(nnx.Linear(7, 7, dtype=dtype, rngs=nnx.Rngs(0)) for _ in range(3)))
    partition.place(strategy, net, Rules({"kernel": Shard(pad=True), "bias": Replicate()}))

    def gathers(policy: Any) -> tuple[int, set[tuple[int, ...]]]:
        kept: list[Any] = []

        def step(net: Any, x: jax.Array) -> Any:
            def loss_of(net: Any, x: jax.Array) -> jax.Array:
                return jnp.tanh(net(x)).sum()

            loss = nnx.remat(loss_of, policy=policy) if policy else loss_of
            graphdef, state = nnx.split(net)
            _, backward = jax.vjp(lambda s: loss(nnx.merge(graphdef, s), x), state)
            kept.extend(x for x in jax.tree.leaves(backward) if hasattr(x, "shape"))
            return backward(jnp.ones((), dtype))

        program = strategy.lower(step, (net, np.ones((2, 7), "float32")))
        count = sum(c.kind == "all_gather" for c in program.traced_collectives)
        return count, {tuple(x.shape) for x in kept}

    once, shapes = gathers(None)
    again, shapes_by_policy = gathers(partition.remat_policy)
    # The input of the first layer has no gradient, so its kernel is not needed again.
    assert (once, again) == (3, 5)
    assert (7, 7) in shapes
    assert (7, 7) not in shapes_by_policy


def test_use_that_is_not_of_the_array_is_refused_by_name() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    params = partition.place(strategy, {"w": np.ones((4, 6), "float32")}, {"*": Shard(1)})

    def scanned(p: Any) -> Any:
        over = jax.tree.map(lambda w: w.T, p)
        return jax.lax.scan(lambda c, row: (c + row["w"][...].sum(), None), 0.0, over)[0]

    with pytest.raises(jaxdist.errors.ReplicaValueError, match="Cut another dim"):
        strategy.run(scanned, (params,))
    with pytest.raises(AttributeError, match=r"partition\.gather"):
        strategy.run(lambda p: p["w"].sort(), (params,))
    with pytest.raises((TypeError, ValueError), match=r"jax\.numpy|Sharded"):
        strategy.run(lambda p: jax.lax.exp(p["w"]), (params,))
    np.testing.assert_array_equal(params["w"] + 1, np.full((4, 6), 2))
    np.testing.assert_array_equal(partition.gather(params)["w"], np.ones((4, 6)))
    net = partition.place(strategy, nnx.Linear(4, 6, rngs=nnx.Rngs(0)), partition.fsdp(min_bytes=0))
    copy = partition.gather(net)
    assert isinstance(net.kernel.get_raw_value(), Sharded)
    assert isinstance(copy.kernel.get_raw_value(), jax.Array)


def test_plain_optax_state_made_from_pieces_is_in_pieces() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    params: Any = partition.place(
        strategy, {"w": np.ones((3, 2), "float32")}, {"*": Shard(0, pad=True)}
    )
    state: Any = strategy.run(optax.adam(0.1).init, (params,))
    assert state[0].mu["w"].cut == params["w"].cut
    assert state[0].mu["w"].held.sharding == params["w"].held.sharding
