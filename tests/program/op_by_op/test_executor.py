"""Steps op by op: values visible while debugging, results, errors, and cleanup."""

import io
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist
from jaxdist import PerReplica, get_replica_context
from jaxdist._program.op_by_op import executor
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    DivergentCollectiveError,
    ShapeError,
    StateDivergenceError,
)
from tests.tables import examples

COUNT = 4
ROWS = np.arange(8.0, dtype=np.float32).reshape(COUNT, 2)


@pytest.fixture(autouse=True)
def _eagerly() -> Iterator[None]:
    """Every test starts op by op, and leaves neither the setting nor a thread behind."""
    before = set(threading.enumerate())
    with jaxdist.config.run_eagerly():
        yield
    assert not jaxdist.config.steps_run_eagerly()
    left = {t for t in threading.enumerate() if t.name.startswith("jaxdist-replica")} - before
    assert not left, f"threads were left: {left}"


def _strategy(count: int = COUNT) -> jaxdist.MirroredStrategy:
    return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(count)])


def _each(values: Any = ROWS) -> PerReplica:
    return PerReplica(list(values))


def _own_id() -> int:
    return int(get_replica_context().replica_id_in_sync_group)


def _sum(x: Any) -> Any:
    return get_replica_context().all_reduce("sum", x)


# Looking into a step


def test_print_shows_values_and_the_replicas_take_turns_between_collectives() -> None:
    out = io.StringIO()

    def step(x: Any) -> Any:
        print(f"{_own_id()} has {x}", file=out)
        total = _sum(x)
        print(f"{_own_id()} gets {total!r}", file=out)
        return total

    _strategy(2).run(step, (_each(ROWS[:2]),))
    assert out.getvalue().splitlines() == [
        "0 has [0. 1.]",
        "1 has [2. 3.]",
        "0 gets Array([2., 4.], dtype=float32)",
        "1 gets Array([2., 4.], dtype=float32)",
    ]


def test_python_sees_numbers_and_each_replica_may_go_its_own_way() -> None:
    def step(x: Any) -> Any:
        seen = float(x[0]), int(x[1]), np.asarray(x).tolist(), x.tolist(), f"{x[0]:.1f}"
        return jnp.sqrt(x) if _own_id() % 2 else x * 2, seen

    own, seen = _strategy().run(step, (_each(),))
    for r, (have, row) in enumerate(zip(own.values, ROWS, strict=True)):
        np.testing.assert_allclose(have, np.sqrt(row) if r % 2 else row * 2)
    assert seen[0].values == (0.0, 2.0, 4.0, 6.0)
    assert [[v.values for v in column] for column in seen[2:4]] == [
        [(0.0, 2.0, 4.0, 6.0), (1.0, 3.0, 5.0, 7.0)]
    ] * 2
    assert seen[4].values == ("0.0", "2.0", "4.0", "6.0")


def test_python_values_that_are_the_same_everywhere_come_back_as_they_are() -> None:
    assert _strategy().run(lambda x: {"total": float(_sum(x).sum())}, (_each(),)) == {"total": 28.0}


def test_the_debugger_stops_in_a_replica() -> None:
    program = """
        import jaxdist, numpy as np
        jaxdist.testing.virtual_devices(2)
        jaxdist.config.run_eagerly(True)
        strategy = jaxdist.MirroredStrategy()
        def step(x):
            if float(x) > 1:
                breakpoint()
            return jaxdist.get_replica_context().all_reduce("sum", x)
        print("total", strategy.run(step, (jaxdist.PerReplica([1.0, 2.0]),)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        input="p 'here', x\ncontinue\n",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "('here', Array(2., dtype=float32))" in done.stdout, done.stderr
    assert "total 3.0" in done.stdout


def test_jax_debug_print_and_callbacks_run_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    def step(x: Any) -> Any:
        jax.debug.print("own {x}", x=x)
        double = jax.pure_callback(lambda v: v * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return _sum(double)

    total = _strategy(2).run(step, (PerReplica([np.float32(1), np.float32(2)]),))
    assert float(total) == 6.0
    assert capfd.readouterr().out == "own 1.0\nown 2.0\n"


# The same results


@pytest.mark.filterwarnings("ignore::jaxdist.errors.UnevenMeanWarning")
@settings(max_examples=examples(15), deadline=None)
@given(st.data())
def test_run_reduce_gather_and_gradients_are_those_of_the_compiled_step_and_of_numpy(
    data: st.DataObject,
) -> None:
    count = data.draw(st.sampled_from([1, 2, 3]))
    split = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    dtype = data.draw(st.sampled_from([np.float32, jnp.bfloat16, np.int32]))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    rows = rng.integers(0, 4, (sum(split), 2)).astype(dtype)
    starts = np.cumsum([0, *split])
    parts = [rows[a:b] for a, b in itertools.pairwise(starts)]
    strategy = _strategy(count)

    def step(w: Any, x: Any) -> Any:
        context = get_replica_context()

        def loss(w: Any) -> Any:
            own = (w * x.astype(jnp.float32)).sum()
            everything = context.all_gather(w * x.astype(jnp.float32), axis=0)
            return context.all_reduce("mean", own) + (everything**2).sum()

        return {
            "own": x,
            "whole": context.all_gather(x, axis=0),
            "total": context.all_reduce("sum", x.sum(axis=0)),
            "gradient": context.all_reduce("sum", jax.grad(loss)(w)),
        }

    args = (np.float32(0.5), PerReplica(parts))
    eager = strategy.run(step, args)
    gathered = strategy.gather(eager["own"], axis=0) if count > 1 else eager["own"]
    with jaxdist.config.run_eagerly(False):
        compiled = strategy.run(step, args)
    assert jax.tree.structure(eager) == jax.tree.structure(compiled)
    for have, want in zip(jax.tree.leaves(eager), jax.tree.leaves(compiled), strict=True):
        assert have.dtype == want.dtype
        np.testing.assert_allclose(
            np.asarray(have, np.float64), np.asarray(want, np.float64), rtol=1e-5, atol=1e-5
        )
    np.testing.assert_array_equal(eager["whole"], rows)
    np.testing.assert_array_equal(gathered, rows)
    np.testing.assert_allclose(
        np.asarray(eager["total"], np.float32), rows.astype(np.float32).sum(axis=0)
    )


def _collectives(x: Any) -> Any:
    pairs = [(0, 1), (1, 0), (2, 3)]
    own = jnp.arange(4.0) * (1 + jax.lax.axis_index("replica"))
    groups = [[0, 2], [1, 3]]
    return {
        "psum": jax.lax.psum(x, "replica"),
        "pmean": jax.lax.pmean(x, "replica"),
        "pmax": jax.lax.pmax(x, "replica"),
        "pmin": jax.lax.pmin(x, "replica"),
        "ppermute": jax.lax.ppermute(x, "replica", pairs),
        "psum_scatter": jax.lax.psum_scatter(own, "replica", tiled=True),
        "all_to_all": jax.lax.all_to_all(own, "replica", 0, 0, tiled=True),
        "all_gather": jax.lax.all_gather(x, "replica", axis=1),
        "psum in groups": jax.lax.psum(x, "replica", axis_index_groups=groups),
        "all_gather in groups": jax.lax.all_gather(x, "replica", axis_index_groups=groups),
        "constant": jax.lax.psum(2.0, "replica"),
        "size": jax.lax.axis_size("replica"),
    }


def _looped(x: Any) -> Any:
    def body(state: Any, row: Any) -> Any:
        state = state + jax.lax.psum(row, "replica")
        return state, state

    return jax.lax.scan(body, x[0] * 0, x)


def _repeated(x: Any) -> Any:
    def more(state: Any) -> Any:
        return jax.lax.psum(state.sum(), "replica") < 1000

    return jax.lax.while_loop(more, lambda s: s * 2 + jax.lax.pmax(s, "replica"), x + 1)


def _branched(x: Any) -> Any:
    total = jax.lax.psum(x.sum(), "replica")
    return jax.lax.cond(total > 3, lambda v: jax.lax.psum(v, "replica"), lambda v: v * 2 + total, x)


def _differentiated(x: Any) -> Any:
    @jax.checkpoint
    def inner(v: Any) -> Any:
        return jnp.sin(jax.lax.pmean(v, "replica")) * v

    return jax.value_and_grad(lambda v: inner(jax.nn.relu(v) ** 2).sum())(x)


def _mapped(x: Any) -> Any:
    def one(v: Any) -> Any:
        return jax.lax.cond(v > 2, lambda q: q * 2, lambda q: q + 1, v) + jax.lax.psum(v, "replica")

    return jax.vmap(one)(x), jax.vmap(lambda v: jax.lax.fori_loop(0, 3, lambda _, s: s + v, v))(x)


def _kept(x: Any) -> Any:
    # Loops inside jax.checkpoint reach the executor as programs.
    return jax.grad(lambda v: jax.checkpoint(lambda u: _looped(u)[0])(v).sum())(x)


@pytest.mark.parametrize(
    "step", [_collectives, _looped, _repeated, _differentiated, _mapped, _kept]
)
def test_collectives_and_control_flow_are_those_of_the_compiled_step(
    step: Callable[[Any], Any],
) -> None:
    strategy = _strategy()
    eager = strategy.run(step, (_each(),))
    with jaxdist.config.run_eagerly(False):
        compiled = strategy.run(step, (_each(),))
    assert jax.tree.structure(eager) == jax.tree.structure(compiled)
    for have, want in zip(jax.tree.leaves(eager), jax.tree.leaves(compiled), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def test_only_the_branch_that_was_taken_decides_what_is_equal() -> None:
    strategy = _strategy()
    eager = strategy.run(_branched, (_each(),))
    np.testing.assert_array_equal(eager, ROWS.sum(axis=0))
    with jaxdist.config.run_eagerly(False):
        compiled = strategy.run(_branched, (_each(),))
    for own in compiled.values:
        np.testing.assert_array_equal(own, eager)


class _Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(2, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def _trained() -> tuple[list[float], float, list[np.ndarray]]:
    strategy = _strategy()
    net = _Net(nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(net, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
    metric = nnx.metrics.Average()
    x = np.random.default_rng(0).normal(size=(3, 8, 2)).astype(np.float32)

    def step(net: _Net, optimizer: Any, metric: Any, x: Any) -> Any:
        def loss_of(net: _Net) -> Any:
            return ((net(x)[:, 0] - x.sum(axis=1)) ** 2).mean()

        loss, grads = nnx.value_and_grad(loss_of)(net)
        grads = get_replica_context().all_reduce("mean", grads)
        optimizer.update(net, grads)
        metric.update(values=loss)
        return get_replica_context().all_reduce("mean", loss)

    losses = [
        float(strategy.run(step, (net, optimizer, metric, _each(b.reshape(COUNT, 2, 2)))))
        for b in x
    ]
    leaves = [
        np.asarray(v) for v in jax.tree.leaves(nnx.state(net, nnx.filterlib.Not(nnx.RngState)))
    ]
    return losses, float(metric.compute()), leaves


def test_a_model_with_dropout_batch_norm_and_metrics_trains_to_the_same_numbers() -> None:
    eager = _trained()
    with jaxdist.config.run_eagerly(False):
        compiled = _trained()
    np.testing.assert_allclose(eager[0], compiled[0], rtol=1e-4)
    np.testing.assert_allclose(eager[1], compiled[1], rtol=1e-4)
    for have, want in zip(eager[2], compiled[2], strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-3, atol=1e-5)


def test_uneven_batches_run_too() -> None:
    value = PerReplica([np.ones((n, 2), np.float32) * (n + 1) for n in (2, 0, 1, 3)])

    def step(x: Any) -> Any:
        return x * 2, _sum(x.sum()), get_replica_context().all_gather(x, axis=0)

    doubled, total, whole = _strategy().run(step, (value,))
    assert [v.shape for v in doubled.values] == [(2, 2), (0, 2), (1, 2), (3, 2)]
    assert float(total) == 40.0
    np.testing.assert_array_equal(whole, np.concatenate(value.values))


def test_every_replica_computes_on_its_own_device_where_devices_have_memory_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor, "SHARES_MEMORY", frozenset())
    strategy = _strategy()
    devices = []

    def step(w: Any, x: Any) -> Any:
        devices.append(x.devices())
        return w - _sum(x * w), x + 1

    new, own = strategy.run(step, (np.float32(1), _each()))
    assert devices == [{d} for d in strategy.mesh.devices.ravel()]
    np.testing.assert_allclose(new, 1 - ROWS.sum(axis=0))
    np.testing.assert_allclose(np.stack(own.values), ROWS + 1)


# When the setting applies


def test_the_setting_is_asked_for_given_back_and_checked() -> None:
    with jaxdist.config.run_eagerly(False):
        assert not jaxdist.config.steps_run_eagerly()
    assert jaxdist.config.steps_run_eagerly()
    with pytest.raises(ArgumentTypeError, match="'yes'"):
        jaxdist.config.run_eagerly("yes")  # type: ignore[arg-type]
    assert jaxdist.config.steps_run_eagerly()


def test_disable_jit_runs_steps_op_by_op_whatever_was_compiled_before() -> None:
    strategy = _strategy()
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    with strategy.scope():
        seen = jaxdist.Variable(0, dtype=jnp.int32)
    kinds: list[bool] = []

    def plain(x: Any) -> Any:
        kinds.append(bool(getattr(x, "held", None) is not None))
        return _sum(x)

    def with_model(model: Any, x: Any, flag: Any) -> Any:
        kinds.append(bool(getattr(x, "held", None) is not None))
        seen.assign_add(1)
        return _sum(model(x[None]))

    calls: list[Callable[[], Any]] = [
        lambda: strategy.run(plain, (_each(),)),
        lambda: strategy.run(with_model, (model, _each(), "text")),
    ]
    with jaxdist.config.run_eagerly(False):
        for call in calls:
            wanted = [np.asarray(call()) for _ in range(3)]
            kinds.clear()
            with jax.disable_jit():
                np.testing.assert_allclose(call(), wanted[0], rtol=1e-6)
            assert kinds == [True] * COUNT
            np.testing.assert_allclose(call(), wanted[0], rtol=1e-6)
            assert kinds == [True] * COUNT, "it was traced again"
    assert int(seen) == 5


def test_a_step_inside_a_jitted_function_stays_compiled() -> None:
    strategy = _strategy()
    traced: list[bool] = []

    def step(x: Any) -> Any:
        traced.append(isinstance(x, jax.core.Tracer) and not hasattr(x, "held"))
        return _sum(x)

    total = jax.jit(lambda v: strategy.run(step, (v,)))(1.0)
    assert float(total) == COUNT
    assert traced == [True]


def test_what_the_caller_has_set_for_its_thread_holds_in_the_replicas() -> None:
    with jax.enable_x64(True):
        total = _strategy(2).run(lambda x: _sum(x), (PerReplica([np.float64(1), np.float64(2)]),))
    assert total.dtype == np.float64
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        _strategy(2).run(lambda x: jnp.log(x), (_each(ROWS[:2] - 5),))


# Failures


def test_arguments_that_cannot_be_donated_are_refused_as_they_are_compiled() -> None:
    with pytest.raises(ArgumentError, match=r"donate_argnums=\(5,\)"):
        _strategy(2).run(lambda x: x, (1.0,), options=jaxdist.RunOptions(donate_argnums=(5,)))


def test_an_exception_keeps_its_type_and_says_which_replica_raised_it() -> None:
    def step(x: Any) -> Any:
        if _own_id() == 2:
            raise KeyError("missing")
        return _sum(x)

    with pytest.raises(KeyError) as error:
        _strategy().run(step, (_each(),))
    assert error.value.__notes__[-1] == "Raised on replica 2 of 4."
    assert error.traceback[-1].name == "step"


@pytest.mark.parametrize("how", ["returns", "other collective", "other axis", "other op"])
def test_replicas_that_do_not_come_to_a_collective_are_named(how: str) -> None:
    def step(x: Any) -> Any:
        if _own_id() in (1, 3):
            if how == "returns":
                return x
            if how == "other op":
                return jax.lax.pmax(x, "replica")
            if how == "other axis":
                return get_replica_context().all_gather(x[None], axis=0)[0]
            return get_replica_context().all_gather(x, axis=0)[:2]
        return _sum(x)

    with pytest.raises(DivergentCollectiveError) as error:
        _strategy().run(step, (_each(),))
    message = str(error.value)
    assert "replicas [0, 2]: float32[2] in psum at " in message
    assert __file__ in message
    assert "replicas [1, 3]: " in message
    assert ("returned" in message) == (how == "returns")


def test_other_shapes_in_one_collective_are_named() -> None:
    def step(x: Any) -> Any:
        return _sum(x[: 1 + _own_id() % 2])

    with pytest.raises(ShapeError) as error:
        _strategy().run(step, (_each(),))
    assert "replicas [0, 2]: float32[1] in psum" in str(error.value)
    assert "replicas [1, 3]: float32[2] in psum" in str(error.value)


def test_results_of_other_structure_rank_or_kind_are_refused() -> None:
    steps: list[Callable[[Any], Any]] = [
        lambda x: {"a": x} if _own_id() else {"b": x},
        lambda x: x if _own_id() else x[0],
        lambda x: x if _own_id() else "none",
    ]
    for step in steps:
        with pytest.raises(StateDivergenceError):
            _strategy().run(step, (_each(),))


def test_state_that_comes_out_different_is_refused_and_left_as_it_was() -> None:
    strategy = _strategy()
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    with strategy.scope():
        w = jaxdist.Variable(np.zeros(2, np.float32), name="w")
    before = np.asarray(model.kernel[...])

    def writes_model(model: Any, x: Any) -> None:
        model.kernel[...] = model.kernel[...] + x.sum()

    with pytest.raises(StateDivergenceError, match=r"args\[0\]\.kernel"):
        strategy.run(writes_model, (model, _each()))
    with pytest.raises(StateDivergenceError, match="w"):
        strategy.run(lambda x: w.assign(x), (_each(),))
    np.testing.assert_array_equal(model.kernel[...], before)
    np.testing.assert_array_equal(w.numpy(), [0, 0])


def test_a_value_that_differs_by_a_number_of_python_is_not_taken_for_equal() -> None:
    strategy = _strategy()
    own = strategy.run(lambda x: jnp.ones(2) * float(x[0]), (_each(),))
    assert [v.tolist() for v in own.values] == [[2.0 * r] * 2 for r in range(COUNT)]


@pytest.mark.parametrize(
    "choose",
    [
        lambda v, m: m[:, 0] if v > 5 else m[:, 1],
        lambda v, m: m.sum(axis=0 if v > 5 else 1),
        lambda v, m: m[_own_id()],
        lambda v, m: [jnp.zeros(2), jnp.ones(2)][_own_id()],
        lambda v, m: m.at[int(v) % 2].set(9.0),
        lambda v, m: jnp.unique(v * jnp.ones(2), size=2),
        lambda v, m: jax.random.split(jax.random.key(0))[_own_id()],
    ],
)
def test_what_a_replica_chooses_in_python_is_its_own(choose: Callable[..., Any]) -> None:
    strategy = _strategy(2)
    with strategy.scope():
        w = jaxdist.Variable(np.zeros(2, np.float32), name="w")
    args = (PerReplica([np.float32(2), np.float32(9)]), jnp.arange(4.0).reshape(2, 2))
    own = strategy.run(choose, args)
    assert isinstance(own, PerReplica)
    assert str(own.values[0]) != str(own.values[1])

    def assigns(v: Any, m: Any) -> None:
        w.assign(jnp.ones(2) if v > 5 else jnp.zeros(2))

    with pytest.raises(StateDivergenceError, match="w"):
        strategy.run(assigns, args)


def test_a_step_does_not_meet_the_mesh_of_another_strategy() -> None:
    def step(x: Any) -> Any:
        total = get_replica_context().all_reduce("sum", x * 1)
        signs = jnp.array([1.0, -1.0])
        return jax.vmap(lambda s: jax.lax.cond(s > 0, lambda: total, lambda: s * total))(signs)

    for count in (4, 2, 3):
        found = _strategy(count).run(step, (_each(np.ones((count, 5), np.float32)),))
        np.testing.assert_array_equal(found, np.outer([1, -1], [count] * 5))


_GRADIENTS: dict[str, Callable[[Any], Any]] = {
    # The gradient of a sum is a broadcast, to which JAX gives the type of the operand.
    "sum": jax.grad(lambda v: jnp.sum(v * v)),
    "mean": jax.grad(lambda v: jnp.mean(jnp.sin(v))),
    "max": jax.grad(lambda v: jnp.max(v)),
    "product": jax.grad(lambda v: (jnp.outer(v, v) @ v).sum()),
    "of a gradient": jax.grad(lambda v: jax.grad(lambda u: jnp.sum(u**3))(v).sum()),
    "slice": jax.grad(lambda v: v[1:3].sum()),
    "softmax": jax.grad(lambda v: jax.nn.softmax(v)[0]),
    "cumsum": jax.grad(lambda v: jnp.cumsum(v)[2]),
    "conversion": jax.grad(lambda v: v.astype(jnp.bfloat16).sum().astype(jnp.float32)),
}


@pytest.mark.parametrize("name", _GRADIENTS)
def test_a_gradient_has_no_mesh_in_its_type(name: str) -> None:
    gradient = _GRADIENTS[name]

    def step(x: Any) -> Any:
        slope = gradient(x)
        assert all(jax.typeof(v).sharding.mesh.empty for v in (slope, jnp.sin(slope)))
        both = jax.vmap(lambda s, v: (s * 1, jnp.sin(v)), in_axes=(0, None))(jnp.ones(2), slope)
        return get_replica_context().all_reduce("sum", both[1].sum(0))

    x = np.arange(5.0, dtype=np.float32)
    for count in (4, 2, 3):
        found = _strategy(count).run(step, (_each(np.stack([x] * count)),))
        np.testing.assert_allclose(found, count * 2 * np.sin(gradient(x)), rtol=1e-4, atol=1e-6)


def test_values_look_like_arrays_and_do_not_outlive_their_step() -> None:
    strategy = _strategy(2)
    kept: list[Any] = []

    def step(x: Any) -> Any:
        assert x.is_fully_replicated
        assert len(x.addressable_shards) == 1
        assert not x.is_deleted()
        kept.append(x * 2)
        return x

    strategy.run(step, (_each(ROWS[:2]),))
    np.testing.assert_array_equal(np.asarray(kept[1]), ROWS[1] * 2)
    with pytest.raises(ContextError, match="earlier step"):
        strategy.run(lambda x: x + kept[0], (_each(ROWS[:2]),))


def test_constraints_over_logical_axes_are_taken() -> None:
    devices = np.asarray(jax.devices()[:8], dtype=object).reshape(4, 2)
    mesh = jax.sharding.Mesh(devices, ("data", "model"))
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))
    spec = jax.sharding.PartitionSpec(None, "model")

    def step(x: Any) -> Any:
        return _sum(jax.lax.with_sharding_constraint(x, spec) * 2)

    x = jax.device_put(np.ones((8, 2), np.float32), strategy.per_replica_sharding)
    np.testing.assert_array_equal(strategy.run(step, (x,)), np.full((2, 2), 8.0))


def test_what_cannot_run_op_by_op_says_so() -> None:
    strategy = _strategy()
    with strategy.scope():
        w = jaxdist.Variable(0.0, name="w")

    def in_checkpoint(x: Any) -> Any:
        return jax.checkpoint(lambda v: w.assign_add(_sum(v.sum())) * v)(x)

    def without_turns(x: Any) -> Any:
        return jax.lax.map(lambda v: v, x[:0])

    def inner_map(x: Any) -> Any:
        spec = jax.sharding.PartitionSpec()
        mapped = jax.shard_map(
            lambda v: v, in_specs=spec, out_specs=spec, axis_names=frozenset({"logical"})
        )
        return mapped(x)

    with pytest.raises(ContextError, match=r"'w'.*checkpoint"):
        strategy.run(in_checkpoint, (_each(),))
    with pytest.raises(ValueError, match="zero-length scan") as error:
        strategy.run(without_turns, (_each(),))
    assert any("Run this step compiled" in note for note in error.value.__notes__)
    with pytest.raises(ContextError, match="shard_map op by op"):
        strategy.run(inner_map, (_each(),))


def test_ctrl_c_ends_every_replica_and_changes_nothing() -> None:
    strategy = _strategy()
    with strategy.scope():
        w = jaxdist.Variable(1.0)
    cleaned: list[int] = []

    def step(x: Any) -> Any:
        own = _own_id()
        w.assign_add(_sum(x.sum()))
        try:
            if own == 2:
                os.kill(os.getpid(), signal.SIGINT)
                while True:
                    pass
            return _sum(x)
        finally:
            cleaned.append(own)

    with pytest.raises(KeyboardInterrupt):
        strategy.run(step, (_each(),))
    assert sorted(cleaned) == [0, 1, 2]
    assert float(w) == 1.0
    assert float(strategy.run(lambda x: _sum(x.sum()), (_each(),))) == ROWS.sum()


def test_a_step_that_catches_everything_is_ended_all_the_same() -> None:
    caught: list[str] = []

    def step(x: Any) -> Any:
        for _ in range(3):
            try:
                x = _sum(x)
            except BaseException as error:
                caught.append(type(error).__name__)
        if _own_id() == 1:
            raise ValueError("late")
        return _sum(x)

    with pytest.raises(ValueError, match="late"):
        _strategy(2).run(step, (_each(ROWS[:2]),))
    assert not caught, "nothing failed until the third collective was through"


KINDS = ("raises", "returns", "other collective", "other shape", "exits")


def _fails(kind: str, replica: int, collective: int) -> Callable[[Any], Any]:
    """A step of three collectives in which one replica raises before one of them."""

    def step(x: Any) -> Any:
        for number in range(3):
            if number == collective and _own_id() == replica:
                if kind == "raises":
                    raise RuntimeError("on purpose")
                if kind == "returns":
                    return x
                if kind == "exits":
                    raise SystemExit(3)
                x = get_replica_context().all_gather(x, 0)[:2] if kind[6] == "c" else x[:1]
            x = _sum(x) / COUNT
            STATE.assign(x.sum())
        return x

    return step


STATE: Any = None


@pytest.mark.timeout(300)
def test_hundreds_of_failing_steps_leave_no_thread_and_no_wrong_state() -> None:
    global STATE
    strategy = _strategy(3)
    with strategy.scope():
        STATE = jaxdist.Variable(-1.0)
    x = _each(ROWS[:3])
    ways = [(k, r, c) for k in KINDS for r in range(3) for c in range(3)]
    steps = [_fails(*way) for way in ways]
    errors = (RuntimeError, DivergentCollectiveError, ShapeError, SystemExit)
    before = threading.active_count()
    for number in range(300):
        with pytest.raises(errors):
            strategy.run(steps[number % len(steps)], (x,))
        assert threading.active_count() == before
        assert not jaxdist.has_strategy()
    assert float(STATE) == -1.0
    total = strategy.run(lambda x: _sum(x), (x,))
    np.testing.assert_array_equal(total, ROWS[:3].sum(axis=0))
    STATE = None
