"""Functions that workers run: what they read, what they change, and what is refused."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxdist
from jaxdist import IndexedSlices
from jaxdist._parameter_server.protocol import ChangeVariables, Read
from jaxdist._parameter_server.variables.server_variable import ServerVariable
from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import (
    ArgumentError,
    ContextError,
    OutOfRangeError,
    ShapeError,
    UnsupportedError,
)
from tests.parameter_server.strategy.making import make_strategy
from tests.parameter_server.wrapping import wrap

Coordinated = tuple[Any, ClusterCoordinator]


@pytest.fixture
def coordinated() -> Coordinated:
    """Return a strategy of two servers and two workers, and its coordinator."""
    strategy = make_strategy()
    return strategy, ClusterCoordinator(strategy)


def test_all_additions_of_all_workers_count(coordinated: Coordinated) -> None:
    strategy, coordinator = coordinated
    with strategy.scope():
        total, count = jaxdist.Variable(0.0), jaxdist.Variable(0)

    @jaxdist.function
    def add(x: Any) -> Any:
        count.assign_add(1)
        return total.assign_add(x)

    for x in range(100):
        coordinator.schedule(add, (np.float32(x),))
    coordinator.join()
    assert float(total) == sum(range(100))
    assert int(count) == 100
    assert coordinator.statistics().applied == 100


@pytest.mark.parametrize("inside", [False, True])
def test_a_function_sees_its_own_changes(coordinated: Coordinated, inside: bool) -> None:
    strategy, coordinator = coordinated
    with strategy.scope():
        v = jaxdist.Variable(3.0)

    def change(x: Any) -> Any:
        seen = [v.value()]
        seen.append(v.assign_add(x))
        v.assign_sub(1.0)
        seen.append(v.read_value())
        v.assign(10.0)
        seen.append(v.value())
        v.assign_add(x)
        seen.append(v.value())
        return jnp.stack(seen)

    fn = (lambda x: strategy.run(change, (x,))) if inside else change
    found = coordinator.schedule(fn, (np.float32(2),)).fetch()
    np.testing.assert_array_equal(found, [3, 5, 4, 10, 12])
    assert float(v) == 12


def test_an_assignment_in_a_branch_that_is_not_taken_is_not_sent(coordinated: Coordinated) -> None:
    strategy, coordinator = coordinated
    with strategy.scope():
        v = jaxdist.Variable(3.0)
        n = jaxdist.Variable(0)

    def step(x: Any) -> None:
        lax.cond(x > 0, lambda: v.assign(x, read_value=False), lambda: None)
        lax.fori_loop(0, 3, lambda i, c: (n.assign_add(i), c)[1], 0)

    sent = []

    def note(request: Any, go_on: Any) -> Any:
        sent.extend(request.changes)
        return go_on()

    for link in strategy.storage.links:
        link.call = wrap(link.call, ChangeVariables, note)
    coordinator.schedule(lambda x: strategy.run(step, (x,)), (np.float32(-1),))
    coordinator.join()
    assert [c.op for c in sent] == ["add"]
    coordinator.schedule(lambda x: strategy.run(step, (x,)), (np.float32(5),))
    coordinator.join()
    assert sorted(c.op for c in sent[1:]) == ["add", "assign"]
    assert (float(v), int(n)) == (5, 6)


class _Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.a = nnx.Linear(4, 8, rngs=rngs)
        self.b = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.b(nnx.relu(self.a(x)))


def _batches(count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    for _ in range(count):
        x = rng.normal(size=(16, 4)).astype("float32")
        yield x, x @ np.arange(8, dtype="float32").reshape(4, 2)


def _train(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize(
    "tx",
    [optax.sgd(0.05), optax.sgd(0.05, momentum=0.9), optax.adam(1e-2), optax.adamw(1e-2)],
    ids=["sgd", "momentum", "adam", "adamw"],
)
def test_one_worker_trains_as_optax_does_in_one_process(tx: Any) -> None:
    reference = _Net(nnx.Rngs(0))
    own = nnx.Optimizer(reference, tx, wrt=nnx.Param)
    losses = [float(nnx.jit(_train)(reference, own, x, y)) for x, y in _batches(20)]

    strategy = make_strategy(servers=2, workers=1)
    coordinator = ClusterCoordinator(strategy)
    model = _Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: _batches(20)))

    def step(model: Any, optimizer: Any, iterator: Any) -> Any:
        return strategy.run(_train, (model, optimizer, *next(iterator)))

    found = [coordinator.schedule(step, (model, optimizer, iterator)) for _ in range(20)]
    coordinator.join()
    np.testing.assert_allclose([r.fetch() for r in found], losses, rtol=1e-5)
    trained, wanted = nnx.state(model, nnx.Param), nnx.state(reference, nnx.Param)
    pairs = zip(jax.tree.leaves(trained), jax.tree.leaves(wanted), strict=True)
    for got, want in pairs:
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-4, atol=1e-6)
    assert int(optimizer.step[...]) == 20
    # The state of the optimizer is read from the servers, too.
    states = zip(jax.tree.leaves(optimizer.opt_state), jax.tree.leaves(own.opt_state), strict=True)
    for got, want in states:
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-4, atol=1e-6)


def test_an_optimizer_that_has_state_takes_it_to_the_servers() -> None:
    reference = _Net(nnx.Rngs(0))
    own = nnx.Optimizer(reference, optax.adam(1e-2), wrt=nnx.Param)
    given = list(_batches(10))
    for x, y in given[:5]:
        _train(reference, own, x, y)
    strategy = make_strategy(workers=1)
    coordinator = ClusterCoordinator(strategy)
    model, optimizer = nnx.clone((reference, own))
    for x, y in given[5:]:
        _train(reference, own, x, y)

        def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
            return strategy.run(_train, (model, optimizer, x, y))

        coordinator.schedule(step, (model, optimizer, x, y))
        coordinator.join()
    pairs = zip(
        jax.tree.leaves(nnx.state(model, nnx.Param)),
        jax.tree.leaves(nnx.state(reference, nnx.Param)),
        strict=True,
    )
    for got, want in pairs:
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-4, atol=1e-6)


def test_a_checkpoint_is_restored_into_a_model_that_is_on_the_servers(tmp_path: Any) -> None:
    strategy = make_strategy(workers=1)
    coordinator = ClusterCoordinator(strategy)
    model = _Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    given = list(_batches(6))

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        return strategy.run(_train, (model, optimizer, x, y))

    def train(batches: Any) -> list[float]:
        found = [coordinator.schedule(step, (model, optimizer, *b)) for b in batches]
        return [float(r.fetch()) for r in found]

    train(given[:3])
    state = {"model": model, "optimizer": optimizer}
    with jaxdist.training.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state)
        losses = train(given[3:])
        assert checkpoints.restore_latest(like=state) is not None
        again = checkpoints.restore_latest(like=state)
        assert again is not None
        nnx.update(model, nnx.state(again.state["model"]))
        nnx.update(optimizer, nnx.state(again.state["optimizer"]))
    np.testing.assert_allclose(train(given[3:]), losses, rtol=1e-6)
    assert int(optimizer.step[...]) == 6
    assert optimizer.opt_state[0].count[...] == 6


def test_a_value_that_is_written_into_a_model_reaches_the_workers() -> None:
    strategy = make_strategy()
    coordinator = ClusterCoordinator(strategy)
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def total(model: Any) -> Any:
        return model.kernel[...].sum()

    coordinator.schedule(total, (model,)).fetch()
    model.kernel.set_value(jnp.full((2, 2), 5.0))
    assert coordinator.schedule(total, (model,)).fetch() == 20
    assert float(model.kernel[...].sum()) == 20


def test_values_of_a_wrong_shape_are_refused_and_none_of_them_counts() -> None:
    coordinator = ClusterCoordinator(make_strategy())
    model: Any = nnx.Linear(2, 3, rngs=nnx.Rngs(0))

    def total(model: Any) -> Any:
        return model.kernel[...].sum() + model.bias[...].sum()

    before = coordinator.schedule(total, (model,)).fetch()
    with pytest.raises(ShapeError, match=r"bias'.assign was given value=float32\[2\]"):
        model.bias[...] = jnp.ones(2)
    assert model.bias.shape == (3,)
    model.bias.set_value(jnp.ones(3))
    model.kernel.set_value(jnp.ones((3, 2)))
    with pytest.raises(
        ShapeError, match=r"kernel'.assign was given value=float32\[3, 2\]"
    ) as caught:
        coordinator.schedule(total, (model,))
    assert "the model has their values again" in caught.value.__notes__[0]
    assert model.kernel.shape == (2, 3)
    assert coordinator.schedule(total, (model,)).fetch() == before


def test_variables_of_a_model_are_called_by_the_parameter_of_the_function() -> None:
    strategy = make_strategy()
    coordinator = ClusterCoordinator(strategy)
    layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))])
    model: Any = nnx.Dict(layers=layers)
    other: Any = _Net(nnx.Rngs(0))
    third: Any = _Net(nnx.Rngs(1))

    def step(model: Any, *rest: Any, other: Any) -> Any:
        return model.layers[0].kernel[...].sum()

    coordinator.schedule(step, (model, third), {"other": other}).fetch()
    assert model.layers[0].kernel.remote_name == "model.layers[0].kernel"
    assert other.b.bias.remote_name == "other.b.bias"
    assert third.b.bias.remote_name == "args[1].b.bias"
    with pytest.raises(ShapeError, match=r"Variable 'model\.layers\[0\]\.kernel'"):
        model.layers[0].kernel[...] = jnp.ones(3)


def test_statistics_and_random_keys_of_a_module(coordinated: Coordinated) -> None:
    _, coordinator = coordinated
    norm = nnx.BatchNorm(4, momentum=0.5, rngs=nnx.Rngs(0))
    drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    x = np.full((8, 4), 3.0, "float32")

    def step(norm: Any, drop: Any, x: Any) -> Any:
        norm(x)
        return drop(jnp.ones(1000))

    masks = [coordinator.schedule(step, (norm, drop, x)).fetch() for _ in range(3)]
    # 0, then half of the way to 3 each time.
    np.testing.assert_allclose(np.asarray(norm.mean[...]), 3 * (1 - 0.5**3), rtol=1e-6)
    # Each function has random numbers of its own.
    assert not np.array_equal(masks[0], masks[1])
    assert not np.array_equal(masks[1], masks[2])


@pytest.mark.parametrize("inside", [False, True])
def test_rows_are_read_and_changed_alone(coordinated: Coordinated, inside: bool) -> None:
    strategy, coordinator = coordinated
    start = np.arange(20, dtype="float32").reshape(10, 2)
    with strategy.scope():
        table = jaxdist.Variable(start, name="table")

    def change(ids: Any) -> Any:
        rows = table.sparse_read(ids)
        table.scatter_sub(IndexedSlices(jnp.ones_like(rows), ids))
        return rows * 2

    fn = (lambda ids: strategy.run(change, (ids,))) if inside else change
    dense: list[str] = []
    for link in strategy.storage.links:
        link.call = wrap(link.call, Read, _note_names(dense))
    ids = np.array([7, 1, 7])
    np.testing.assert_array_equal(coordinator.schedule(fn, (ids,)).fetch(), start[ids] * 2)
    assert dense == []
    want = start.copy()
    np.subtract.at(want, ids, 1)
    np.testing.assert_array_equal(table.numpy(), want)


def test_a_model_on_servers_is_not_fetched_to_be_scheduled(
    coordinated: Coordinated, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, coordinator = coordinated
    with strategy.scope():
        model = _Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    x, y = next(_batches(1))
    fetched = []
    lend = ServerVariable.lend

    def note(variable: ServerVariable) -> Any:
        fetched.append(variable.name)
        return lend(variable)

    monkeypatch.setattr(ServerVariable, "lend", note)
    for _ in range(3):
        coordinator.schedule(_train, (model, optimizer, x, y))
        coordinator.join()
        strategy.run(_train, (model, optimizer, x, y))
    assert fetched == []
    assert model.a.kernel[...].shape == (4, 8)
    assert fetched


def _note_names(names: list[str]) -> Callable[..., Any]:
    def note(request: Any, go_on: Any) -> Any:
        names.extend(request.names)
        return go_on()

    return note


def test_a_sharded_table_is_read_and_changed_by_rows() -> None:
    strategy = make_strategy(
        servers=3, variable_partitioner=jaxdist.experimental.partitioners.FixedShardsPartitioner(3)
    )
    coordinator = ClusterCoordinator(strategy)
    start = np.arange(20, dtype="float32").reshape(10, 2)
    with strategy.scope():
        table = jaxdist.Variable(start, name="table")
    assert [v.shape for v in table.variables] == [(4, 2), (3, 2), (3, 2)]

    def change(ids: Any) -> Any:
        def replica(ids: Any) -> Any:
            rows = jaxdist.nn.embedding_lookup(table, ids)
            table.scatter_add(IndexedSlices(jnp.ones_like(rows), ids))
            return rows

        return strategy.run(replica, (ids,))

    ids = np.array([9, 0, 4, 9])
    np.testing.assert_array_equal(coordinator.schedule(change, (ids,)).fetch(), start[ids])
    want = start.copy()
    np.add.at(want, ids, 1)
    np.testing.assert_array_equal(np.asarray(table), want)
    with pytest.raises(ArgumentError, match="change reads row 10 of 'table', which has 10 rows"):
        coordinator.schedule(change, (np.array([0, 10, 1, 2]),)).fetch()
    with pytest.raises(ArgumentError, match="change reads row 10 of 'table', which has 10 rows"):
        coordinator.join()
    np.testing.assert_array_equal(np.asarray(table), want)


def test_a_later_function_sees_what_the_coordinator_did(coordinated: Coordinated) -> None:
    strategy, coordinator = coordinated
    with strategy.scope():
        v = jaxdist.Variable(0.0)

    def read() -> Any:
        v.assign_add(1.0)
        return v.value()

    for turn in range(20):
        v.assign(float(100 * turn))
        assert coordinator.schedule(read).fetch() == 100 * turn + 1
        # Also what another function has done and somebody has seen.
        assert coordinator.schedule(read).fetch() == 100 * turn + 2


def test_batches_of_another_shape_are_traced_again() -> None:
    # One worker: nobody knows how many functions each of two would run.
    strategy = make_strategy(workers=1)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        rows = jaxdist.Variable(0)

    def dataset() -> Iterator[np.ndarray]:
        yield from (np.ones((n, 2), "float32") for n in (4, 4, 3))

    iterator = iter(coordinator.create_per_worker_dataset(dataset))

    def step(iterator: Any) -> Any:
        x = next(iterator)
        rows.assign_add(x.shape[0])
        return x.sum()

    found = [coordinator.schedule(step, (iterator,)) for _ in range(3)]
    coordinator.join()
    assert [float(r.fetch()) for r in found] == [8, 8, 6]
    assert int(rows) == 11
    coordinator.schedule(step, (iterator,))
    with pytest.raises(OutOfRangeError, match=r"asks for 1 batch.*has ended"):
        coordinator.join()


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_change_is_staler_than_the_bound(bound: int) -> None:
    strategy = make_strategy(servers=2, workers=3, max_staleness=bound)
    coordinator = ClusterCoordinator(strategy)
    model = _Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)
    x, y = next(_batches(1))

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        return strategy.run(_train, (model, optimizer, x, y))

    for turn in range(60):
        coordinator.schedule(step, (model, optimizer, x, y))
        if turn % 20 == 10:
            # A function that changes nothing, or fails, holds nobody up.
            strategy.run(lambda m: m(x), (model,))
            coordinator.schedule(lambda m: m.a.kernel[...].sum(), (model,))
    coordinator.join()
    found = coordinator.statistics().staleness
    assert max(found) <= bound
    # Each of the 4 parameters, and the count of steps.
    assert sum(found.values()) == 60 * 5


def test_run_on_the_coordinator_works_with_a_warning(
    coordinated: Coordinated, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, _ = coordinated
    with strategy.scope():
        v = jaxdist.Variable(1.0)
    for _ in range(2):
        assert float(strategy.run(lambda x: v.assign_add(x), (2.0,))) in (3, 5)
    assert float(v) == 5
    said = [r.message for r in caplog.records if "not on a worker" in r.message]
    assert len(said) == 1


def _bad_functions(strategy: Any) -> dict[str, tuple[Callable[..., Any], type[Exception], str]]:
    with strategy.scope():
        table = jaxdist.Variable(np.zeros((4, 2), "float32"), name="table")
    elsewhere = jaxdist.Variable(1.0, name="elsewhere")
    model = _Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    other = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0)), wrt=nnx.Param)
    x, y = next(_batches(1))
    ids = np.array([1, 1])

    def scatter() -> None:
        table.scatter_add(IndexedSlices(jnp.ones((2, 2)), ids))

    def read_after() -> Any:
        scatter()
        return table.value()

    def read_after_in_another_step() -> Any:
        strategy.run(scatter)
        return strategy.run(lambda: table.value())

    def look_up_by_variable() -> Any:
        return table.sparse_read(table.value().astype(int)[0])

    def use_after_update() -> Any:
        def step(model: Any, optimizer: Any) -> Any:
            _train(model, optimizer, x, y)
            return model(x)

        return strategy.run(step, (model, optimizer))

    def use_after(model: Any, optimizer: Any) -> Any:
        _train(model, optimizer, x, y)
        return model(x)

    def update_twice(model: Any, optimizer: Any) -> None:
        strategy.run(_train, (model, optimizer, x, y))
        strategy.run(_train, (model, optimizer, x, y))

    def couple(model: Any, optimizer: Any) -> None:
        strategy.run(_train, (model, optimizer, x, y))

    return {
        "foreign": (lambda: elsewhere.assign_add(1.0), ContextError, "outside of the scope"),
        "read rows after": (read_after, ContextError, "after its rows were changed"),
        "read later": (read_after_in_another_step, ContextError, "after its rows were changed"),
        "ids": (look_up_by_variable, ContextError, "depend on the variable 'table'"),
        "use after": ((use_after, (model, optimizer)), ContextError, "after optimizer.update"),  # type: ignore[dict-item]
        "twice": ((update_twice, (model, optimizer)), ContextError, "updates it twice"),  # type: ignore[dict-item]
        "couple": ((couple, (model, other)), UnsupportedError, "clip"),  # type: ignore[dict-item]
    }


@pytest.mark.parametrize(
    "case", ["foreign", "read rows after", "read later", "ids", "use after", "twice", "couple"]
)
def test_what_cannot_be_sent_is_a_named_error(coordinated: Coordinated, case: str) -> None:
    strategy, coordinator = coordinated
    given, error, said = _bad_functions(strategy)[case]
    fn, args = given if isinstance(given, tuple) else (given, ())
    with pytest.raises(error, match=said):
        coordinator.schedule(fn, args)
    # The coordinator works on, and nothing was changed.
    coordinator.join()
    assert coordinator.statistics().scheduled == 0


def test_an_average_of_updated_parameters_is_refused(coordinated: Coordinated) -> None:
    strategy, coordinator = coordinated

    class Averaged(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(4))
            self.average = nnx.BatchStat(jnp.ones(4))

    model = Averaged()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def replica(model: Any, optimizer: Any) -> None:
        optimizer.update(model, nnx.grad(lambda m: (m.w[...] ** 2).sum())(model))
        model.average[...] = 0.9 * model.average[...] + 0.1 * model.w[...]

    with pytest.raises(ContextError, match=r"uses .* after optimizer\.update"):
        coordinator.schedule(lambda m, o: strategy.run(replica, (m, o)), (model, optimizer))
    np.testing.assert_array_equal(np.asarray(model.average[...]), np.ones(4))


def test_closures_of_two_optimizers_of_one_model_differ(coordinated: Coordinated) -> None:
    # A worker over gRPC knows a closure, with its changes, by the digest.
    strategy, coordinator = coordinated
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    x, y = next(_batches(1))

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        return strategy.run(_train, (model, optimizer, x, y))

    digests = set()
    for rate in (0.1, 0.01):
        optimizer = nnx.Optimizer(model, optax.sgd(rate), wrt=nnx.Param)
        prepared = strategy.prepare(step, (model, optimizer, x, y), {})
        digests.add(prepared.program.first.closure.digest)
    coordinator.join()
    assert len(digests) == 2


def test_a_program_is_compiled_without_a_run(coordinated: Coordinated) -> None:
    _, coordinator = coordinated

    def count_down(start: Any, step: Any) -> Any:
        return lax.while_loop(lambda x: x > -1, lambda x: x - step, start)

    # With a step of zero the loop has no end.
    assert coordinator.schedule(count_down, (np.float32(3), np.float32(2))).fetch() == -1


def test_rows_changed_several_times_in_a_loop_are_refused(coordinated: Coordinated) -> None:
    strategy, coordinator = coordinated
    with strategy.scope():
        table = jaxdist.Variable(np.zeros((4, 2), "float32"), name="table")

    def step() -> None:
        def body(_: Any, carry: Any) -> Any:
            table.scatter_add(IndexedSlices(jnp.ones((2, 2)), jnp.array([0, 1])))
            return carry

        lax.fori_loop(0, 3, body, 0)

    coordinator.schedule(lambda: strategy.run(step))
    with pytest.raises(ContextError, match=r"called scatter_add 3 times for 'table'"):
        coordinator.join()
    assert not table.numpy().any()


def _add_one(v: Any) -> None:
    v.assign_add(1.0)


def test_a_strategy_that_nobody_uses_is_freed() -> None:
    strategy = make_strategy()
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = jaxdist.Variable(0.0)
    coordinator.schedule(_add_one, (v,))
    coordinator.join()
    gone = weakref.ref(strategy)
    del strategy, coordinator, v
    gc.collect()
    assert gone() is None
