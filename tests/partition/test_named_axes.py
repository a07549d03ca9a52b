"""Placements over one named axis of the mesh: `Split(axis=)`, `Shard(split_axis=)` and `Stage`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec

import jaxdist
from jaxdist import Sharded, partition
from jaxdist.errors import ArgumentError, ArgumentTypeError, ShapeError
from jaxdist.partition import ByNames, Replicate, Rules, Shard, Split, Stage

AUTO = AxisType.Auto


def strategy_of(
    shape: dict[str, int], replicas: tuple[str, ...] = ("data",), kind: AxisType = AUTO
) -> jaxdist.MirroredStrategy:
    sizes = tuple(shape.values())
    devices = np.asarray(jax.devices("cpu")[: int(np.prod(sizes))], dtype=object).reshape(sizes)
    mesh = Mesh(devices, tuple(shape), axis_types=(kind,) * len(shape))
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=replicas)


def three_axes(kind: AxisType = AUTO) -> jaxdist.MirroredStrategy:
    return strategy_of({"data": 2, "stage": 2, "model": 2}, kind=kind)


def place(strategy: Any, array: Any, placement: Any) -> Any:
    return partition.place(strategy, {"w": array}, Rules([("w", placement)]))["w"]


def spec_of(value: Any) -> tuple[Any, ...]:
    """The layout without the one-name tuples, in which JAX may keep an entry."""
    held = value.held if isinstance(value, Sharded) else value
    entries = tuple(held.sharding.spec)
    return tuple(e[0] if isinstance(e, tuple) and len(e) == 1 else e for e in entries)


@pytest.mark.parametrize(
    ("placement", "spec"),
    [
        (Split(1, axis="model"), (None, "model")),
        (Split(-1, "stage"), (None, None, "stage")),
        (Split(1), (None, ("stage", "model"))),
        (Shard(0, 2, split_axis="model"), ("data", None, "model")),
        (Stage(), ("stage",)),
        (Stage(Split(0)), ("stage", "model")),
        (Stage(Split(1, axis="model")), ("stage", None, "model")),
        (Stage(Shard()), ("stage", None, "data")),
        (Stage(Shard(split=1)), ("stage", "data", "model")),
        (Stage(Split(1), axis="model"), ("model", None, "stage")),
    ],
)
def test_a_placement_may_name_one_axis(placement: Any, spec: tuple[Any, ...]) -> None:
    value = place(three_axes(), jnp.arange(4.0 * 8 * 16).reshape(4, 8, 16), placement)
    assert spec_of(value) == spec
    np.testing.assert_array_equal(np.asarray(value).ravel(), np.arange(4.0 * 8 * 16))


def test_chunks_have_the_stages_in_dim_1() -> None:
    strategy = strategy_of({"data": 2, "stage": 2})
    value = place(strategy, jnp.arange(2.0 * 4 * 3).reshape(2, 4, 3), Stage(chunks=2))
    assert spec_of(value) == (None, "stage")
    # Chunk c of stage s has the layers (c * S + s) * k and on: a reshape is in the model's order.
    first = value.addressable_shards[0].data
    np.testing.assert_array_equal(first.reshape(4, 3)[:, 0], [0.0, 3.0, 12.0, 15.0])


@pytest.mark.parametrize("shape", [{"data": 8}, {"data": 2, "model": 4}, {"data": 4, "stage": 1}])
def test_without_the_axis_of_stages_a_stack_has_the_placement_of_a_layer(shape: Any) -> None:
    strategy = strategy_of(shape)
    value = place(strategy, jnp.ones((3, 8, 16)), Stage(Shard(1)))
    assert spec_of(value) == (None, None, "data")
    assert spec_of(place(strategy, jnp.ones((3, 8, 16)), Stage())) == ()


def test_the_only_axis_and_all_axes_are_the_same_cut() -> None:
    strategy = strategy_of({"data": 2, "model": 4})
    one = place(strategy, jnp.ones((8, 8)), Shard(0, 1, split_axis="model"))
    assert one.cut == place(strategy, jnp.ones((8, 8)), Shard(0, 1)).cut


@pytest.mark.parametrize(
    ("placement", "shape", "words"),
    [
        (Split(1, axis="modle"), (4, 8), ["'modle'", "'stage': 2", "Name 'model'"]),
        (Split(1, axis="data"), (4, 8), ["axis of replicas", "Shard(axes=('data',))"]),
        (Stage(axis="stages"), (4, 8), ["'stages'", "Name 'stage'"]),
        (Stage(axis="data"), (4, 8), ["axis of replicas"]),
        (Stage(Split(0, axis="stage")), (4, 8), ["axis of the stages"]),
    ],
)
def test_an_axis_that_the_mesh_does_not_have_is_named(
    placement: Any, shape: Any, words: list[str]
) -> None:
    with pytest.raises(ArgumentError) as error:
        place(three_axes(), jnp.ones(shape), placement)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("chunks", "shape", "words"),
    [
        (1, (10, 3), ["4 stages do not divide 10", "8 or 12 layers", "[1, 2, 5, 10]"]),
        (1, (2, 3), ["4 stages do not divide 2", "Use 4 layers"]),
        (2, (2, 3, 5), ["2 chunks on 4 stages do not divide 6", "Use 8 layers", "[1, 3]"]),
        (2, (8, 3), ["dim 0 has 8 elements", "w.reshape((2, 4, 3))"]),
        (2, (9, 3), ["dim 0 has 9 elements", "8 or 10 layers"]),
        (2, (2,), ["dim 0 has 2 elements", "w.reshape((2, 1))"]),
    ],
)
def test_layers_that_do_not_fit_the_stages_are_an_error_with_those_that_do(
    chunks: int, shape: Any, words: list[str]
) -> None:
    with pytest.raises(ShapeError) as error:
        place(strategy_of({"data": 2, "stage": 4}), jnp.ones(shape), Stage(chunks=chunks))
    assert all(word in str(error.value) for word in words), error.value


def test_a_dim_that_one_axis_does_not_divide_is_an_error() -> None:
    with pytest.raises(ShapeError, match="needs 2 logical devices to divide dim 1"):
        place(three_axes(), jnp.ones((4, 3)), Split(1, axis="model"))
    loose = place(three_axes(), jnp.ones((4, 3)), Split(1, axis="model", must_divide=False))
    assert spec_of(loose) == ()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Split(1, axis=3),  # type: ignore[arg-type]
        lambda: Shard(0, 1, split_axis=3),  # type: ignore[arg-type]
        lambda: Stage("layers"),  # type: ignore[arg-type]
        lambda: Stage(Stage()),  # type: ignore[arg-type]
        lambda: Stage(axis=None),  # type: ignore[arg-type]
        lambda: Stage(chunks=1.5),  # type: ignore[arg-type]
        lambda: Sharded(np.ones((4, 4)), 0, 4, split=("model",)),  # type: ignore[arg-type]
        lambda: Sharded(np.ones((4, 4)), 0, 4, split=()),
        lambda: partition.fsdp().on_stages(3),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_a_wrong_type_are_refused(make: Any) -> None:
    with pytest.raises(ArgumentTypeError):
        make()


def test_an_axis_without_a_dim_to_split_is_refused() -> None:
    with pytest.raises(ArgumentError, match="Pass the dim too"):
        Shard(0, split_axis="model")
    with pytest.raises(ArgumentError, match="chunks=0"):
        Stage(chunks=0)


def test_rules_of_a_model_are_put_on_stages() -> None:
    strategy = three_axes()
    tree = {
        "layers": {"mlp": {"up": {"kernel": jnp.ones((4, 8, 16)), "bias": jnp.ones((4, 16))}}},
        "embed": {"embedding": jnp.ones((32, 8))},
    }
    rules = partition.fsdp_tensor_parallel(min_bytes=0, split_axis="model").on_stages("layers/**")
    placed = partition.place(strategy, tree, rules)
    assert spec_of(placed["layers"]["mlp"]["up"]["kernel"]) == ("stage", "data", "model")
    assert spec_of(placed["embed"]["embedding"]) == ("model", "data")
    assert "stages 'layers/**'" in repr(rules)
    with pytest.raises(ArgumentError, match="'blocks' on stages"):
        partition.place(strategy, tree, partition.fsdp().on_stages("blocks"))


def test_a_rule_that_has_the_stages_keeps_them_and_other_ones_are_refused() -> None:
    rules = Rules([("w", Stage(Split(0), chunks=2))])
    assert rules.on_stages("w", chunks=2).placement_of("w") == Stage(Split(0), chunks=2)
    for other in (rules.on_stages("w"), rules.on_stages("w", chunks=2, axis="pipe")):
        with pytest.raises(ArgumentError, match=r"w has the rule Stage.*, and on_stages") as error:
            other.placement_of("w")
        assert "Give it the rule Split(dim=0)" in str(error.value)
        with pytest.raises(ArgumentError, match="on_stages"):
            partition.place(three_axes(), {"w": jnp.ones((2, 8, 16))}, other)
    as_told = Rules([("w", Split(0))]).on_stages("w", chunks=2)
    assert as_told.placement_of("w") == Stage(Split(0), chunks=2)


def param(*names: str) -> dict[str, Any]:
    with nnx.use_eager_sharding(False):
        return {"w": nnx.Param(jnp.ones((2, 8, 16)[-len(names) :]), out_sharding=names)}


@pytest.mark.parametrize(
    ("names", "placement", "spec"),
    [
        (("embed", "mlp"), ByNames({"embed": "replica", "mlp": "model"}), ("data", "model")),
        (("embed", "mlp"), ByNames({"embed": "stage", "mlp": "model"}), ("stage", "model")),
        (("embed", "mlp"), ByNames({"embed": None, "mlp": "logical"}), (None, ("stage", "model"))),
        (
            ("layers", "embed", "mlp"),
            Stage(ByNames({"embed": None, "mlp": "model"})),
            ("stage", None, "model"),
        ),
        (
            ("layers", "embed", "mlp"),
            Stage(ByNames({"embed": "replica", "mlp": "logical"})),
            ("stage", "data", "model"),
        ),
    ],
)
def test_names_of_dims_may_be_on_several_axes(
    names: tuple[str, ...], placement: Any, spec: tuple[Any, ...]
) -> None:
    placed = partition.place(three_axes(), param(*names), Rules([("w", placement)]))["w"]
    assert spec_of(placed.get_raw_value()) == spec


def test_all_logical_axes_and_one_of_them_are_not_for_two_dims() -> None:
    model = param("embed", "mlp")
    with pytest.raises(ArgumentError, match="An axis is for one dim of a leaf"):
        partition.place(three_axes(), model, ByNames({"embed": "logical", "mlp": "model"}))


def test_an_activation_is_split_over_the_named_axis() -> None:
    strategy = three_axes()

    def step(x: jax.Array) -> jax.Array:
        return partition.constrain(x * 2, Split(1, axis="model"))

    program = strategy.lower(step, (jnp.ones((4, 8)),))
    assert "f32[4,4]" in str(program.compiled().as_text())
    with pytest.raises(ArgumentError, match="Name 'model'"):
        strategy.run(lambda x: partition.constrain(x, Split(1, axis="modle")), (jnp.ones((4, 8)),))


PLACEMENTS = [
    Replicate(),
    Stage(),
    Stage(Split(1)),
    Stage(Shard(0)),
    Stage(Shard(0, 1)),
    Shard(1, 2, split_axis="model"),
    Split(2, axis="model"),
]


def train(strategy: Any, params: Any, x: Any, steps: int = 3) -> Any:
    """A scan over layers, with Adam, by what the strategy does in a step."""
    tx = optax.adam(1e-2)

    def step(params: Any, state: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            def layer(x: Any, w: Any) -> Any:
                return x + jnp.tanh(x @ w["w"][...]), None

            return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        value, grads = jaxdist.get_replica_context().all_reduce("mean", (value, grads))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = strategy.run(tx.init, (params,))
    losses = []
    for _ in range(steps):
        params, state, value = strategy.run(step, (params, state, x))
        losses.append(float(value))
    return params, losses


@pytest.mark.parametrize("kind", [AUTO, AxisType.Explicit])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=repr)
def test_a_scan_of_layers_has_the_numbers_of_one_device(placement: Any, kind: AxisType) -> None:
    rng = np.random.default_rng(0)
    w = {"w": (rng.normal(size=(4, 8, 8)) / 4).astype("float32")}
    x = rng.normal(size=(8, 8)).astype("float32")
    _, expected = train(jaxdist.OneDeviceStrategy("cpu:0"), w, x)
    strategy = three_axes(kind)
    params = partition.place(strategy, w, Rules([("w", placement)]))
    after, losses = train(strategy, params, jax.device_put(x, strategy.per_replica_sharding))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert spec_of(after["w"])[: len(spec_of(params["w"]))] == spec_of(params["w"])


def test_a_step_keeps_the_layout_of_stages_for_the_next_call() -> None:
    strategy = three_axes()
    params = place(strategy, jnp.ones((4, 8, 16)), Stage(Shard(0, 1)))
    after = strategy.run(lambda w: jax.tree.map(lambda a: a * 2, w), (params,))
    assert after.cut == params.cut
    assert after.held.sharding.spec == params.held.sharding.spec
    assert isinstance(after.held.sharding.spec, PartitionSpec)
