"""Work that is placed on one logical device of each replica."""

from typing import Any

import flax.nnx as nnx
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

import jaxdist
from jaxdist import PerReplica
from jaxdist._program.logical.logical_device import assigned, on_device
from jaxdist._program.logical.placed_region import run_region
from jaxdist._program.logical.placing import Together, find_obstacle, make_schedule
from jaxdist.errors import ArgumentError, ArgumentTypeError, ContextError
from tests.strategies.logical import tpus
from tests.strategies.oracle import refused
from tests.tables import examples

FOUR_BY_TWO = tpus(4, 2)
TWO_BY_FOUR = tpus(2, 4)


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype("float32")


def _train(strategy: Any, layers: Any, steps: int) -> tuple[Any, list[float], Any]:
    """Two layers, gradient descent; returns parameters, losses, and the program."""
    params: Any = [(_random(5, 16), _random(16)), (_random(16, 3), _random(3))]
    rows, labels = _random(16, 5), np.tanh(_random(16, 3))
    replicas = strategy.num_replicas_in_sync
    batch = [PerReplica(np.split(a, replicas)) for a in (rows, labels)]

    def step(params: Any, x: Any, y: Any) -> Any:
        context = jaxdist.get_replica_context()

        def loss(params: Any) -> Any:
            return ((layers(params, x) - y) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        grads = context.all_reduce("mean", grads)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
        return params, context.all_reduce("mean", value)

    program = strategy.lower(step, (params, *batch))
    losses = []
    for _ in range(steps):
        params, value = strategy.run(step, (params, *batch))
        losses.append(float(value))
    return params, losses, program


def _plain(params: Any, x: Any) -> Any:
    (w, b), (v, c) = params
    return jnp.tanh(x @ w + b[None]) @ v + c[None]


def _assigned(params: Any, x: Any) -> Any:
    assign = FOUR_BY_TWO.experimental_assign_to_logical_device
    (w, b), (v, c) = params
    hidden = assign(jnp.tanh(x @ w + b[None]), 0)
    return assign(hidden @ v + c[None], 1)


def _said(params: Any, x: Any) -> Any:
    @FOUR_BY_TWO.on_logical_device(0)
    def first(layer: Any, x: Any) -> Any:
        return jnp.tanh(x @ layer[0] + layer[1][None])

    @FOUR_BY_TWO.on_logical_device(1)
    def second(layer: Any, x: Any) -> Any:
        return x @ layer[0] + layer[1][None]

    return second(params[1], first(params[0], x))


@pytest.mark.parametrize("layers", [_assigned, _said], ids=["assign", "on_logical_device"])
def test_a_layer_on_each_of_two_logical_devices_trains_as_on_one_device(layers: Any) -> None:
    params, losses, program = _train(FOUR_BY_TWO, layers, 50)
    alone, expected, _ = _train(jaxdist.OneDeviceStrategy("cpu:0"), _plain, 50)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    # There and back, on each of the two.
    assert [work.device for work in program.placed] == [0, 1, 1, 0]
    assert all(work.operations > 1 for work in program.placed)
    compiled = program.compile()
    text = compiled.as_text()
    assert text.count(" conditional(") == 4
    # The products are in the conditionals: what every device runs has none.
    assert " dot(" not in text[text.index("\nENTRY") :]
    assert "placed:\n    logical device 0:" in repr(program)
    assert "test_logical_work.py" in repr(program)
    assert compiled.explain().placed == program.placed
    assert "results for others" in str(compiled.explain())


def _everywhere(assign: Any, on: Any, split: Any) -> Any:
    """Marks under grad, scan, remat, vmap, jvp, and in rules of derivatives."""

    @jax.custom_vjp
    def sine(x: Any) -> Any:
        return assign(jnp.sin(x), 3)

    sine.defvjp(lambda x: (assign(jnp.sin(x), 3), x), lambda x, ct: (assign(ct * jnp.cos(x), 3),))

    def block(w: Any, x: Any) -> Any:
        h = assign(jax.nn.relu(x @ w), 1)
        return sine(on(2)(lambda w, h: jax.nn.gelu(h @ w) + h)(w, h))

    def step(w: Any, x: Any, n: Any) -> Any:
        def loss(w: Any, x: Any) -> Any:
            def body(carry: Any, _: Any) -> Any:
                return jax.checkpoint(block)(w, carry), carry.mean()

            carry, means = jax.lax.scan(body, x, length=2)
            rows = jax.vmap(lambda row: assign(jnp.tanh(row), 0) + on(3)(jnp.cos)(row))(carry)
            rows = split(rows, [1, 4])
            return (assign(rows * 2, 2) ** 2).mean() + means.sum(), rows

        (value, rows), (dw, dx) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(w, x)

        def kinds(v: Any) -> Any:
            key = jax.random.key(7)
            return v.astype("bfloat16"), v.astype("float16"), v.astype("int8"), v + 1j, key, -0 * v

        *many, key, zeros = on(1)(kinds)(rows)
        _, turned = jax.lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, assign(c[1] * 2, 1)), (0, n)
        )
        return {
            "value": value,
            "gradients": (jaxdist.get_replica_context().all_reduce("mean", dw), dx),
            "kinds": many,
            "signs": jnp.signbit(zeros),
            "key": jax.random.normal(key, (2,)),
            "chosen": (assign(jnp.argmax(rows), 1), assign(rows > 0, 2)),
            "jvp": jax.jvp(lambda w: assign(jax.nn.relu(x @ w), 1).sum(), (w,), (w,))[1],
            "second": jax.hessian(lambda s: assign(jnp.sin(s) * s, 1) + on(0)(jnp.exp)(s))(n),
            "while": turned,
            "cond": jax.lax.cond(n > 0, lambda n: assign(n * 3, 2), on(1)(jnp.sin), n),
            "as it is": (assign(n, 1), on(1)(lambda a, b, c: {c: a + b})(n, b=2.0, c="sum")),
        }

    return step


def test_placing_changes_no_value_under_any_transformation() -> None:
    args = (0.5 * _random(4, 4), PerReplica([_random(3, 4), _random(3, 4) + 1]), 1.5)
    placed = _everywhere(
        TWO_BY_FOUR.experimental_assign_to_logical_device,
        TWO_BY_FOUR.on_logical_device,
        TWO_BY_FOUR.experimental_split_to_logical_devices,
    )
    made = TWO_BY_FOUR.run(placed, args)
    plain = _everywhere(lambda x, _: x, lambda _: lambda fn: fn, lambda x, _: x)
    expected = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]).run(plain, args)
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(made), jax.tree.leaves(expected), strict=True
    ):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        got, want = (np.asarray(x).astype("complex64") for x in (got, want))
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5, err_msg=name)


def test_work_of_which_none_needs_the_other_is_one_conditional_with_one_exchange() -> None:
    on = TWO_BY_FOUR.on_logical_device

    def step(w: Any, x: Any) -> Any:
        def towers(w: Any, x: Any) -> Any:
            made = [on(i)(lambda v, x: jnp.tanh(x @ v))(w[i], x) for i in range(4)]
            return (sum(made[1:], made[0]) ** 2).sum()

        return jax.value_and_grad(towers)(w, x)

    w, x = _random(4, 3, 3), _random(5, 3)
    compiled = TWO_BY_FOUR.lower(step, (w, x)).compile()
    assert compiled.as_text().count(" conditional(") == 2
    assert len(compiled.collectives) == 2
    assert [work.device for work in compiled.program.placed] == [0, 1, 2, 3] * 2
    value, gradient = TWO_BY_FOUR.run(step, (w, x))
    whole = jax.value_and_grad(lambda w: (jnp.tanh(x @ w).sum(axis=0) ** 2).sum())
    expected = whole(w)
    np.testing.assert_allclose(value, expected[0], rtol=1e-4)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-3, atol=1e-4)


def test_a_gradient_from_outside_of_the_step_is_that_of_the_function() -> None:
    x = _random(6, 4)
    rows = PerReplica.of_global(jax.device_put(x, TWO_BY_FOUR.per_replica_sharding))

    def step(w: Any, x: Any) -> Any:
        h = TWO_BY_FOUR.experimental_assign_to_logical_device(jax.nn.relu(x @ w), 1)
        return h.sum() + TWO_BY_FOUR.on_logical_device(2)(lambda w: jnp.sin(w).sum())(w)

    w = _random(4, 4)
    gradient = jax.grad(lambda w: jnp.sum(TWO_BY_FOUR.run(step, (w, rows)).array))
    want = jax.grad(lambda w: jax.nn.relu(x @ w).sum() + 2 * jnp.sin(w).sum())(w)
    for got in (jax.jit(gradient)(w), gradient(w)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_only_what_feeds_nothing_else_is_placed_and_nothing_beyond_a_collective() -> None:
    assign = FOUR_BY_TWO.experimental_assign_to_logical_device
    context = jaxdist.get_replica_context

    def step(x: Any) -> Any:
        shared = jnp.sin(x)  # also a result
        total = context().all_reduce("sum", jnp.cos(shared))
        own = jnp.exp(jnp.tan(shared) * total)
        return assign(own, 1), shared, assign(context().all_reduce("sum", x), 0)

    program = FOUR_BY_TWO.lower(step, (PerReplica.of_global(_rows(4, 3)),))
    by_device = {work.device: work for work in program.placed}
    assert (by_device[1].operations, by_device[1].results) == (3, 1)
    assert by_device[0].operations == 0


def _rows(*shape: int) -> jax.Array:
    return jax.device_put(_random(*shape), FOUR_BY_TWO.per_replica_sharding)


def test_variables_and_nnx_modules_are_read_on_a_logical_device() -> None:
    with FOUR_BY_TWO.scope():
        scale = jaxdist.Variable(2.0)
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def step(model: Any, x: Any) -> Any:
        y = FOUR_BY_TWO.on_logical_device(1)(lambda x: model(x) * scale)(x)
        scale.assign(FOUR_BY_TWO.experimental_assign_to_logical_device(scale * 2, 0))
        return y

    x = _random(2, 3)
    made = FOUR_BY_TWO.run(step, (model, x))
    np.testing.assert_allclose(made, 2 * model(jnp.asarray(x)), rtol=1e-5)
    assert float(scale) == 4


def test_nnx_objects_are_written_on_a_logical_device_when_they_are_passed() -> None:
    x = _random(8, 3)

    def trained(strategy: Any, on: Any) -> Any:
        with strategy.scope():
            model = nnx.Sequential(
                nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(1))
            )
            optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
            noise = nnx.Rngs(2)

        def step(model: Any, optimizer: Any, noise: Any, x: Any) -> Any:
            def loss(model: Any, noise: Any) -> Any:
                made = on(lambda model, x, noise: model(x) + noise.normal((1, 4)))
                return (made(model, x, noise=noise) ** 2).mean()

            value, grads = nnx.value_and_grad(loss)(model, noise)
            optimizer.update(model, jaxdist.get_replica_context().all_reduce("mean", grads))
            return value

        rows = PerReplica(np.split(x, 4))
        losses = [strategy.run(step, (model, optimizer, noise, rows)) for _ in range(3)]
        return jax.tree.leaves((losses, nnx.state((model, noise))))

    got = trained(FOUR_BY_TWO, FOUR_BY_TWO.on_logical_device(1))
    plain = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    for a, b in zip(got, trained(plain, lambda fn: fn), strict=True):
        a, b = (
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            for x in (a, b)
        )
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)


def test_nnx_objects_that_a_placed_function_closes_over_and_writes_are_named() -> None:
    with FOUR_BY_TWO.scope():
        norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    def step(norm: Any, x: Any) -> Any:
        return FOUR_BY_TWO.on_logical_device(1)(lambda x: norm(x))(x)

    with refused(ContextError, "closes over: norm", "Pass the object to it"):
        FOUR_BY_TWO.run(step, (norm, _random(4, 3)))


def test_op_by_op_placing_is_the_value_itself() -> None:
    def step(x: Any) -> Any:
        y = FOUR_BY_TWO.on_logical_device(1)(jnp.sin)(x)
        return FOUR_BY_TWO.experimental_assign_to_logical_device(y * 2, 0)

    x = _random(3)
    with jaxdist.config.run_eagerly(True):
        np.testing.assert_allclose(FOUR_BY_TWO.run(step, (x,)), 2 * np.sin(x), rtol=1e-6)


def test_with_one_logical_device_everything_is_on_it() -> None:
    strategy = tpus(2, 1)

    def step(x: Any) -> Any:
        y = strategy.experimental_assign_to_logical_device({"y": x * 2}, 0)["y"]
        return strategy.on_logical_device(0)(jnp.negative)(y)

    program = strategy.lower(step, (np.ones(2, "float32"),))
    assert program.placed == ()
    assert "conditional" not in program.compile().as_text()
    np.testing.assert_array_equal(strategy.run(step, (np.ones(2),)), [-2, -2])


_OPS = [jnp.sin, jnp.negative, lambda x: x * 2, jnp.add, jnp.multiply, jnp.maximum]
_KINDS = ["plain", "plain", "assign", "on", "all-reduce"]


@st.composite
def _programs(draw: st.DrawFn) -> Any:
    """Random functions with random marks, and their gradients."""
    plan = []
    for made in range(draw(st.integers(1, 10))):
        op = draw(st.integers(0, len(_OPS) - 1))
        known = st.integers(0, made + 1)
        operands = draw(st.lists(known, min_size=1 + (op > 2), max_size=1 + (op > 2)))
        plan.append((op, operands, draw(st.sampled_from(_KINDS)), draw(st.integers(0, 2))))

    def values(x: Any, y: Any) -> Any:
        known = [x, y]
        for op, operands, kind, device in plan:
            fn = on_device(_OPS[op], device) if kind == "on" else _OPS[op]
            made = fn(*(known[i] for i in operands))
            if kind == "all-reduce":
                made = jax.lax.psum(made, "replica")
            known.append(assigned(made, device) if kind == "assign" else made)
        return known[-1] + known[len(known) // 2], known[2:]

    return jax.make_jaxpr(
        jax.value_and_grad(values, argnums=(0, 1), has_aux=True), axis_env=[("replica", 1)]
    )(0.3, 0.7).jaxpr


@given(_programs())
@settings(max_examples=examples(50))
def test_any_placing_has_an_order_in_which_everything_is_there_when_it_is_needed(
    jaxpr: Any,
) -> None:
    plan = make_schedule(jaxpr)
    ready = {*jaxpr.invars, *jaxpr.constvars}
    seen: list[Any] = []

    def are_there(atoms: Any) -> bool:
        found = (a if hasattr(a, "val") else plan.alias.get(a, a) for a in atoms)
        return all(hasattr(a, "val") or a in ready for a in found)

    for step in plan.steps:
        assert are_there(step.invars)
        eqns = [step]
        if isinstance(step, Together):
            assert len({r.device for r in step.regions}) == len(step.regions)
            eqns = [e for r in step.regions for e in r.eqns]
            assert all(find_obstacle(e) is None for e in eqns)
        seen += eqns
        ready.update(step.outvars)
    assert are_there(jaxpr.outvars)
    # Each operation is there once, and only marks are gone.
    left = [e for e in jaxpr.eqns if not any(e is s for s in seen)]
    assert len(seen) + len(left) == len(jaxpr.eqns)
    assert all(e.primitive.name == "jaxdist_logical_device" for e in left)


def test_a_region_computes_what_its_operations_do() -> None:
    def program(x: Any) -> Any:
        return on_device(lambda x: jax.nn.gelu(jnp.cumsum(x)) @ jnp.ones((3, 2)), 1)(x)

    closed = jax.make_jaxpr(program)(jnp.ones(3))
    [region] = make_schedule(closed.jaxpr).regions
    x = _random(3)
    [got], [want] = run_region(region, x), jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, closed.consts))(x)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_logical_device_that_is_not_there_is_refused() -> None:
    assign, on = FOUR_BY_TWO.experimental_assign_to_logical_device, FOUR_BY_TWO.on_logical_device
    for device in (2, -1):
        with refused(ArgumentError, f"logical_device_id={device}", "2 logical", "0 to 1"):
            FOUR_BY_TWO.lower(lambda x, d=device: assign(x, d), (1.0,))
        with refused(ArgumentError, f"logical_device_id={device}", "2 logical", "0 to 1"):
            on(device)
    wrongs: list[Any] = [1.0, "1", True, None]
    for wrong in wrongs:
        with refused(ArgumentTypeError, repr(wrong), "0 to 1"):
            on(wrong)
    with refused(ArgumentTypeError, "is a function"):
        on(1)(3)  # type: ignore[arg-type]
    with refused(ArgumentTypeError, "tensor[0] is of type str"):
        FOUR_BY_TWO.lower(lambda x: assign(["text", x], 0), (1.0,))
    with refused(ArgumentTypeError, "result['y'] of named is of type str"):

        def named(x: Any) -> Any:
            return {"x": x, "y": "text"}

        FOUR_BY_TWO.lower(on(1)(named), (1.0,))
    with refused(ContextError, "outside of a step", "experimental_split_to_logical_devices"):
        assign(np.ones(2), 0)
    with refused(ContextError, "outside of a step"):
        on(0)(jnp.sin)(np.ones(2))


def test_a_value_is_on_one_logical_device() -> None:
    assign = FOUR_BY_TWO.experimental_assign_to_logical_device

    def twice(x: Any) -> Any:
        y = jnp.sin(x)
        return assign(y, 0) + assign(y, 1)

    for step in (twice, lambda x: assign(assign(jnp.sin(x), 0), 1)):
        with refused(ArgumentError, "logical device 0, at", "logical device 1, at", "logical_work"):
            FOUR_BY_TWO.lower(step, (1.0,))


def test_nothing_is_assigned_under_spmd() -> None:
    spmd = tpus(2, 4, spmd=True)
    with refused(ArgumentError, "experimental_spmd_xla_partitioning=True"):
        spmd.lower(lambda x: spmd.experimental_assign_to_logical_device(x, 0), (1.0,))
    with refused(ArgumentError, "experimental_spmd_xla_partitioning=True"):
        spmd.on_logical_device(0)
    with pytest.raises(ValueError, match="logical device 0"):
        spmd.on_logical_device(0)


def test_what_needs_the_other_devices_is_refused_in_a_function_on_one_of_them() -> None:
    on = FOUR_BY_TWO.on_logical_device

    def reduces(x: Any) -> Any:
        return jaxdist.get_replica_context().all_reduce("sum", x * 2)

    def splits(x: Any) -> Any:
        return FOUR_BY_TWO.experimental_split_to_logical_devices(x, [2])

    for fn, word in (
        (reduces, "psum"),
        (splits, "a split over"),
        (lambda x: on(1)(jnp.sin)(x), "work that"),
    ):
        with refused(ContextError, "on_logical_device(0)", word, "test_logical_work.py"):
            FOUR_BY_TWO.lower(on(0)(fn), (PerReplica([np.ones(2)] * 4),))
