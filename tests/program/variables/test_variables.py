"""Variables that a step reads and assigns from a closure."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdist
from jaxdist import (
    IndexedSlices,
    PerReplica,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    get_replica_context,
)
from jaxdist.errors import (
    ArgumentError,
    ContextError,
    DonationError,
    MixedStrategyError,
    StateDivergenceError,
)
from tests.program.run.counting import compilations

pytestmark = pytest.mark.both_executors

ON_READ = VariableSynchronization.ON_READ
ON_WRITE = VariableSynchronization.ON_WRITE
NONE, SUM, MEAN, FIRST = VariableAggregation
ONE_AND_THREE = PerReplica([1.0, 3.0])


@pytest.fixture
def two() -> jaxdist.MirroredStrategy:
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])


def _made(strategy: jaxdist.Strategy, initial: Any = 10.0, **options: Any) -> Variable:
    with strategy.scope():
        return Variable(initial, name="w", **options)


def _copies(variable: Variable) -> list[Any]:
    return [np.asarray(v).tolist() for v in variable.values]


# The matrix of synchronization, aggregation and assignment

_COMBINED = {SUM: 4.0, MEAN: 2.0, FIRST: 1.0}


@pytest.mark.parametrize("aggregation", list(_COMBINED))
@pytest.mark.parametrize(
    ("call", "after"),
    [("assign", lambda x: x), ("assign_add", lambda x: 10 + x), ("assign_sub", lambda x: 10 - x)],
)
def test_a_mirrored_variable_combines_what_the_replicas_assign(
    two: jaxdist.Strategy,
    aggregation: VariableAggregation,
    call: str,
    after: Callable[[float], float],
) -> None:
    v = _made(two, aggregation=aggregation)

    result = two.run(lambda x: getattr(v, call)(x), (ONE_AND_THREE,))

    expected = after(_COMBINED[aggregation])
    assert _copies(v) == [expected, expected]
    assert float(result) == expected


@pytest.mark.parametrize("call", ["assign", "assign_add", "assign_sub"])
def test_a_mirrored_variable_without_aggregation_is_never_left_different(
    two: jaxdist.Strategy, call: str
) -> None:
    v = _made(two)

    with pytest.raises(StateDivergenceError, match="2 replicas: w"):
        two.run(lambda x: getattr(v, call)(x), (ONE_AND_THREE,))
    assert _copies(v) == [10.0, 10.0]

    def with_all_reduce(x: Any) -> None:
        getattr(v, call)(get_replica_context().all_reduce("mean", x))

    two.run(with_all_reduce, (ONE_AND_THREE,))
    assert (
        _copies(v) == {"assign": [2.0] * 2, "assign_add": [12.0] * 2, "assign_sub": [8.0] * 2}[call]
    )


def test_only_the_last_value_of_a_step_has_to_be_equal(two: jaxdist.Strategy) -> None:
    v = _made(two)

    def step(x: Any) -> None:
        v.assign(x)
        v.assign(get_replica_context().all_reduce("sum", v.value()))

    two.run(step, (ONE_AND_THREE,))
    assert _copies(v) == [4.0, 4.0]


@pytest.mark.parametrize("aggregation", list(VariableAggregation))
@pytest.mark.parametrize(
    ("call", "expected"),
    [("assign", [1.0, 3.0]), ("assign_add", [11.0, 13.0]), ("assign_sub", [9.0, 7.0])],
)
def test_an_on_read_variable_is_assigned_by_each_replica_for_itself(
    two: jaxdist.Strategy, aggregation: VariableAggregation, call: str, expected: list[float]
) -> None:
    v = _made(two, aggregation=aggregation, synchronization=ON_READ)

    result = two.run(lambda x: getattr(v, call)(x), (ONE_AND_THREE,))

    assert _copies(v) == expected
    assert [float(x) for x in result.values] == expected
    assert two.run(lambda: v + 1).values[1] == expected[1] + 1


@pytest.mark.parametrize("synchronization", [ON_WRITE, ON_READ])
@pytest.mark.parametrize("aggregation", list(VariableAggregation))
def test_a_constant_is_assigned_as_it_is_but_cannot_be_summed(
    two: jaxdist.Strategy,
    synchronization: VariableSynchronization,
    aggregation: VariableAggregation,
) -> None:
    v = _made(two, aggregation=aggregation, synchronization=synchronization)

    if synchronization is ON_WRITE and aggregation is SUM:
        with pytest.raises(ArgumentError, match=r"'w'\.assign was given array\(2"):
            two.run(lambda: v.assign(2.0))
        two.run(lambda: v.assign_add(jnp.ones(())))
        assert _copies(v) == [12.0, 12.0]
    else:
        two.run(lambda: v.assign(2.0))
        assert _copies(v) == [2.0, 2.0]


@pytest.mark.parametrize("aggregation", list(_COMBINED))
def test_a_per_replica_value_from_a_closure_is_each_replicas_own(
    two: jaxdist.Strategy, aggregation: VariableAggregation
) -> None:
    v = _made(two, aggregation=aggregation)

    two.run(lambda: v.assign(ONE_AND_THREE))

    assert _copies(v) == [_COMBINED[aggregation]] * 2


def test_the_first_replica_decides_also_for_booleans(two: jaxdist.Strategy) -> None:
    v = _made(two, False, aggregation=FIRST)

    two.run(lambda: v.assign(get_replica_context().replica_id_in_sync_group == 0))

    assert _copies(v) == [True, True]


def test_a_variable_of_no_strategy_is_changed_once_by_each_replica() -> None:
    v = Variable(0.0)
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(3)])

    def step(x: Any) -> None:
        v.assign_add(1.0)
        v.assign_add(x)

    strategy.run(step, (PerReplica([1.0, 2.0, 4.0]),))

    assert float(v) == 10.0
    assert float(v + jnp.ones(())) == 11.0
    with pytest.raises(StateDivergenceError):
        strategy.run(lambda x: v.assign(x), (PerReplica([1.0, 2.0, 4.0]),))


# Laws


def test_a_step_gives_what_it_gives_in_functional_form(strategy: jaxdist.Strategy) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 3)).astype(np.float32)
    y = rng.normal(size=24).astype(np.float32)
    batch = jax.device_put((x, y), strategy.per_replica_sharding)
    with strategy.scope():
        w, b = Variable(np.zeros(3, np.float32), name="w"), Variable(0.0, name="b")
        seen = Variable(0, name="seen", synchronization=ON_READ, aggregation=SUM)

    def step(batch: Any) -> Any:
        def loss(params: Any) -> Any:
            # Computed by each replica: not all strategies have a copy of a variable for each.
            seen.assign_add(jnp.asarray(len(batch[1])))
            return jnp.mean((batch[0] @ params[0] + params[1] - batch[1]) ** 2)

        value, grads = jax.value_and_grad(loss)((w.value(), b.value()))
        grads = get_replica_context().all_reduce("mean", grads)
        w.assign_sub(0.1 * grads[0])
        b.assign_sub(0.1 * grads[1])
        return get_replica_context().all_reduce("mean", value)

    losses = [float(strategy.run(step, (batch,))) for _ in range(3)]

    params, expected = [np.zeros(3), 0.0], []
    for _ in range(3):
        error = x @ params[0] + params[1] - y
        expected.append(np.mean(error**2))
        params = [params[0] - 0.2 * error @ x / 24, params[1] - 0.2 * error.mean()]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(w.numpy(), params[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(b.numpy(), params[1], rtol=1e-4, atol=1e-6)
    assert int(seen) == 3 * 24


def _count_in(wrap: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> Any:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    v = _made(strategy, 0.0)

    def add(x: Any) -> Any:
        v.assign_add(1.0)
        return v * x

    results = [strategy.run(lambda x: wrap(add)(x), (2.0,)) for _ in range(2)]
    return float(v), [float(r) for r in results]


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("wrap", "times", "results"),
    [
        (lambda f: f, 1, [2.0, 4.0]),
        (jax.jit, 1, [2.0, 4.0]),
        (jax.grad, 1, [1.0, 2.0]),
        (lambda f: lambda x: jax.grad(jax.jit(f))(x), 1, [1.0, 2.0]),
        (lambda f: lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, None, 3)[0], 3,
         [12.0, 30.0]),
        (lambda f: lambda x: jax.lax.fori_loop(0, 3, lambda _, c: c + f(x), 0.0), 3, [12.0, 30.0]),
        (lambda f: lambda x: jax.lax.cond(x > 0, f, lambda x: x, x), 1, [2.0, 4.0]),
        (lambda f: lambda x: jax.lax.cond(x < 0, f, lambda x: x, x), 0, [2.0, 2.0]),
        (lambda f: jax.checkpoint(f), 1, [2.0, 4.0]),
        (lambda f: lambda x: jax.jvp(f, (x,), (x,))[1], 1, [2.0, 4.0]),
        (
            lambda f: jax.grad(
                lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, None, 3)[0]
            ),
            3,
            [6.0, 15.0],
        ),
    ],
)  # fmt: skip
def test_assigning_works_inside_transformations(
    wrap: Callable[..., Any], times: int, results: list[float]
) -> None:
    assert _count_in(wrap) == (2.0 * times, results)


def test_what_is_assigned_takes_no_part_in_the_gradient(two: jaxdist.Strategy) -> None:
    v = _made(two)

    def step(x: Any) -> Any:
        def loss(x: Any) -> Any:
            v.assign(x * x)
            return v * x

        return jax.grad(loss)(x)

    assert float(two.run(step, (3.0,))) == 9.0


def test_reading_under_checkpoint_before_assigning_has_the_gradient_of_the_old_value(
    two: jaxdist.Strategy,
) -> None:
    v = _made(two, 2.0)

    def step(x: Any) -> Any:
        gradient = jax.grad(jax.checkpoint(lambda x: jnp.sin(v * x)))(x)
        v.assign_add(1.0)
        return gradient

    np.testing.assert_allclose(two.run(step, (0.5,)), 2 * np.cos(1.0), rtol=1e-6)
    np.testing.assert_allclose(two.run(step, (0.5,)), 3 * np.cos(1.5), rtol=1e-6)


def test_assigning_under_checkpoint_and_gradient_would_happen_twice_and_is_refused(
    two: jaxdist.Strategy,
) -> None:
    v = _made(two)

    def step(x: Any) -> Any:
        def loss(x: Any) -> Any:
            v.assign_add(1.0)
            return jnp.sin(jnp.sin(x))

        return jax.grad(jax.checkpoint(loss))(x)

    with pytest.raises(ContextError, match=r"checkpoint.*\['w'\]"):
        two.run(step, (1.0,))
    assert float(v) == 10.0


def test_assigning_a_value_that_vmap_maps_over_is_an_error_with_the_name(
    two: jaxdist.Strategy,
) -> None:
    v = _made(two)

    with pytest.raises(ArgumentError, match=r"'w'\.assign was given a value that jax\.vmap"):
        two.run(lambda x: jax.vmap(lambda row: v.assign(row))(x), (jnp.ones(3),))
    assert (
        two.run(lambda x: jax.vmap(lambda row: row * v)(x), (jnp.ones(3),)).tolist() == [10.0] * 3
    )


def test_a_jitted_function_sees_what_was_assigned_before_it(two: jaxdist.Strategy) -> None:
    v = _made(two, 1.0)
    times_v = jax.jit(lambda x: x * v)

    def step(x: Any) -> Any:
        before = times_v(x)
        v.assign_add(1.0)
        return before, times_v(x)

    assert [float(r) for r in two.run(step, (10.0,))] == [10.0, 20.0]
    assert [float(r) for r in two.run(step, (10,))] == [20.0, 30.0]

    def other(x: Any) -> Any:
        return times_v(x)

    assert float(two.run(other, (10.0,))) == 30.0
    v.assign(7.0)
    assert float(two.run(other, (10.0,))) == 70.0


def _scanned(body: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def carry(c: Any, _: Any) -> Any:
        return c + body(c), None

    return lambda x: jax.lax.scan(carry, x, None, 1)[0] - x


@pytest.mark.parametrize(
    "wrap",
    [
        _scanned,
        jax.checkpoint,
        jax.jit,
        jax.vmap,
        lambda f: lambda x: jax.lax.cond(x[0] > 0, f, f, x),
        lambda f: jax.jit(jax.checkpoint(jax.jit(f))),
        lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum() * 10),
    ],
)
def test_one_function_traced_twice_in_a_step_reads_what_the_variable_has_then(
    two: jaxdist.Strategy, wrap: Callable[..., Any]
) -> None:
    v = _made(two, 1.0)
    times_v = wrap(lambda x: x * v)

    def step(x: Any) -> Any:
        before = times_v(x)
        v.assign_add(1.0)
        return before, times_v(x)

    x = jnp.full(1, 10.0)
    for start in (1.0, 2.0):
        assert [r.tolist() for r in two.run(step, (x,))] == [[10 * start], [10 * start + 10]]
    assert [r.tolist() for r in two.run(lambda x: step(x), (x,))] == [[30.0], [40.0]]


@pytest.mark.compiled
def test_a_collective_in_a_branch_that_a_variable_decides_is_allowed_when_it_is_mirrored(
    two: jaxdist.Strategy,
) -> None:
    mirrored = _made(two, 1.0)
    own = _made(two, 1.0, synchronization=ON_READ)

    def step(v: Variable, x: Any) -> Any:
        def summed(x: Any) -> Any:
            return get_replica_context().all_reduce("sum", x)

        return jax.lax.cond(v.value() > 0, summed, lambda x: x, x)

    assert [float(x) for x in two.run(step, (mirrored, ONE_AND_THREE)).values] == [4.0, 4.0]
    with pytest.raises(jaxdist.errors.DivergentCollectiveError):
        two.run(step, (own, ONE_AND_THREE))


def test_reductions_of_bfloat16_in_a_loop_go_with_logical_devices() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))
    v = _made(strategy, np.zeros(2), dtype="bfloat16")

    def step(x: Any) -> None:
        def body(carry: Any, _: Any) -> Any:
            v.assign_add(get_replica_context().all_reduce("sum", x))
            return carry, None

        jax.lax.scan(body, 0.0, None, 3)

    for _ in range(2):
        strategy.run(step, (jnp.ones(2, "bfloat16"),))

    assert v.numpy().astype(np.float32).tolist() == [24.0, 24.0]


# Calls


@pytest.mark.compiled
def test_a_steady_loop_over_variables_compiles_once(two: jaxdist.Strategy) -> None:
    v, traces = _made(two, 0.0), []

    def step(x: Any) -> Any:
        traces.append(1)
        v.assign_add(x)
        return v * 2

    two.run(step, (1.0,))
    with compilations() as count:
        for _ in range(20):
            two.run(step, (1.0,))

    assert count.number == 0
    assert float(v) == 21.0
    first = len(traces)
    two.run(step, (1,))
    assert len(traces) == first + 1


def _summed(x: Any) -> Any:
    return get_replica_context().all_reduce("sum", x)


def _in_a_scan(v: Variable, x: Any) -> Any:
    def body(total: Any, row: Any) -> Any:
        v.assign_add(jnp.sum(_summed(row)))
        return total + v, None

    return jax.lax.scan(body, 0.0, x)[0]


# The step, the number of times that it is traced, and what the variable has after one call of it
# with rows [1, 2] on the first replica and [3, 4] on the second, from 10.
TRACED: dict[str, tuple[Callable[[Variable, Any], Any], int, float]] = {
    "none": (lambda v, x: x * 2, 1, 10.0),
    "read": (lambda v, x: v * x, 1, 10.0),
    "assigned": (lambda v, x: v.assign(_summed(x).sum()), 1, 10.0),
    "added to": (lambda v, x: v.assign_add(_summed(x).sum()), 1, 20.0),
    "read and assigned": (lambda v, x: v.assign(v * 2 + v), 1, 30.0),
    "read under grad": (lambda v, x: jax.grad(lambda y: (y * v).sum())(x), 1, 10.0),
    "assigned under grad": (
        lambda v, x: jax.grad(lambda y: (v.assign(v * _summed(y).sum()) * y).sum())(x),
        1,
        100.0,
    ),
    "assigned under grad of grad": (
        lambda v, x: jax.grad(lambda y: jax.grad(lambda z: z * v.assign_add(1.0))(y))(x[0]),
        1,
        11.0,
    ),
    "assigned under vmap": (lambda v, x: jax.vmap(lambda y: y * v.assign_add(1.0))(x), 1, 11.0),
    "read in a scan": (lambda v, x: jax.lax.map(lambda row: row * v, x), 1, 10.0),
    "read in a jit": (lambda v, x: jax.jit(lambda y: y * v)(x), 1, 10.0),
    "added to in a scan": (_in_a_scan, 1, 20.0),
    "added to in a cond": (
        lambda v, x: jax.lax.cond(
            _summed(x)[0] > 3, lambda: v.assign_add(1.0), lambda: v.assign(3.0)
        ),
        1,
        11.0,
    ),
    "added to in a scan, read after": (lambda v, x: (_in_a_scan(v, x), v * 1.0), 1, 20.0),
    # What the loop reads is a constant of it unless the variable is a ref from the start.
    "read and assigned in a scan": (
        lambda v, x: jax.lax.scan(lambda c, row: (c, v.assign(v * 2)), 0.0, x)[1],
        2,
        40.0,
    ),
    "added to in a while": (
        lambda v, x: jax.lax.while_loop(
            lambda n: n < 3, lambda n: n + (v.assign_add(1.0) > 0), jnp.int32(0)
        ),
        1,
        13.0,
    ),
}


@pytest.mark.compiled
@pytest.mark.parametrize("deterministic", [False, 2])
@pytest.mark.parametrize("uses", TRACED)
def test_a_step_with_variables_is_traced_once(uses: str, deterministic: Any) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"], deterministic=deterministic)
    v, traces = _made(strategy), []
    run, count, after = TRACED[uses]

    def step(x: Any) -> Any:
        traces.append(1)
        return run(v, x)

    x = PerReplica([np.array([1.0, 2.0], "f"), np.array([3.0, 4.0], "f")])
    strategy.lower(step, (x,))
    assert len(traces) == count
    results = strategy.run(step, (x,))

    assert len(traces) == count
    assert float(v) == after
    v.assign(10.0)
    if deterministic:
        return
    with jaxdist.config.run_eagerly():
        expected = strategy.run(step, (x,))
    assert float(v) == after
    for result, other in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(result, other, rtol=1e-6)


@pytest.mark.compiled
def test_a_while_loop_whose_condition_reads_what_its_body_changes_is_refused(
    two: jaxdist.Strategy,
) -> None:
    v, other = _made(two), _made(two)

    def step() -> Any:
        return jax.lax.while_loop(lambda n: v < 100, lambda n: n + v.assign_add(40.0), 0.0)

    with pytest.raises(ContextError, match="Carry the value in the state of the loop"):
        two.run(step)
    with jaxdist.config.run_eagerly():
        assert float(two.run(step)) == 50.0 + 90.0 + 130.0

    def reads() -> Any:
        def body(n: Any) -> Any:
            other.assign_add(v * 1.0)
            return n + 1.0

        jax.lax.fori_loop(0, 2, lambda _, x: (v.assign_add(1.0), x)[1], 0.0)
        return jax.lax.while_loop(lambda n: n < v, body, 10.0)

    v.assign(11.0)
    assert float(two.run(reads)) == 13.0
    assert float(other) == 10.0 + 3 * 13.0


@pytest.mark.compiled
@pytest.mark.parametrize("uses", [u for u in TRACED if u != "read and assigned in a scan"])
def test_an_uneven_step_with_variables_is_traced_once_for_each_number_of_rows(
    two: jaxdist.Strategy, uses: str
) -> None:
    v, traces = _made(two), []
    run, count, _ = TRACED[uses]

    def step(x: Any) -> Any:
        traces.append(len(x))
        return run(v, x[:1])

    two.run(step, (PerReplica([np.array([1.0, 2.0], "f"), np.array([3.0], "f")]),))

    assert traces == [2, 1] * count


@pytest.mark.compiled
def test_a_step_with_a_variable_and_an_nnx_model_is_traced_once(two: jaxdist.Strategy) -> None:
    with two.scope():
        model, seen = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), Variable(0)
    traces = []

    def step(model: Any, x: Any) -> Any:
        traces.append(1)
        grads = nnx.grad(lambda m: m(x).sum() + seen * 0.0)(model)
        seen.assign_add(1)
        grads = get_replica_context().all_reduce("mean", grads)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model), grads))
        return seen * 1

    x = jax.device_put(np.ones((4, 2), "f"), two.per_replica_sharding)
    assert [int(two.run(step, (model, x))) for _ in range(3)] == [1, 2, 3]
    assert len(traces) == 1


def test_variables_that_are_only_read_are_no_results(two: jaxdist.Strategy) -> None:
    read, written = _made(two, 2.0), _made(two, 3.0)

    def step(x: Any) -> Any:
        written.assign(read * x)

    program = two.lower(step, (1.0,))

    assert list(program.results) == ["variable w"]
    assert list(program.inputs) == ["variable w", "args[0]", "variable w (2)"]
    assert float(written) == 3.0


@pytest.mark.parametrize("flag", [True, False])
def test_static_arguments_and_keywords_go_with_variables(two: jaxdist.Strategy, flag: bool) -> None:
    v = _made(two, 0.0)

    def step(x: Any, *, flag: bool, a: Any) -> Any:
        v.assign(x + a if flag else x - a)
        return {"flag": flag, "v": v.value()}

    for _ in range(3):
        result = two.run(step, (3.0,), {"flag": flag, "a": 1.0})
    assert result["flag"] is flag
    assert float(v) == float(result["v"]) == (4.0 if flag else 2.0)


def test_keyword_arguments_keep_their_places(two: jaxdist.Strategy) -> None:
    v, w = _made(two, 1.0), _made(two, 100.0)

    def step(x: Any, *, b: Any, a: Any) -> Any:
        v.assign(a - b)
        return x + a * 10 + b + w

    for _ in range(3):
        assert float(two.run(step, (1000.0,), {"b": 2.0, "a": 5.0})) == 1152.0
        assert float(v) == 3.0


def test_flax_modules_and_variables_are_updated_by_one_step(two: jaxdist.Strategy) -> None:
    from flax import nnx

    model: Any = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.ones((2, 1))
    v = _made(two, 0.0)

    def step(model: Any, x: Any) -> Any:
        model.bias[...] = model.bias[...] + x
        v.assign_add(model.bias[...][0])
        return model(jnp.ones((1, 2)))[0, 0]

    assert [float(two.run(step, (model, 1.0))) for _ in range(3)] == [3.0, 4.0, 5.0]
    assert float(v) == 6.0
    assert float(model.bias[...][0]) == 3.0


def test_uneven_batches_and_variables(two: jaxdist.Strategy) -> None:
    total = _made(two, 0.0, aggregation=SUM)
    own = _made(two, 0.0, synchronization=ON_READ, aggregation=SUM)

    def step(x: Any) -> None:
        total.assign_add(x.sum())
        own.assign_add(x.sum())

    for _ in range(2):
        two.run(step, (PerReplica([np.ones(3, np.float32), np.ones(1, np.float32)]),))

    assert float(total) == 8.0
    assert _copies(own) == [6.0, 2.0]


def test_a_step_that_fails_leaves_variables_as_they_were(two: jaxdist.Strategy) -> None:
    v = _made(two)

    def step(x: Any) -> None:
        v.assign_add(x)
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        two.run(step, (1.0,))
    assert float(v) == 10.0
    two.run(lambda: v.assign_add(1.0))
    assert float(v) == 11.0


@pytest.mark.compiled
def test_a_donated_array_that_a_variable_holds_is_refused(two: jaxdist.Strategy) -> None:
    v = _made(two, [1.0])
    options = jaxdist.RunOptions(donate_argnums=(0,))

    def step(x: Any) -> Any:
        v.assign_add(x)
        return x * 2

    for _ in range(2):
        with pytest.raises(DonationError, match="variable w"):
            two.run(step, (v.value(),), options=options)
    assert v.numpy().tolist() == [1.0]
    kept = jax.device_put(np.ones(1, np.float32), two.replicated_sharding)
    two.run(step, (kept,), options=options)
    assert kept.is_deleted()
    assert v.numpy().tolist() == [2.0]


def test_a_function_that_is_gone_frees_its_variables(two: jaxdist.Strategy) -> None:
    def use_one() -> weakref.ref[Variable]:
        v = _made(two)
        two.run(lambda x: v.assign_add(x), (1.0,))
        return weakref.ref(v)

    gone = use_one()
    gc.collect()

    assert gone() is None


def test_checkpoints_of_random_keys(two: jaxdist.Strategy) -> None:
    key = _made(two, jax.random.key(0))

    def draw() -> Any:
        new, use = jax.random.split(key.value())
        key.assign(new)
        return jax.random.normal(use)

    expected_key, draws = jax.random.key(0), []
    for _ in range(2):
        expected_key, use = jax.random.split(expected_key)
        draws.append(float(jax.random.normal(use)))
    # Op by op, the operations of a draw are not fused, which may round another way.
    assert [float(two.run(draw)) for _ in range(2)] == pytest.approx(draws, rel=1e-6)


# Errors


def test_a_variable_of_another_strategy_is_refused(two: jaxdist.Strategy) -> None:
    v = _made(jaxdist.MirroredStrategy(["cpu:0"]))

    with pytest.raises(MixedStrategyError, match="'w'"):
        two.run(lambda: v.value())
    assert float(v) == 10.0


def test_making_a_variable_in_a_step_is_refused(two: jaxdist.Strategy) -> None:
    with pytest.raises(ContextError, match="'inner'"):
        two.run(lambda: Variable(1.0, name="inner").value())


def test_a_step_with_variables_inside_another_trace_is_refused(two: jaxdist.Strategy) -> None:
    v = _made(two)

    def step(x: Any) -> Any:
        v.assign_add(x)
        return x

    with pytest.raises(ContextError, match=r"\['w'\]"):
        jax.jit(lambda x: two.run(step, (x,)))(1.0)
    assert float(v) == 10.0


@pytest.mark.compiled
def test_a_step_that_changes_another_variable_in_a_loop_at_every_trace_is_refused(
    two: jaxdist.Strategy,
) -> None:
    made = iter([_made(two) for _ in range(50)])

    def step() -> Any:
        v = next(made)
        return _scanned(lambda x: x + v.assign(v + 1.0))(0.0)

    with pytest.raises(ContextError, match="traced"):
        two.run(step)


def test_the_copies_of_all_replicas_cannot_be_read_in_a_step(two: jaxdist.Strategy) -> None:
    v = _made(two)

    with pytest.raises(ContextError, match="'w'"):
        two.run(lambda: v.values)


# Merge functions and updates


def test_in_a_merge_function_a_variable_is_read_and_assigned_as_a_whole(
    two: jaxdist.Strategy,
) -> None:
    mirrored = _made(two)
    own = _made(two, synchronization=ON_READ, aggregation=SUM)

    def merge(strategy: Any, x: Any) -> Any:
        own.assign(x)
        total = own.value()
        own.assign(8.0)
        mirrored.assign(strategy.reduce("MEAN", x, axis=None))
        return total, strategy.reduce("SUM", own, axis=None)

    def step(x: Any) -> Any:
        return get_replica_context().merge_call(merge, args=(x,))

    results = two.run(step, (ONE_AND_THREE,))

    assert [float(r) for r in results] == [4.0, 8.0]
    assert (_copies(mirrored), _copies(own)) == ([2.0, 2.0], [4.0, 4.0])


def test_update_changes_each_copy_by_itself(two: jaxdist.Strategy) -> None:
    own = _made(two, synchronization=ON_READ, aggregation=SUM)
    mirrored = _made(two, aggregation=SUM)

    def add(v: Variable, x: Any) -> Any:
        return v.assign_add(x)

    local = two.extended.update(own, add, (ONE_AND_THREE,), group=False)
    assert [float(x) for x in local] == [11.0, 13.0] == _copies(own)
    assert float(two.extended.update(mirrored, add, (1.0,))) == 11.0
    with pytest.raises(StateDivergenceError, match="w"):
        two.extended.update(mirrored, add, (ONE_AND_THREE,))

    def step(x: Any) -> None:
        def merge(strategy: Any, x: Any) -> None:
            strategy.extended.update(own, add, (x,))

        get_replica_context().merge_call(merge, args=(x,))

    two.run(step, (ONE_AND_THREE,))
    assert _copies(own) == [12.0, 16.0]
    no_variable: Any = 1.0
    with pytest.raises(TypeError, match="Variable"):
        two.extended.update(no_variable, add)


def test_the_view_knows_the_variables_of_its_strategy(two: jaxdist.Strategy) -> None:
    mine, other = _made(two), Variable(1.0)
    extended = two.extended

    assert extended.variable_created_in_scope(mine)
    assert not extended.variable_created_in_scope(other)
    assert extended.value_container(mine) is mine
    assert float(extended.read_var(mine)) == 10.0
    assert extended.non_slot_devices([mine]) == extended.worker_devices
    with two.scope(), extended.colocate_vars_with(mine):
        assert extended.variable_created_in_scope(Variable(1.0))
    with pytest.raises(RuntimeError, match="scope"), extended.colocate_vars_with(mine):
        pass
    with two.scope():
        wrongs: list[Any] = [other, 1.0]
        for wrong in wrongs:
            with (
                pytest.raises(ValueError, match="made in the scope"),
                extended.colocate_vars_with(wrong),
            ):
                pass


# Rows


_ROWS = PerReplica([np.array([1.0], np.float32), np.array([3.0], np.float32)])


@pytest.mark.parametrize(
    ("call", "aggregation", "expected"),
    [
        ("scatter_add", SUM, [1, 6, 3]),
        ("scatter_add", MEAN, [1, 4, 3]),
        ("scatter_add", FIRST, [1, 3, 3]),
        ("scatter_sub", SUM, [1, -2, 3]),
        ("scatter_mul", SUM, [1, 6, 3]),
        ("scatter_mul", MEAN, [1, 1.5, 3]),
        ("scatter_mul", FIRST, [1, 2, 3]),
        ("scatter_div", SUM, [1, 2 / 3, 3]),
        ("scatter_min", FIRST, [1, 1, 3]),
        ("scatter_max", FIRST, [1, 2, 3]),
        ("scatter_update", FIRST, [1, 1, 3]),
    ],
)
def test_rows_of_all_replicas_are_applied_by_the_aggregation(
    two: jaxdist.Strategy, call: str, aggregation: VariableAggregation, expected: list[float]
) -> None:
    v = _made(two, [1.0, 2.0, 3.0], aggregation=aggregation)

    two.run(lambda x: getattr(v, call)(IndexedSlices(x, jnp.array([1]))), (_ROWS,))

    np.testing.assert_allclose(_copies(v), [expected, expected], rtol=1e-6)


@pytest.mark.parametrize("call", ["scatter_min", "scatter_max", "scatter_update"])
@pytest.mark.parametrize("aggregation", [SUM, MEAN])
def test_picking_rows_has_no_sum_or_mean(
    two: jaxdist.Strategy, call: str, aggregation: VariableAggregation
) -> None:
    v = _made(two, [1.0, 2.0, 3.0], aggregation=aggregation)

    with pytest.raises(NotImplementedError, match="'w'"):
        two.run(lambda x: getattr(v, call)(IndexedSlices(x, jnp.array([1]))), (_ROWS,))
    assert _copies(v)[0] == [1.0, 2.0, 3.0]
    getattr(v, call)(IndexedSlices([2.0], [1]))


def test_rows_without_aggregation_have_to_be_equal(two: jaxdist.Strategy) -> None:
    v = _made(two, [1.0, 2.0, 3.0])

    with pytest.raises(StateDivergenceError, match="w"):
        two.run(lambda x: v.scatter_add(IndexedSlices(x, jnp.array([1]))), (_ROWS,))
    two.run(lambda: v.scatter_add(IndexedSlices([5.0], [2])))
    assert _copies(v) == [[1.0, 2.0, 8.0]] * 2
