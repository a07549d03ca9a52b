"""Servers and workers over gRPC, all in this process: the same results as without messages."""

import dataclasses
import itertools
import logging
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import ParameterServerStrategy
from jaxdist._parameter_server.protocol import (
    Configure,
    Create,
    Created,
    Hello,
    RegisterUpdate,
    Release,
    Saved,
    ServerInfo,
    WriteSnapshot,
    as_array,
)
from jaxdist._parameter_server.transport import Message, connect
from jaxdist._parameter_server.transport.requests import call, make_message
from jaxdist._parameter_server.variables.remote_server import RemoteServer
from jaxdist._parameter_server.variables.servers import Servers
from jaxdist._parameter_server.worker_protocol import (
    Cancel,
    HelloWorker,
    Load,
    Make,
    Run,
    TracedClosure,
    WaitForAttempt,
)
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
from jaxdist.coordinator import ClusterCoordinator, experimental_get_current_worker_index
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    ClosureInputError,
    ClusterError,
    ContextError,
    DeadlineExceededError,
    JaxdistError,
    NotFoundError,
    OutOfRangeError,
    PSUnavailableError,
    RowIndexError,
    ShapeError,
    UnknownError,
    UnsupportedError,
)
from jaxdist.experimental import partitioners
from tests.parameter_server.transport.task import poll
from tests.ports import find_free_ports

X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
Y = X @ np.arange(8, dtype=np.float32).reshape(4, 2)


def pairs() -> Iterator[Any]:
    """Return batches of two sizes, as tuples."""
    return itertools.cycle([(X[:32], Y[:32]), (X[32:52], Y[32:52])])


def worker_numbers() -> Iterator[Any]:
    """Return the number of the worker."""
    number = experimental_get_current_worker_index()
    return itertools.repeat({"n": np.int32(number), "none": None, "list": [np.float32(1)]})


def three() -> Iterator[Any]:
    """Return three numbers."""
    return iter(np.arange(3.0, dtype=np.float32))


def empty() -> Iterator[Any]:
    """Return nothing."""
    return iter(())


def fails() -> Iterator[Any]:
    """Raise."""
    raise OSError("no such file")


def own_numbers() -> Iterator[Any]:
    """Return the number of the worker, which is asked for with each batch."""
    while True:
        yield np.int32(experimental_get_current_worker_index())


def fails_later() -> Iterator[Any]:
    """Return one batch, then raise."""
    yield np.float32(1)
    raise OSError("disk gone")


def of_strange_type() -> Iterator[Any]:
    """Return batches that no message describes."""
    return iter([nnx.State({"a": jnp.ones(2)})])


class _Cluster:
    """The servers and workers of a test, and a strategy that uses them."""

    def __init__(self, ps: int, workers: int) -> None:
        ports = iter(find_free_ports(ps + workers))
        self.spec = ClusterSpec(
            {
                job: [f"127.0.0.1:{next(ports)}" for _ in range(count)]
                for job, count in {"ps": ps, "worker": workers}.items()
            }
        )
        self.servers = {
            (job, index): jaxdist.Server(self.spec, job, index, modules=[__name__])
            for job in ("ps", "worker")
            for index in self.spec.task_indices(job)
        }
        self.coordinators: list[ClusterCoordinator] = []

    def make(self, *arguments: Any, **options: Any) -> tuple[Any, ClusterCoordinator]:
        resolver = SimpleClusterResolver(self.spec, task_type="chief", task_id=0)
        strategy = ParameterServerStrategy(resolver, *arguments, **options)
        self.coordinators.append(ClusterCoordinator(strategy))
        return strategy, self.coordinators[-1]

    def close(self) -> None:
        for coordinator in self.coordinators:
            coordinator._workers.stop()
            coordinator._workers.join(30)
            coordinator.strategy.storage.close()  # type: ignore[attr-defined]
        for server in self.servers.values():
            server.stop()


@pytest.fixture
def cluster() -> Iterator[_Cluster]:
    made = _Cluster(2, 2)
    yield made
    made.close()


def test_addresses_of_servers_and_workers_that_are_exchanged_are_named(cluster: _Cluster) -> None:
    tasks = cluster.spec.as_dict()
    spec = ClusterSpec({"ps": tasks["worker"], "worker": tasks["ps"]})
    with pytest.raises(ClusterError, match=r"is 'worker:0', and not 'ps:0'"):
        ParameterServerStrategy(SimpleClusterResolver(spec, task_type="chief", task_id=0))


def test_a_result_of_any_length_comes_back_and_its_closure_counts_once(cluster: _Cluster) -> None:
    strategy, coordinator = cluster.make()
    with strategy.scope():
        count = jaxdist.Variable(0)

    def make(length: int) -> Any:
        count.assign_add(1)
        return jnp.arange(length, dtype=jnp.float32)

    step = jaxdist.function(make, static_argnames="length")
    lengths = [1, 100_000, 131_000, 131_072, 1_000_000]
    for length in lengths:
        found = coordinator.schedule(step, (length,)).fetch()
        assert np.array_equal(found, np.arange(length, dtype=np.float32))
    assert int(count) == len(lengths)


def test_a_model_and_its_optimizer_train_as_on_one_device(cluster: _Cluster) -> None:
    strategy, coordinator = cluster.make()
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    alone = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    tx = optax.adam(0.05)
    optimizer, its = (
        nnx.Optimizer(model, tx, wrt=nnx.Param),
        nnx.Optimizer(alone, tx, wrt=nnx.Param),
    )

    def take(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        def loss_fn(m: Any) -> Any:
            return ((m(x) - y) ** 2).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        return strategy.run(take, (model, optimizer, x, y))

    for n in range(6):
        x, y = X[8 * n : 8 * n + 8], Y[8 * n : 8 * n + 8]
        found = coordinator.schedule(step, args=(model, optimizer, x, y)).fetch()
        np.testing.assert_allclose(found, take(alone, its, x, y), rtol=1e-5)
    np.testing.assert_allclose(model.kernel[...], alone.kernel[...], rtol=1e-5)


def test_batches_come_from_the_workers_and_may_have_several_shapes(cluster: _Cluster) -> None:
    strategy, coordinator = cluster.make()
    with strategy.scope():
        rows = jaxdist.Variable(0, name="rows")
        calls = jaxdist.Variable(0, name="calls")

    def step(iterator: Any) -> Any:
        x, y = next(iterator)
        rows.assign_add(len(x))
        calls.assign_add(1)
        return {"sum": x.sum(), "shape": (x * 0 + 1).sum(0), "none": None, "y": [y]}

    iterator = iter(coordinator.create_per_worker_dataset(pairs))
    found = [coordinator.schedule(step, args=(iterator,)) for _ in range(20)]
    coordinator.join()
    sizes = [len(one.fetch()["y"][0]) for one in found]
    assert set(sizes) == {32, 20}
    assert (int(rows), int(calls)) == (sum(sizes), 20)
    for one in found:
        size = len(one.fetch()["y"][0])
        expected = X[:32] if size == 32 else X[32:52]
        np.testing.assert_allclose(one.fetch()["sum"], expected.sum(), rtol=1e-4)
        assert one.fetch()["none"] is None


def test_a_dataset_function_knows_its_worker(cluster: _Cluster) -> None:
    _, coordinator = cluster.make()
    iterator = iter(coordinator.create_per_worker_dataset(worker_numbers))

    def step(iterator: Any) -> Any:
        batch = next(iterator)
        return batch["n"] + 10 * batch["list"][0].astype(jnp.int32)

    found = {int(coordinator.schedule(step, args=(iterator,)).fetch()) for _ in range(20)}
    assert found <= {10, 11}


def test_a_generator_knows_its_worker_with_each_batch(cluster: _Cluster) -> None:
    _, coordinator = cluster.make()

    def step(iterator: Any, own: Any) -> Any:
        index = experimental_get_current_worker_index()
        return jnp.stack([next(iterator), next(iterator), index])

    iterator = iter(coordinator.create_per_worker_dataset(own_numbers))
    found = [coordinator.schedule(step, args=(iterator, np.int32(0))).fetch() for _ in range(10)]
    assert all(len(set(each.tolist())) == 1 for each in found)
    assert {int(each[0]) for each in found} <= {0, 1}


def test_a_dataset_that_fails_later_is_named_with_its_worker_and_line(
    cluster: _Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    _, coordinator = cluster.make()
    iterator = iter(coordinator.create_per_worker_dataset(fails_later))

    def take(iterator: Any) -> Any:
        return next(iterator)

    def take_three() -> None:
        for _ in range(3):
            coordinator.schedule(take, args=(iterator,))
        coordinator.join()

    with caplog.at_level(logging.CRITICAL, "jaxdist"):
        with pytest.raises(ClosureInputError) as first:
            take_three()
        # The generator seems to have ended now, which is not what happened.
        with pytest.raises(ClosureInputError, match="disk gone"):
            take_three()
    said = r"Worker [01] could not read a batch of fails_later\(\): OSError: disk gone "
    assert re.match(said + r"\(.*test_over_grpc.py:\d+, in fails_later\)\n", str(first.value))
    # What the worker has said is the whole cause: no frames of the thread that asked it.
    assert first.value.__cause__ is None
    assert first.value.__context__ is None
    frames = [f.name for f in first.traceback]
    assert "_exchange" not in frames


def test_rows_of_a_sharded_variable_are_read_and_changed(cluster: _Cluster) -> None:
    strategy, coordinator = cluster.make(partitioners.FixedShardsPartitioner(2))
    with strategy.scope():
        table = jaxdist.Variable(np.arange(40.0, dtype=np.float32).reshape(10, 4), name="table")

    def step(ids: Any) -> Any:
        def replica_fn(ids: Any) -> Any:
            rows = jaxdist.nn.embedding_lookup(table, ids)
            table.scatter_sub(jaxdist.IndexedSlices(jnp.ones_like(rows), ids))
            return rows

        return strategy.run(replica_fn, (ids,))

    ids = np.array([1, 1, 9])
    before = np.array(table)
    np.testing.assert_array_equal(coordinator.schedule(step, args=(ids,)).fetch(), before[ids])
    np.subtract.at(before, ids, 1.0)
    np.testing.assert_array_equal(np.asarray(table), before)
    with pytest.raises(RowIndexError, match="step reads row 11 of 'table', which has 10 rows"):
        coordinator.schedule(step, args=(np.array([1, 11, 2]),)).fetch()


def test_the_coordinator_itself_reads_changes_and_runs(cluster: _Cluster) -> None:
    strategy, coordinator = cluster.make()
    with strategy.scope():
        v = jaxdist.Variable(np.ones((3, 2), np.float32), name="v")
    assert float(v.assign_add(np.full((3, 2), 2.0)).sum()) == 18
    assert float(strategy.run(lambda: v.assign_sub(jnp.ones((3, 2))).sum())) == 12
    assert coordinator.statistics().staleness == {0: 1}


def test_staleness_is_that_of_the_own_run(cluster: _Cluster) -> None:
    strategy, first = cluster.make()
    with strategy.scope():
        v = jaxdist.Variable(0.0, name="v")
    for _ in range(5):
        first.schedule(lambda: v.assign_add(v.value()))
    first.join()
    assert sum(first.statistics().staleness.values()) == 5
    # The servers go on, and another run begins.
    other, second = cluster.make()
    assert second.statistics().staleness == {}
    with other.scope():
        w = jaxdist.Variable(0.0, name="v")
    second.schedule(lambda: w.assign_add(w.value())).fetch()
    other.run(lambda: w.assign_add(w.value()))
    assert second.statistics().staleness == {0: 2}
    assert sum(first.statistics().staleness.values()) == 5


def test_errors_of_closures_and_datasets_arrive(
    cluster: _Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    _, coordinator = cluster.make()

    def take(iterator: Any) -> Any:
        return next(iterator)

    def run(dataset_fn: Any, times: int = 1) -> None:
        iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
        for _ in range(times):
            coordinator.schedule(take, args=(iterator,)).fetch()

    for dataset_fn, kind, said in [
        (fails, UnknownError, "OSError: no such file"),
        (empty, OutOfRangeError, "has no element"),
        (of_strange_type, UnsupportedError, "A batch contains a State"),
    ]:
        with caplog.at_level(logging.CRITICAL, "jaxdist"), pytest.raises(ClosureInputError) as e:
            run(dataset_fn)
        assert isinstance(e.value.original_exception, kind)
        assert said in str(e.value)
        assert f" of {dataset_fn.__name__}(): " in str(e.value)
        assert e.value.__cause__ is None
        assert e.value.__suppress_context__
    with pytest.raises(OutOfRangeError, match=r"asks for 1 batch, and .* has ended: 0 were left"):
        run(three, 7)
    with pytest.raises(OutOfRangeError):
        coordinator.join()


@pytest.mark.parametrize("make", [three, empty])
def test_a_dataset_in_the_place_of_its_iterator_is_refused(cluster: _Cluster, make: Any) -> None:
    _, coordinator = cluster.make()
    dataset = coordinator.create_per_worker_dataset(make)
    with pytest.raises(ArgumentTypeError, match=r"given args\[0\], a per-worker dataset") as caught:
        coordinator.schedule(lambda it: next(it), args=(dataset,))
    assert "Call iterator = iter(dataset)" in str(caught.value)


@pytest.mark.parametrize("dataset", [lambda: iter([X]), [X], np.ones, None])
def test_a_dataset_that_has_no_name_is_refused(cluster: _Cluster, dataset: Any) -> None:
    _, coordinator = cluster.make()
    if dataset is np.ones:
        dataset = itertools.count
        dataset = type("Local", (), {"make": lambda self: None})().make
    with pytest.raises(ArgumentError, match="create_per_worker_dataset was given"):
        coordinator.create_per_worker_dataset(dataset)


def test_a_second_coordinator_takes_the_workers_over(cluster: _Cluster) -> None:
    first_strategy, first = cluster.make()
    with first_strategy.scope():
        v = jaxdist.Variable(0, name="v")
    first.schedule(lambda: v.assign_add(1)).fetch()
    strategy, second = cluster.make()
    with strategy.scope():
        # Servers keep the variables of the job before.
        w = jaxdist.Variable(0, name="v")
    assert int(w) == 1
    second.schedule(lambda: w.assign_add(1)).fetch()
    assert int(w) == 2
    # Their own one comes back: the worker counts as lost, and is greeted again.
    first.schedule(lambda: v.assign_add(1)).fetch()
    first.schedule(lambda: v.assign_add(1)).fetch()
    assert int(v) == 4


def test_a_worker_that_was_stopped_and_started_again_goes_on(cluster: _Cluster) -> None:
    strategy, coordinator = cluster.make()
    with strategy.scope():
        v = jaxdist.Variable(0, name="v")

    def step(iterator: Any) -> Any:
        v.assign_add(1)
        return next(iterator)["n"]

    iterator = iter(coordinator.create_per_worker_dataset(worker_numbers))
    coordinator.schedule(step, args=(iterator,)).fetch()
    for index in (0, 1):
        cluster.servers["worker", index].stop()
    found = [coordinator.schedule(step, args=(iterator,)) for _ in range(10)]
    for index in (0, 1):
        cluster.servers["worker", index].start()
    assert {int(one.fetch()) for one in found} <= {0, 1}
    assert int(v) == 11


def test_a_snapshot_that_cannot_be_written_is_tried_again_before_the_next_closure() -> None:
    class Link:
        calls = 0

        def call(self, request: Any) -> Any:
            match request:
                case Create():
                    return Created(dict.fromkeys(request.list_names(), (True, 0)))
                case Hello():
                    return ServerInfo(
                        task="ps:0", incarnation="a", has_snapshots=True, versions={"v": 0}
                    )
                case WriteSnapshot():
                    self.calls += 1
                    if self.calls < 3:
                        raise CheckpointError("the disk is full")
                    return Saved(0, 0)

    link = Link()
    servers = Servers([link], "c")  # type: ignore[list-item]
    servers.create("v", np.zeros(2))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="the disk is full"):
            servers.save_new()
    servers.save_new()
    servers.save_new()
    assert link.calls == 3


def test_variables_that_no_snapshot_has_are_made_again_if_their_server_ends() -> None:
    class Link:
        """Ends in its second snapshot, and serves from its first one again."""

        def __init__(self) -> None:
            self.values: dict[str, Any] = {}
            self.saved: dict[str, Any] = {}
            self.snapshots = 0

        def call(self, request: Any) -> Any:
            match request:
                case Create() | RegisterUpdate():
                    self.values |= dict.fromkeys(request.list_names(), 0)
                    return Created(dict.fromkeys(request.list_names(), (True, 0)))
                case Hello():
                    return ServerInfo(
                        task="ps:0",
                        incarnation="a" if self.snapshots < 2 else "b",
                        has_snapshots=True,
                        versions=dict.fromkeys(self.values, 0),
                    )
                case WriteSnapshot():
                    self.snapshots += 1
                    if self.snapshots == 2:
                        self.values = dict(self.saved)
                    self.saved = dict(self.values)
                    return Saved(0, 0)

    link = Link()
    servers = Servers([link], "c")  # type: ignore[list-item]
    servers.create("v", np.zeros(2))
    servers.save_new()
    servers.create("w", np.ones(2))
    servers.register(0, RegisterUpdate("k", as_array(b""), 1, {"w": None}))
    servers.save_new()
    assert set(link.saved) == {"v", "w", "w/slot_0"}
    assert link.snapshots == 3


def test_a_server_that_was_stopped_is_named_and_found_again(
    cluster: _Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_SERVER_SECONDS", "0.2")
    strategy, coordinator = cluster.make()
    with strategy.scope():
        v = jaxdist.Variable(0, name="v")
    coordinator.schedule(lambda: v.assign_add(1)).fetch()
    cluster.servers["ps", 0].stop()
    with pytest.raises(PSUnavailableError, match=r"ps 0 at 127\.0\.0\.1") as raised:
        v.numpy()
    assert raised.value.processes == (0,)
    with pytest.raises(PSUnavailableError, match=r"ps 0 at(.|\n)*was tried"):
        coordinator.schedule(lambda: v.assign_add(1)).fetch()
    with pytest.raises(PSUnavailableError):
        coordinator.join()
    cluster.servers["ps", 0].start()
    connect(cluster.spec.task_address("ps", 0), layer="grpc").wait_until_ready(30)
    poll(lambda: _get_error(v) is NotFoundError)
    with pytest.raises(NotFoundError, match=r"ps 0 at .* was started again, and has no variables"):
        v.numpy()


def _get_error(variable: Any) -> Any:
    try:
        variable.numpy()
    except JaxdistError as error:
        return type(error)


def test_tasks_are_known_by_their_names(cluster: _Cluster) -> None:
    tasks = cluster.spec.as_dict()
    swapped: dict[str, Any] = {"ps": tasks["ps"], "worker": list(tasks["worker"])[::-1]}
    with pytest.raises(ClusterError, match=r"is 'worker:1', and not 'worker:0'"):
        ParameterServerStrategy(SimpleClusterResolver(ClusterSpec(swapped)))
    swapped = {"ps": list(tasks["ps"])[::-1], "worker": tasks["worker"]}
    with pytest.raises(ClusterError, match=r"is 'ps:1', and not 'ps:0'"):
        ParameterServerStrategy(SimpleClusterResolver(ClusterSpec(swapped)))


def test_tasks_that_do_not_answer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDIST_JOIN_SECONDS", "1")
    ps, worker = (f"127.0.0.1:{port}" for port in find_free_ports(2))
    resolver = SimpleClusterResolver(ClusterSpec({"ps": [ps], "worker": [worker]}))
    with pytest.raises(DeadlineExceededError, match=r"2 of 2 tasks(.|\n)*worker 0 at"):
        ParameterServerStrategy(resolver)


def test_max_staleness_is_set_on_the_servers(cluster: _Cluster) -> None:
    strategy, coordinator = cluster.make(max_staleness=1)
    with strategy.scope():
        v = jaxdist.Variable(0.0, name="v")

    def step() -> Any:
        return v.assign_add(v.value() * 0 + 1)

    for _ in range(30):
        coordinator.schedule(step)
    coordinator.join()
    assert float(v) == 30
    assert max(coordinator.statistics().staleness) <= 1
    channel = connect(cluster.spec.task_address("ps", 0), layer="grpc")
    server = RemoteServer(channel, 0)
    assert server.call(Hello()).max_staleness == 1
    server.call(Configure(None))
    assert server.call(Hello()).max_staleness is None
    assert server.call(Release("nobody", 1)).was_registered is False
    server.close()


def test_a_worker_refuses_messages_that_are_not_valid(cluster: _Cluster) -> None:
    channel = connect(cluster.spec.task_address("worker", 0), layer="grpc")
    with pytest.raises(ArgumentError, match="run was given fields that are not valid"):
        channel.call(Message("run", {"client": "c"}))
    wait = WaitForAttempt("c", 1)
    assert call(channel, wait).state == "stranger"
    call(channel, HelloWorker("c", [*map(str, cluster.spec.as_dict()["ps"])]))
    # An attempt that was never started, and one that comes twice.
    assert call(channel, wait).state == "old"
    make = Make(client="c", attempt=1, number=1, functions=["os:getpid"], script="x")
    answer = call(channel, make)
    assert (answer.state, answer.error is None) == ("failed", False)
    assert "without --module os" in str(answer.error)
    assert call(channel, make).state == "old"
    make = msgspec.structs.replace(make, attempt=2, functions=["__main__:main"])
    assert "the coordinator runs 'x', and this worker" in str(call(channel, make).error)
    run = Run(
        client="c",
        attempt=3,
        digest="d",
        number=1,
        fence=0,
        done_below=0,
        iterators=[],
        references=[],
        arguments=[],
    )
    assert call(channel, run).state == "unknown"
    closure = TracedClosure(
        name="f",
        digest="d",
        exported=np.zeros(3, np.uint8),
        inputs=(),
        updates=(),
        num_results=0,
        batches=(),
    )
    load = Load("c", closure, places={}, shapes=[])
    with pytest.raises(ShapeError, match="load was given 0 arrays"):
        channel.call(dataclasses.replace(make_message("load", load), arrays=()))
    call(channel, load)
    call(channel, Cancel("c", 1))
    error = call(channel, msgspec.structs.replace(run, attempt=4)).error
    assert error is not None
    assert error.name == "CancelledError"
    channel.close()


def test_only_a_parameter_server_has_a_snapshot(cluster: _Cluster) -> None:
    with pytest.raises(ContextError, match="on a task of the job 'worker'"):
        cluster.servers["worker", 0].snapshot()
    with pytest.raises(ContextError, match="no snapshot_directory"):
        cluster.servers["ps", 0].snapshot()


def test_a_step_of_the_chief_is_refused_where_snapshots_have_other_variables(
    cluster: _Cluster, tmp_path: pathlib.Path
) -> None:
    def restart() -> None:
        cluster.servers["ps", 0].stop()
        cluster.servers["ps", 0] = jaxdist.Server(
            cluster.spec, "ps", 0, snapshot_directory=str(tmp_path)
        )

    restart()
    strategy, _ = cluster.make()
    with strategy.scope():
        old = jaxdist.Variable(1.0, name="old")
    # The step writes a snapshot with the new variable first, as a scheduled function does.
    strategy.run(lambda: old.assign_add(1))
    restart()
    other, _ = cluster.make()
    with other.scope():
        new = jaxdist.Variable(1.0, name="new")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="'new' on ps:0 were made on servers"):
            other.run(lambda: new.assign_add(1))
    assert float(new) == 1


def test_a_program_of_64_bits_runs_on_a_worker_without_them(cluster: _Cluster) -> None:
    _, coordinator = cluster.make()
    third = np.float64(1) / 3
    with jax.enable_x64(True):
        wide = coordinator.schedule(lambda x: x * 2, (third,))
    narrow = coordinator.schedule(lambda x: x * 2, (third,))
    assert (wide.fetch().dtype, wide.fetch()) == (np.float64, third * 2)
    assert (narrow.fetch().dtype, narrow.fetch()) == (np.float32, np.float32(third) * 2)
