"""What `deterministic` takes, and what a strategy that has it refuses."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jaxdist
from jaxdist import MirroredStrategy, OneDeviceStrategy, PerReplica, get_replica_context
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    DivergentCollectiveError,
    ShapeError,
    StateDivergenceError,
)


def _cpus(count: int) -> list[str]:
    return [f"cpu:{i}" for i in range(count)]


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    devices = np.asarray(jax.devices()[: int(np.prod(shape))], dtype=object).reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def test_an_integer_is_the_number_of_virtual_replicas() -> None:
    for given, count in ((True, 8), (2, 2), (16, 16), (np.int64(4).item(), 4)):
        strategy = MirroredStrategy(_cpus(2), deterministic=given)
        assert strategy.num_replicas_in_sync == count
        assert len(strategy.extended.worker_devices) == 2
    assert MirroredStrategy(_cpus(2), deterministic=False).num_replicas_in_sync == 2
    mesh = _mesh((4,), ("data",))
    strategy = MirroredStrategy(mesh=mesh, replica_axes=("data",), deterministic=True)
    assert strategy.num_replicas_in_sync == 8
    assert "8 virtual replicas on 4 device(s)" in repr(strategy)


@pytest.mark.parametrize(
    ("make", "error", "parts"),
    [
        (
            lambda: MirroredStrategy(_cpus(3), deterministic=True),
            ArgumentError,
            ["3 devices cannot share 8 virtual", "1, 2, 4, 8 devices fit", "Use 2 of the 3"],
        ),
        (
            lambda: MirroredStrategy(_cpus(8), deterministic=4),
            ArgumentError,
            ["8 devices cannot share 4", "Use 4 of the 8 devices, or deterministic=8"],
        ),
        (
            lambda: MirroredStrategy(deterministic=12),
            ArgumentError,
            ["is 12", "power of two", "Use 8 or 16"],
        ),
        (lambda: OneDeviceStrategy("cpu:0", deterministic=1), ArgumentError, ["Use 2 or 4 or 8"]),
        (lambda: OneDeviceStrategy("cpu:0", deterministic=-8), ArgumentError, ["is -8"]),
        (
            lambda: OneDeviceStrategy("cpu:0", deterministic="yes"),  # type: ignore[arg-type]
            ArgumentTypeError,
            ["'yes' of type str"],
        ),
        (
            lambda: MirroredStrategy(
                mesh=_mesh((4, 2), ("data", "model")), replica_axes=("data",), deterministic=True
            ),
            ArgumentError,
            ["each replica spans 2 devices", "Give each replica one device"],
        ),
        (
            lambda: MirroredStrategy(
                mesh=_mesh((4, 2), ("a", "b")), replica_axes=("a", "b"), deterministic=True
            ),
            ArgumentError,
            ["2 mesh axes", "one replica axis of 8 devices"],
        ),
    ],
)
def test_a_number_that_cannot_be_is_refused_when_the_strategy_is_made(
    make: Callable[[], Any], error: type[Exception], parts: list[str]
) -> None:
    with pytest.raises(error) as caught:
        make()
    for part in parts:
        assert part in str(caught.value)


def _strategy() -> MirroredStrategy:
    return MirroredStrategy(_cpus(2), deterministic=True)


def _refused(error: type[Exception], *parts: str) -> Any:
    return pytest.raises(error, match="(?s)" + ".*".join(map(_escaped, parts)))


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in "()[].*+?|" else c for c in text)


def test_rows_that_virtual_replicas_cannot_share_are_refused_with_both_numbers() -> None:
    strategy = _strategy()
    x = jax.device_put(np.zeros((12, 3), np.float32), strategy.per_replica_sharding)
    with _refused(ShapeError, "args[0]['x'] is float32[12, 3]", "8 virtual", "12 rows", "8 or 16"):
        strategy.run(lambda batch: batch["x"], ({"x": x},))
    with _refused(ShapeError, "args[0]", "[12, 3]", "multiple of 8.\n\nUse 8 or 16 rows."):
        strategy.run(lambda x: x, (PerReplica.of_global(x),))
    with _refused(ShapeError, "multiple of 8.\n\nUse 8 rows."):
        strategy.run(lambda x: x, (PerReplica.of_global(np.zeros(2)),))


def test_uneven_batches_are_refused_with_the_remedy() -> None:
    strategy = _strategy()
    data = strategy.experimental_distribute_dataset([np.zeros((12, 2), np.float32)])
    with _refused(ShapeError, "different shapes", "has 12", "Use 8 or 16 rows", "drop_remainder"):
        for batch in data:
            strategy.run(lambda x: x, (batch,))


def test_a_padded_last_batch_is_taken() -> None:
    strategy = _strategy()
    options = jaxdist.data.InputOptions(partial_batch=jaxdist.data.PartialBatch.PAD)
    batches = [np.ones((16, 2), np.float32), np.ones((5, 2), np.float32)]
    sums = []
    for x, mask in strategy.experimental_distribute_dataset(batches, options):
        total = strategy.run(
            lambda x, m: get_replica_context().all_reduce("sum", (x[:, 0] * m).sum()), (x, mask)
        )
        sums.append(float(total))
    assert sums == [16.0, 5.0]


def test_elements_of_a_function_go_to_the_virtual_replicas_in_turn() -> None:
    strategy = _strategy()

    def make(context: Any) -> Any:
        assert context.num_replicas_in_sync == 8 or context.num_input_pipelines == 1
        return [np.full(2, i, np.float32) for i in range(16)]

    batches = list(strategy.distribute_datasets_from_function(make))
    assert [[float(v[0]) for v in b.values] for b in batches] == [
        [float(i) for i in range(8)],
        [float(i) for i in range(8, 16)],
    ]
    made = strategy.experimental_distribute_values_from_function(
        lambda context: context.replica_id_in_sync_group
    )
    assert made.values == tuple(range(8))


def test_op_by_op_is_refused() -> None:
    with jaxdist.config.run_eagerly(), _refused(ContextError, "deterministic=True", "op by op"):
        _strategy().run(lambda: jnp.ones(2))


def test_inside_a_users_jit_it_says_that_only_jaxdist_keeps_the_bits() -> None:
    """XLA's CPU compiler needs an option, and only jaxdist's own functions have it."""
    rows = np.linspace(0, 1, 16, dtype=np.float32)

    def found(strategy: Any, compile_with: Any) -> Any:
        def step(x: Any) -> Any:
            return get_replica_context().all_reduce("mean", jax.nn.softmax(jnp.tanh(x * 3)))

        x = PerReplica.of_global(jax.device_put(rows, strategy.per_replica_sharding))
        return np.asarray(compile_with(lambda x: strategy.run(step, (x,)))(x)).tobytes()

    with _refused(ContextError, "jax.jit", "jaxdist.function"):
        found(_strategy(), jax.jit)
    one = OneDeviceStrategy("cpu:0", deterministic=True)
    assert found(_strategy(), jaxdist.function) == found(one, jaxdist.function)


def test_a_gradient_through_run_is_refused() -> None:
    strategy = _strategy()

    @jaxdist.function
    def slope(w: Any) -> Any:
        return jax.grad(lambda w: strategy.run(lambda w: w * w, (w,)))(w)

    with pytest.raises(NotImplementedError, match="gradient inside the step"):
        slope(jnp.float32(1))


def test_collectives_that_it_does_not_have_are_named() -> None:
    strategy = _strategy()

    def inner(x: Any) -> Any:
        return jax.shard_map(
            lambda v: v,
            mesh=_mesh((1,), ("own",)),
            in_specs=jax.sharding.PartitionSpec(),
            out_specs=jax.sharding.PartitionSpec(),
        )(x)

    def through(x: Any) -> Any:
        solved = jax.lax.custom_linear_solve(
            lambda v: jax.lax.psum(v, "replica"), x, lambda _, b: jax.lax.psum(b, "replica")
        )
        return solved

    with pytest.raises(NotImplementedError, match=r"custom_linear_solve.*test_deterministic.py"):
        strategy.run(through, (PerReplica([np.ones(2, np.float32)] * 8),))
    with pytest.raises(ContextError, match="uses a mesh of its own"):
        strategy.run(inner, (np.ones(2, np.float32),))


def test_what_an_ordinary_strategy_refuses_it_refuses_as_well() -> None:
    strategy = OneDeviceStrategy("cpu:0", deterministic=True)
    x = PerReplica(list(np.ones((8, 2), np.float32)))
    with pytest.raises(DivergentCollectiveError):
        strategy.run(
            lambda x: jax.lax.cond(x[0] > 0, lambda: jax.lax.psum(x, "replica"), lambda: x),
            (x,),
        )

    def diverging(state: Any, x: Any) -> Any:
        return {"w": state["w"] + x, "b": state["b"]}

    state = {"w": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}
    with pytest.raises(StateDivergenceError):
        strategy.run(diverging, (state, x), options=jaxdist.RunOptions(donate_argnums=(0,)))


def test_a_donated_step_and_a_checked_one_run() -> None:
    strategy = _strategy()

    def step(w: Any, x: Any) -> Any:
        grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * get_replica_context().all_reduce("mean", grad)

    x = PerReplica.of_global(
        jax.device_put(np.ones((16, 3), np.float32), strategy.per_replica_sharding)
    )
    w = jax.device_put(np.ones(3, np.float32), strategy.replicated_sharding)
    assert strategy.check_gradients(step, (w, x)).is_equal
    after = strategy.run(step, (w, x), options=jaxdist.RunOptions(donate_argnums=(0,)))
    assert w.is_deleted()
    assert strategy.check_replicas(after)
    np.testing.assert_allclose(after, 0.4, rtol=1e-6)
    program = strategy.lower(step, (after, x))
    assert [c.kind for c in program.traced_collectives] == ["psum"]
    assert "8 virtual replica(s) on 2 device(s)" in repr(program)


def _itself(value: Any) -> Any:
    return value


def test_rows_on_one_device_are_known_by_their_layout() -> None:
    strategy = OneDeviceStrategy("cpu:2", deterministic=True)
    rows = np.arange(16, dtype=np.float32)[:, None]
    for spec in (("replica",), ("replica", None), (("replica",),)):
        sharding = jax.sharding.NamedSharding(strategy.mesh, jax.sharding.PartitionSpec(*spec))
        x = jax.device_put(rows, sharding)
        assert [v.tolist() for v in strategy.run(_itself, (x,)).values][1] == [[2.0], [3.0]]
    assert strategy.run(_itself, (rows,)).shape == (16, 1)
