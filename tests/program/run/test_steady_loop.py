"""A loop over one step compiles once and traces once."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxdist
from jaxdist import PerReplica, RunOptions, _integers, get_replica_context
from jaxdist._program.run.step import Step
from jaxdist.errors import DonationError, RetraceWarning
from tests.program.run.counting import compilations
from tests.strategies.oracle import refused

STEPS = 1000


def _logical() -> jaxdist.MirroredStrategy:
    devices = np.asarray(jax.devices()[:8], dtype=object).reshape(4, 2)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))


def test_state_that_starts_as_numpy_and_python_numbers_compiles_once_in_1000_steps() -> None:
    strategy = jaxdist.MirroredStrategy()
    traces = []

    def step(state: Any, x: Any) -> Any:
        traces.append(1)
        grad = get_replica_context().all_reduce("mean", 2 * (state["w"] * x - 1) * x)
        return {
            "w": state["w"] - state["rate"] * grad,
            "rate": state["rate"],
            "count": state["count"] + 1,
            "seen": state["seen"] + np.int32(1),
        }

    state: Any = {"w": np.float32(0), "rate": 0.1, "count": 0, "seen": np.int32(0)}
    x = PerReplica(np.linspace(0.5, 1, 8, dtype=np.float32))
    with compilations() as compiled:
        for _ in range(STEPS):
            state = strategy.run(step, (state, x))
        jax.block_until_ready(state)
    assert (compiled.number, len(traces)) == (1, 1)
    assert int(state["count"]) == int(state["seen"]) == STEPS

    w, rows = np.float64(0), np.linspace(0.5, 1, 8)
    for _ in range(STEPS):
        w -= 0.1 * np.mean(2 * (w * rows - 1) * rows)
    np.testing.assert_allclose(float(state["w"]), w, rtol=1e-5)


@pytest.mark.parametrize("holder", ["arguments", "model"])
def test_only_arrays_of_numpy_are_looked_at_for_integers_that_do_not_fit(
    holder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = jaxdist.MirroredStrategy()
    looked_at: list[Any] = []
    find = _integers.find_cut_off

    def note_and_find(value: Any) -> Any:
        looked_at.append(value)
        return find(value)

    class Count(nnx.Module):
        def __init__(self) -> None:
            self.numbers = nnx.List([nnx.Variable(jnp.zeros(2, jnp.int32)) for _ in range(5)])

    def step(state: Any, more: Any) -> Any:
        if isinstance(state, Count):
            for number in state.numbers:
                number[...] = number[...] + more
            return state.numbers[0][...]
        return {name: value + more for name, value in state.items()}

    state: Any = Count() if holder == "model" else {n: np.zeros(2, np.int64) for n in "abcde"}
    for number in range(4):
        if number == 3:
            monkeypatch.setattr(_integers, "find_cut_off", note_and_find)
        after = strategy.run(step, (state, np.int64(1)))
        state = state if holder == "model" else after
    assert [type(value) for value in looked_at] == [np.int64]


def test_nnx_state_compiles_once_in_1000_steps() -> None:
    strategy = jaxdist.MirroredStrategy()
    model: Any = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    traces = []

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        traces.append(1)
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
        optimizer.update(model, get_replica_context().all_reduce("mean", grads))
        return loss

    loss: Any = None
    x = jax.device_put(np.eye(2, dtype=np.float32)[[0, 1] * 8], strategy.per_replica_sharding)
    with compilations() as compiled:
        for _ in range(STEPS):
            loss = strategy.run(step, (model, optimizer, x))
        jax.block_until_ready(loss)
    assert (compiled.number, len(traces)) == (1, 1)
    assert int(optimizer.step[...]) == STEPS
    np.testing.assert_allclose(strategy.reduce("MEAN", loss, axis=None), 0, atol=1e-6)


def test_state_over_logical_devices_keeps_its_layout_and_compiles_once() -> None:
    strategy = _logical()
    split = NamedSharding(strategy.mesh, PartitionSpec(None, "model"))
    state: Any = {
        "wide": jax.device_put(np.full((4, 8), 0.1, np.float32), split),
        "small": jax.device_put(np.ones((1, 8), np.float32), strategy.replicated_sharding),
    }
    before = {k: v.sharding for k, v in state.items()}
    traces = []

    def step(state: Any, x: Any) -> Any:
        traces.append(1)
        hidden = jax.lax.with_sharding_constraint(x @ state["wide"], PartitionSpec(None, "model"))
        grad = get_replica_context().all_reduce("mean", jnp.mean(hidden * state["small"]))
        return jax.tree.map(lambda w: w - 0.001 * grad, state)

    x = jax.device_put(np.ones((8, 4), np.float32), strategy.per_replica_sharding)
    with compilations() as compiled:
        for _ in range(STEPS):
            state = strategy.run(step, (state, x))
        jax.block_until_ready(state)
    assert (compiled.number, len(traces)) == (1, 1)
    assert {k: v.sharding for k, v in state.items()} == before


def test_two_leaves_of_one_shape_in_two_layouts_each_keep_their_own() -> None:
    # They were both left to GSPMD, which moved one of them and compiled the second step anew.
    strategy = _logical()
    split = NamedSharding(strategy.mesh, PartitionSpec(None, "model"))
    state: Any = {
        "a": jax.device_put(np.ones((8, 8), np.float32), split),
        "b": jax.device_put(np.ones((8, 8), np.float32), strategy.replicated_sharding),
    }
    before = {k: v.sharding for k, v in state.items()}

    def step(state: Any, x: Any) -> Any:
        grad = get_replica_context().all_reduce("mean", jnp.sum(state["a"] @ state["b"] * x))
        return jax.tree.map(lambda w: w - 1e-6 * grad, state)

    x = PerReplica(np.arange(4, dtype=np.float32))
    with compilations() as compiled:
        for _ in range(4):
            state = strategy.run(step, (state, x))
    assert compiled.number == 1
    assert {k: v.sharding for k, v in state.items()} == before


def test_a_per_replica_value_carried_over_logical_devices_compiles_once() -> None:
    strategy = _logical()

    def step(h: Any) -> Any:
        own = jax.lax.axis_index("data")
        return jax.lax.with_sharding_constraint(h * 0.5, PartitionSpec(None, "model")) + own

    h: Any = PerReplica([np.ones((2, 4), np.float32)] * 4)
    with compilations() as compiled:
        for _ in range(4):
            h = strategy.run(step, (h,))
    assert compiled.number == 1


def test_new_per_replica_objects_in_each_step_are_one_trace() -> None:
    strategy = jaxdist.MirroredStrategy()
    traces = []

    def step(x: Any, y: Any) -> Any:
        traces.append(1)
        return x + y

    def one(i: int) -> Any:
        rows = [np.full(2, i + r, np.float32) for r in range(8)]
        return strategy.run(step, (PerReplica(rows), PerReplica(range(8))))

    one(0)  # Making arrays of Python numbers compiles as well.
    with compilations() as compiled:
        for i in range(20):
            result = one(i)
    assert (compiled.number, len(traces)) == (0, 1)
    assert [v.tolist() for v in result.values] == [[19.0 + 2 * r] * 2 for r in range(8)]


def test_the_same_shapes_in_other_layouts_have_their_own_meaning_in_every_order() -> None:
    strategy = jaxdist.MirroredStrategy()

    def step(x: Any) -> Any:
        return x.sum()

    data = np.arange(16, dtype=np.float32)
    whole, rows = data.sum(), data.reshape(8, 2).sum(1)
    forms = {
        "numpy": (lambda: data, None),
        "one_device": (lambda: jax.device_put(data, jax.devices()[0]), None),
        "uncommitted": (lambda: jnp.asarray(data), None),
        "other_device": (lambda: jax.device_put(data, jax.devices()[5]), None),
        "replicated": (lambda: jax.device_put(data, strategy.replicated_sharding), None),
        "laid_out": (lambda: jax.device_put(data, strategy.per_replica_sharding), rows),
        "per_replica": (lambda: PerReplica(list(data.reshape(8, 2))), rows),
    }
    rng = np.random.default_rng(0)
    for name in [str(rng.choice(list(forms))) for _ in range(60)]:
        make, expected = forms[name]
        result = strategy.run(step, (make(),))
        if expected is None:
            assert isinstance(result, jax.Array), name
            assert float(result) == whole, name
        else:
            assert isinstance(result, PerReplica), name
            np.testing.assert_array_equal([float(v) for v in result.values], expected)


def _warning_text(record: Any) -> str:
    return str(record[0].message)


def test_lambdas_in_a_loop_warn_once_naming_the_line() -> None:
    strategy = jaxdist.MirroredStrategy()

    def loop() -> None:
        for _ in range(6):
            strategy.run(lambda x: x + 1, (np.float32(1),))

    with pytest.warns(RetraceWarning) as record:
        loop()
    assert len(record) == 1
    line = loop.__code__.co_firstlineno + 2
    assert f"{__file__}:{line}" in _warning_text(record)
    assert record[0].filename == __file__
    assert record[0].lineno == line


def test_many_shapes_warn_once_naming_the_step_and_what_changed() -> None:
    strategy = jaxdist.MirroredStrategy()

    def step(x: Any) -> Any:
        return x * 2

    def loop() -> None:
        for n in range(1, 14):
            strategy.run(step, (np.ones(n, np.float32),))

    with pytest.warns(RetraceWarning) as record:
        loop()
    assert len(record) == 1
    text = _warning_text(record)
    assert f"{__file__}:{step.__code__.co_firstlineno}" in text
    assert "args[0]" in text
    assert "float32[7] -> " in text
    assert record[0].filename == __file__


def test_one_function_called_for_ever_does_not_warn() -> None:
    strategy = jaxdist.MirroredStrategy()

    def step(x: Any) -> Any:
        return x * 2

    for _ in range(50):
        strategy.run(step, (np.ones(3, np.float32),))


# Donation.


def _on(strategy: jaxdist.Strategy, value: float = 1.0) -> jax.Array:
    return jax.device_put(np.full(8, value, np.float32), strategy.replicated_sharding)


def test_donated_state_is_deleted_and_other_arguments_are_not() -> None:
    strategy = jaxdist.MirroredStrategy()
    options = RunOptions(donate_argnums=(0,))

    def step(state: Any, x: Any) -> Any:
        return {"w": state["w"] + x}

    state, x = {"w": _on(strategy)}, _on(strategy)
    for i in range(4):
        old = state
        state = strategy.run(step, (state, x), options=options)
        assert old["w"].is_deleted()
        assert not x.is_deleted()
        np.testing.assert_array_equal(state["w"], np.full(8, i + 2))


def test_nothing_is_donated_without_being_asked_for_and_lowering_never_donates() -> None:
    strategy = jaxdist.MirroredStrategy()
    x = _on(strategy)

    def step(x: Any) -> Any:
        return x + 1

    for _ in range(3):
        strategy.run(step, (x,))
    strategy.lower(step, (x,), options=RunOptions(donate_argnums=(0,))).compile()
    assert not x.is_deleted()


@pytest.mark.parametrize("warm_up", [0, 3], ids=["first_call", "after_others"])
def test_one_buffer_donated_twice_is_an_error_that_names_both_and_loses_nothing(
    warm_up: int,
) -> None:
    # After the first calls the check was skipped, and XLA's own error came.
    strategy = jaxdist.MirroredStrategy()
    options = RunOptions(donate_argnums=(0,))

    def step(state: Any, x: Any) -> Any:
        return {"a": state["a"] + x, "b": state["b"] - x}

    one = _on(strategy)
    for _ in range(warm_up):
        state = {"a": _on(strategy, 2), "b": _on(strategy, 3)}
        strategy.run(step, (state, one), options=options)
    same = _on(strategy)
    with pytest.raises(DonationError) as error:
        strategy.run(step, ({"a": same, "b": same}, one), options=options)
    assert "args[0]['a']" in str(error.value)
    assert "args[0]['b']" in str(error.value)
    with pytest.raises(DonationError):
        strategy.run(step, ({"a": same, "b": one}, same), options=options)
    assert not same.is_deleted()
    assert not one.is_deleted()
    np.testing.assert_array_equal(same, np.ones(8))


@pytest.mark.parametrize("num_devices", [1, 8])
def test_state_that_was_donated_before_is_named_by_whichever_step_gets_it(num_devices: int) -> None:
    # JAX 0.10 starts a program on several devices without it, which ends the process.
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(num_devices)])
    options = RunOptions(donate_argnums=(0,))
    model: Any = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def update(state: Any, x: Any) -> Any:
        total = jaxdist.get_replica_context().all_reduce("sum", x)
        return {"w": state["w"] + total[0], "b": state["b"]}

    def evaluate(state: Any, x: Any) -> Any:
        return state["w"] * x

    def by_flag(state: Any, x: Any, scaled: bool) -> Any:
        return state["w"] * 2 if scaled else x

    def of_model(model: Any) -> Any:
        return model.kernel[...].sum()

    def new() -> Any:
        return {"w": _on(strategy), "b": _on(strategy)}

    x = _on(strategy)
    strategy.run(evaluate, (new(), x))  # before any step donates
    state = new()
    after = strategy.run(update, (state, x), options=options)
    for _ in range(2):
        after = strategy.run(update, (after, x), options=options)
    strategy.run(by_flag, (after, x, True))
    strategy.run(of_model, (model,))
    gone = ("args[0]['b']: float32[8]", "args[0]['w']: float32[8]", "donate_argnums=(0,)")
    for _ in range(2):
        with refused(DonationError, "strategy.run(update)", "2 array(s)", *gone, "jnp.copy"):
            strategy.run(update, (state, x), options=options)
        mixed = {"w": state["w"], "b": _on(strategy)}
        with refused(DonationError, "1 array(s)", "args[0]['w']"):
            strategy.run(update, (mixed, x), options=options)
        with refused(DonationError, "strategy.run(evaluate)", "args[0]['w']"):
            strategy.run(evaluate, (state, x))
        with refused(DonationError, "strategy.run(by_flag)", "args[0]['w']"):
            strategy.run(by_flag, (state, x, True))
        with refused(DonationError, "kwargs['state']['w']"):
            strategy.run(evaluate, (), {"state": state, "x": x})
    model.kernel.get_raw_value().delete()
    with refused(DonationError, "strategy.run(of_model)", "args[0].kernel: float32[2, 2]"):
        strategy.run(of_model, (model,))
    # Nothing else was lost, and other errors stay what they are.
    np.testing.assert_allclose(strategy.run(evaluate, (after, x)), 1.0 + 3 * num_devices)
    with pytest.raises(RuntimeError, match="has been deleted by the user"):
        strategy.run(_that_fails, (x,))


def _that_fails(x: Any) -> Any:
    raise RuntimeError("An Array has been deleted by the user")


def test_donating_an_argument_that_is_not_there_names_it() -> None:
    strategy = jaxdist.MirroredStrategy()
    with pytest.raises(ValueError, match=r"donate_argnums=\(3,\).*1 positional"):
        strategy.run(lambda x: x + 1, (np.float32(1),), options=RunOptions(donate_argnums=(3,)))


def test_donated_nnx_state_is_updated_in_place() -> None:
    strategy = jaxdist.MirroredStrategy()
    model: Any = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def step(model: Any) -> None:
        model.kernel[...] = model.kernel[...] + 1

    start = np.asarray(model.kernel[...])
    for i in range(4):
        old = model.kernel.get_raw_value()
        strategy.run(step, (model,), options=RunOptions(donate_argnums=(0,)))
        np.testing.assert_allclose(model.kernel[...], start + i + 1, rtol=1e-6)
        assert i == 0 or old.is_deleted()


@flax.struct.dataclass
class TrainState:
    """State as flax.training makes it."""

    params: Any
    opt_state: Any
    step: Any


def test_a_train_state_with_adam_compiles_once_and_stays_plain() -> None:
    strategy = jaxdist.MirroredStrategy()
    tx = optax.adam(1e-2)
    params = {"w": np.zeros(3, np.float32), "b": np.float32(0)}
    state = TrainState(params, tx.init(params), 0)

    def step(state: TrainState, x: Any) -> Any:
        def loss_of(p: Any) -> Any:
            return jnp.mean((x @ p["w"] + p["b"] - 1) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        grads = get_replica_context().all_reduce("mean", grads)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return dataclasses.replace(
            state, params=params, opt_state=opt_state, step=state.step + 1
        ), loss

    x = jax.device_put(
        np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32),
        strategy.per_replica_sharding,
    )
    with compilations() as compiled:
        for _ in range(100):
            state, loss = strategy.run(step, (state, x))
    # `tx.init` makes its zeros before.
    assert compiled.number == 1
    assert isinstance(loss, PerReplica)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert int(state.step) == 100


@pytest.mark.parametrize("donated", [(), (0,)])
def test_batches_of_several_shapes_take_the_fast_path_once_each_is_known(
    monkeypatch: pytest.MonkeyPatch, donated: tuple[int, ...]
) -> None:
    strategy, options = jaxdist.MirroredStrategy(), RunOptions(donate_argnums=donated)
    with strategy.scope():
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    reads: list[int] = []
    read = Step._read

    def count(self: Any, *args: Any) -> Any:
        reads.append(1)
        return read(self, *args)

    monkeypatch.setattr(Step, "_read", count)

    def step(model: nnx.Linear, x: jax.Array) -> jax.Array:
        model.kernel[...] = model.kernel[...] * 0.5
        return get_replica_context().all_reduce("sum", x.sum())

    batches = [
        jax.device_put(np.ones((8 * rows, 3), np.float32), strategy.per_replica_sharding)
        for rows in (1, 2, 3)
    ]
    # The first shape is in steady state before the others come, as in a loop over epochs.
    for x in [*batches[:1] * 3, *batches * 3]:
        strategy.run(step, (model, x), options=options)
    reads.clear()
    for _ in range(20):
        for x in batches:
            total = strategy.run(step, (model, x), options=options)
            assert float(total) == x.size
    # Python reads the arguments of a call only where C++ does not know its program.
    assert reads == []


@pytest.mark.compiled
def test_variables_go_the_fast_way_with_static_arguments_and_modules_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    with two.scope():
        v = jaxdist.Variable(0.0)
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    read = Step._read
    reads: list[int] = []

    def counted(self: Any, *args: Any) -> Any:
        reads.append(1)
        return read(self, *args)

    monkeypatch.setattr(Step, "_read", counted)

    def step(model: Any, x: Any, mode: str, *, twice: bool = False) -> Any:
        v.assign_add(2.0 if twice else 1.0)
        model.bias[...] = model.bias[...] + 1.0
        return v * x, mode

    found = []
    for number in range(12):
        if number == 6:
            reads.clear()
        twice = bool(number % 2)
        result, mode = two.run(step, (model, 1.0, "a" if twice else "b"), {"twice": twice})
        found.append(float(result))
        assert mode == ("a" if twice else "b")
    assert found == [1.0, 3.0, 4.0, 6.0, 7.0, 9.0, 10.0, 12.0, 13.0, 15.0, 16.0, 18.0]
    assert model.bias is not None
    assert float(model.bias[...][0]) == 12.0
    assert not reads, "arguments were read in Python at every step"
