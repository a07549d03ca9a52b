"""What a mixture of experts sends between devices, by the compiled programs."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh

import jaxdist
from jaxdist import get_replica_context, nn, partition
from jaxdist.cluster_resolver import TPUClusterResolver
from tests.nn.experts_oracle import expert, make, make_mesh, place, place_pieces

ROWS, TOKENS, WIDTH, EXPERTS, TOP_K = 16, 64, 128, 8, 2


def _describe_tpus(
    layout: tuple[int, ...],
    names: tuple[str, ...] = ("data", "experts"),
    replica_axes: tuple[str, ...] = ("data",),
) -> jaxdist.MirroredStrategy:
    pytest.importorskip("libtpu")
    devices = jaxdist.TPUStrategy(TPUClusterResolver("described:v5e:2x4")).mesh.devices
    mesh = Mesh(devices.reshape(layout), names, axis_types=(AxisType.Auto,) * len(names))
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=replica_axes)


def _compile(
    strategy: jaxdist.Strategy,
    dtype: str,
    *,
    first: bool,
    scaled: bool = False,
    axis: str = "experts",
) -> Any:
    """A step whose experts are its first layer, of which x needs no gradient, or a later one."""

    def init() -> Any:
        return {
            "before": jnp.zeros((WIDTH, WIDTH), dtype),
            "router": jnp.zeros((WIDTH, EXPERTS)),
            "up": jnp.zeros((EXPERTS, WIDTH, WIDTH), dtype),
            "down": jnp.zeros((EXPERTS, WIDTH, WIDTH), dtype),
        }

    def step(params: Any, x: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            rows = x if first else x @ params["before"]
            scale = params["router"].sum().astype(dtype)

            def of_one(w: Any, rows: Any) -> Any:
                return expert(w, rows * scale if scaled else rows)

            weights = {"up": params["up"], "down": params["down"]}
            y, (balance, _) = nn.experts(
                of_one, params["router"], weights, rows, top_k=TOP_K, axis=axis
            )
            return (y.astype(jnp.float32) ** 2).mean() + balance

        context = get_replica_context()
        loss, grads = jax.value_and_grad(loss_fn)(params)
        return context.all_reduce("mean", (loss, grads))

    put = place if axis == "experts" else place_pieces
    params = put(strategy, jax.eval_shape(init))
    layout = strategy.per_replica_sharding
    x = jax.ShapeDtypeStruct((ROWS, TOKENS, WIDTH), dtype, sharding=layout)
    return strategy.lower(step, (params, x)).compile()


def _theory(layout: tuple[int, int], size: int) -> float:
    """What one device sends in one exchange."""
    replicas, n = layout
    slots = math.ceil(1.25 * TOP_K * TOKENS / EXPERTS) * EXPERTS
    return (n - 1) / n * slots * ROWS / replicas / n * WIDTH * size


def _exchanges(program: Any) -> list[Any]:
    return [c for c in program.collectives if c.kind == "all-to-all"]


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "other arrays"])
@pytest.mark.parametrize("first", [True, False], ids=["first layer", "later layer"])
@pytest.mark.parametrize("layout", [(4, 2), (2, 4), (1, 8)])
def test_a_layer_sends_its_slots_there_and_back_and_as_much_for_the_gradient(
    layout: tuple[int, int], first: bool, scaled: bool
) -> None:
    program = _compile(make(layout), "float32", first=first, scaled=scaled)
    found = _exchanges(program)
    assert [c.bytes_sent for c in found] == [_theory(layout, 4)] * (3 if first else 4)
    assert {len(g) for c in found for g in c.groups} == {layout[1]}
    # Weights stay where they are, and x is whole on each device.
    assert [c for c in program.collectives if c.kind == "all-gather"] == []


def test_one_device_for_each_replica_sends_nothing() -> None:
    assert _exchanges(_compile(make((8, 1)), "float32", first=False)) == []


@pytest.mark.parametrize("first", [True, False], ids=["first layer", "later layer"])
@pytest.mark.parametrize("layout", [(2, 4), (1, 8)])
def test_described_tpus_send_the_same_in_bfloat16(layout: tuple[int, int], first: bool) -> None:
    program = _compile(_describe_tpus(layout), "bfloat16", first=first)
    assert [c.bytes_sent for c in _exchanges(program)] == [_theory(layout, 2)] * (3 if first else 4)
    assert [c for c in program.collectives if c.kind == "all-gather"] == []


def test_experts_that_are_not_placed_are_still_divided() -> None:
    strategy = make((2, 4))

    def step(params: Any, x: Any) -> Any:
        return nn.experts(expert, params["router"], params["w"], x, top_k=TOP_K)[0]

    shape = jax.ShapeDtypeStruct((EXPERTS, WIDTH, WIDTH), "float32")
    params = {
        "router": jax.ShapeDtypeStruct((WIDTH, EXPERTS), "float32"),
        "w": {"up": shape, "down": shape},
    }
    layout = strategy.per_replica_sharding
    x = jax.ShapeDtypeStruct((ROWS, TOKENS, WIDTH), "float32", sharding=layout)
    whole = partition.place(strategy, params, partition.replicated())
    program = strategy.lower(step, (whole, x)).compile()
    assert [c.bytes_sent for c in _exchanges(program)] == [_theory((2, 4), 4)] * 2


REPLICAS: list[tuple[tuple[int, ...], tuple[str, ...], int]] = [
    ((8,), ("data",), 8),
    ((2,), ("data",), 2),
    ((2, 4), ("slice", "data"), 4),
]


@pytest.mark.parametrize("first", [True, False], ids=["first layer", "later layer"])
@pytest.mark.parametrize(("shape", "names", "n"), REPLICAS)
def test_replicas_send_their_slots_and_no_weights(
    shape: tuple[int, ...], names: tuple[str, ...], n: int, first: bool
) -> None:
    program = _compile(make_mesh(shape, names, names), "float32", first=first, axis="data")
    found = _exchanges(program)
    # A replica sends what a device of an axis of n experts in n times fewer replicas does.
    count = math.prod(shape)
    assert [c.bytes_sent for c in found] == [_theory((count // n, n), 4)] * (3 if first else 4)
    assert {len(g) for c in found for g in c.groups} == {n}
    others = {c.group_size: c for c in program.collectives if c.kind != "all-to-all"}
    assert len(found) + len(others) == len(program.collectives)
    assert {c.kind for c in others.values()} == {"all-reduce"}
    # The router, the loss and the layer before, over all replicas. XLA may see that the layer
    # before has no gradient.
    small = WIDTH * EXPERTS + 1
    wanted = {small, small + WIDTH**2} if first else {small + WIDTH**2}
    assert others.pop(count).bytes_per_device // 4 in wanted
    # The gradient of a piece, over the replicas that have a copy of it.
    copies = {count // n: 4 * 2 * EXPERTS // n * WIDTH**2} if n < count else {}
    assert {size: c.bytes_per_device for size, c in others.items()} == copies


@pytest.mark.parametrize(("shape", "names", "n"), [REPLICAS[0], REPLICAS[2]])
def test_replicas_on_described_tpus_send_the_same_in_bfloat16(
    shape: tuple[int, ...], names: tuple[str, ...], n: int
) -> None:
    program = _compile(_describe_tpus(shape, names, names), "bfloat16", first=False, axis="data")
    found = _exchanges(program)
    assert [c.bytes_sent for c in found] == [_theory((8 // n, n), 2)] * 4
    assert [c for c in program.collectives if c.kind == "all-gather"] == []
