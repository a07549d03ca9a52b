"""The line of log for steps in which every replica computes the same rows."""

import itertools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

import jaxdist
from jaxdist import PerReplica, get_replica_context
from tests.processes.job import results_of_job
from tests.tables import sampled

ROWS = 16
X = np.linspace(0, 1, ROWS * 4, dtype="float32").reshape(ROWS, 4)


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    devices = np.asarray(jax.devices()[:8], dtype=object).reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


STRATEGIES: dict[str, Callable[[], jaxdist.Strategy]] = {
    "2 replicas": lambda: jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]),
    "8 replicas": jaxdist.MirroredStrategy,
    "2 axes": lambda: jaxdist.MirroredStrategy(
        mesh=_mesh((2, 4), ("slice", "data")), replica_axes=("slice", "data")
    ),
    "logical devices": lambda: jaxdist.MirroredStrategy(
        mesh=_mesh((4, 2), ("data", "model")), replica_axes=("data",)
    ),
    "4 virtual replicas": lambda: jaxdist.OneDeviceStrategy("cpu:0", deterministic=4),
    "one replica": lambda: jaxdist.OneDeviceStrategy("cpu:0"),
}

# What the step gets, and whether it is a batch that is on no mesh.
Make = Callable[[jaxdist.Strategy], Any]
ARGUMENTS: dict[str, tuple[Make, bool]] = {
    "numpy": (lambda s: X, True),
    "numpy in a dict": (lambda s: {"x": X, "y": X[:, 0]}, True),
    "uncommitted": (lambda s: jnp.asarray(X), True),
    "on one device": (lambda s: jax.device_put(X, jax.devices()[1]), True),
    "replicated": (lambda s: jax.device_put(X, s.replicated_sharding), False),
    "split": (lambda s: jax.device_put(X, s.per_replica_sharding), False),
    "per replica": (lambda s: PerReplica([X] * s.num_replicas_in_sync), False),
    "uneven": (
        lambda s: PerReplica([X[: 2 + (n == 0)] for n in range(s.num_replicas_in_sync)]),
        False,
    ),
    "dataset": (lambda s: next(iter(s.experimental_distribute_dataset([X]))), False),
    "keys": (lambda s: jax.random.split(jax.random.key(0), ROWS), False),
    "raw keys": (lambda s: jax.random.PRNGKey(0), False),
    "scalar": (lambda s: np.float32(3), False),
    "fewer rows": (lambda s: X[: s.num_replicas_in_sync - 1], False),
    "module": (lambda s: _made_in(s, lambda: nnx.Linear(ROWS, 4, rngs=nnx.Rngs(0))), False),
    "state of a module": (lambda s: nnx.state(nnx.Linear(ROWS, 4, rngs=nnx.Rngs(0))), False),
    "params": (lambda s: {"params": {"kernel": X}}, False),
    "optax": (lambda s: optax.adam(0.1).init({"kernel": jnp.asarray(X)}), False),
}


def _made_in(strategy: jaxdist.Strategy, make: Callable[[], Any]) -> Any:
    with strategy.scope():
        return make()


def _leaves(tree: Any) -> list[jax.Array]:
    tree = nnx.state(tree) if isinstance(tree, nnx.Module) else tree
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    is_key = jax.dtypes.issubdtype
    return [
        jnp.asarray(jax.random.key_data(x) if is_key(x.dtype, jax.dtypes.prng_key) else x, float)
        for x in arrays
    ]


def _total(tree: Any) -> jax.Array:
    return jnp.asarray(sum(jnp.sum(x**2) for x in _leaves(tree)))


def _replica() -> Any:
    return get_replica_context().replica_id_in_sync_group


def _without_collectives(tree: Any) -> Any:
    return [2 * x for x in _leaves(tree)]


def _all_reduce(tree: Any) -> Any:
    return get_replica_context().all_reduce("sum", _total(tree))


def _all_gather(tree: Any) -> Any:
    return get_replica_context().all_gather(_total(tree)[None], 0)


def _in_loops(tree: Any) -> Any:
    total = jax.lax.fori_loop(0, 3, lambda _, x: x + 1, _total(tree))
    return jax.lax.cond(total > 0, lambda: total, lambda: -total)


def _own_rows(tree: Any) -> Any:
    rows = [x for x in _leaves(tree) if x.ndim]
    return get_replica_context().all_reduce(
        "sum", sum(jnp.sum(x[_replica() % max(len(x), 1)]) for x in rows) + _replica()
    )


def _dropout(tree: Any) -> Any:
    key = jax.random.fold_in(jax.random.key(0), _replica())
    total = sum(jnp.sum(x * jax.random.bernoulli(key, 0.5, x.shape)) for x in _leaves(tree))
    return get_replica_context().all_reduce("sum", jnp.asarray(total))


def _branch_by_replica(tree: Any) -> Any:
    return jax.lax.cond(_replica() == 0, lambda x: x, lambda x: -x, _total(tree))


# Whether the replicas do the same work with equal arguments.
STEPS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "no collective": (_without_collectives, True),
    "all-reduce": (_all_reduce, True),
    "all-gather": (_all_gather, True),
    "loops": (_in_loops, True),
    "own rows": (_own_rows, False),
    "dropout by replica": (_dropout, False),
    "branch by replica": (_branch_by_replica, False),
}


TABLE = [
    *itertools.product(STRATEGIES, ARGUMENTS, STEPS),
]


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "computes all rows" in r.getMessage()]


def _run_row(row: tuple[str, str, str], caplog: pytest.LogCaptureFixture) -> None:
    of_strategy, of_argument, of_step = row
    strategy = STRATEGIES[of_strategy]()
    make, is_batch = ARGUMENTS[of_argument]
    work, is_same = STEPS[of_step]
    if strategy.num_replicas_in_sync == 1 and of_argument == "fewer rows":
        pytest.skip("one replica has no fewer rows than that")
    if of_argument == "uneven" and of_strategy in ("4 virtual replicas", "logical devices"):
        pytest.skip("such replicas have as many rows as one another")

    # A function of its own: a program is checked once.
    def step(value: Any) -> Any:
        return work(value)

    value = make(strategy)
    expected = is_batch and is_same and strategy.num_replicas_in_sync > 1
    with caplog.at_level(logging.WARNING, logger="jaxdist"):
        strategy.run(step, (value,))
        strategy.run(step, (value,))
    lines = _lines(caplog)
    assert len(lines) == expected, lines
    for line in lines:
        count = strategy.num_replicas_in_sync
        assert f"each of {count} replicas computes all rows of value" in line
        assert "experimental_distribute_dataset" in line
        assert "\n" not in line


@pytest.mark.parametrize("row", sampled(TABLE, 24, name=", ".join))
def test_one_line_where_every_replica_computes_one_host_batch(
    row: tuple[str, str, str], caplog: pytest.LogCaptureFixture
) -> None:
    _run_row(row, caplog)


_EAGERLY = [row for row in TABLE if "virtual" not in row[0]]


@pytest.mark.parametrize("row", sampled(_EAGERLY, 12, name=", ".join))
def test_the_same_lines_op_by_op(
    row: tuple[str, str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with jaxdist.config.run_eagerly():
        _run_row(row, caplog)


def _make_training(strategy: jaxdist.Strategy, kind: str) -> tuple[Any, Any, Callable[..., Any]]:
    """Return a model, its optimizer, and a step."""
    tx = optax.adam(0.1)
    with strategy.scope():
        model = nnx.Linear(4, ROWS + 1, rngs=nnx.Rngs(0))
        updates = tx if kind == "whole" else jaxdist.sharded_update(tx, min_bytes=0)
        optimizer = nnx.Optimizer(model, updates, wrt=nnx.Param)
    if kind == "fsdp":
        rules = jaxdist.partition.fsdp(min_bytes=0)
        jaxdist.partition.place(strategy, (model, optimizer), rules)

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        if kind == "whole":
            grads = get_replica_context().all_reduce("mean", grads)
        optimizer.update(model, grads)
        return get_replica_context().all_reduce("mean", loss)

    return model, optimizer, step


@pytest.mark.both_executors
@pytest.mark.parametrize("split", [False, True], ids=["whole batch", "split batch"])
@pytest.mark.parametrize("kind", ["whole", "sharded update", "fsdp"])
def test_training_names_the_batch_and_not_the_state(
    kind: str, split: bool, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = jaxdist.MirroredStrategy([f"cpu:{n}" for n in range(4)])
    model, optimizer, step = _make_training(strategy, kind)
    x = jax.device_put(X, strategy.per_replica_sharding) if split else X
    with caplog.at_level(logging.WARNING, logger="jaxdist"):
        strategy.run(step, (model, optimizer, x))
        strategy.run(step, (model, optimizer, x))
    lines = _lines(caplog)
    assert len(lines) == (not split), lines
    assert all("all rows of x [16, 4]." in line for line in lines)


def _update(params: Any, state: Any, *batch: Any) -> Any:
    def loss(params: Any) -> Any:
        rows = batch[0] if batch else jnp.ones((1, ROWS))
        return jnp.mean((rows @ params["kernel"] + params["bias"][None]) ** 2)

    grads = get_replica_context().all_reduce("mean", jax.grad(loss)(params))
    updates, state = optax.adam(0.1).update(grads, state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.both_executors
def test_plain_parameters_that_a_step_updates_are_state(caplog: pytest.LogCaptureFixture) -> None:
    strategy = jaxdist.MirroredStrategy()
    given = {"kernel": jnp.ones((ROWS, 8)), "bias": jnp.ones(8)}
    state = optax.adam(0.1).init(given)
    rows = np.ones((16, ROWS), "float32")

    def step(a: Any, b: Any, *batch: Any) -> Any:
        return _update(a, b, *batch)

    with caplog.at_level(logging.WARNING, logger="jaxdist"):
        strategy.run(step, (given, state))
        strategy.run(step, (given, state, jax.device_put(rows, strategy.per_replica_sharding)))
    assert not _lines(caplog)
    with caplog.at_level(logging.WARNING, logger="jaxdist"):
        strategy.run(step, (given, state, rows))
    [line] = _lines(caplog)
    assert "all rows of batch[0] [16, 16]." in line


def test_once_a_program_also_where_the_first_call_had_an_array_on_the_mesh(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = jaxdist.MirroredStrategy()

    def step(x: Any) -> Any:
        return jnp.sum(x)

    with caplog.at_level(logging.WARNING, logger="jaxdist"):
        strategy.run(step, (jax.device_put(X, strategy.replicated_sharding),))
        assert not _lines(caplog)
        for _ in range(3):
            strategy.run(step, (X,))
        assert len(_lines(caplog)) == 1
        strategy.run(step, (np.ones((32, 4), "float32"),))
    assert len(_lines(caplog)) == 2


def test_a_batch_of_which_only_the_shape_is_used_is_no_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = jaxdist.MirroredStrategy()

    def rows_of(x: Any) -> Any:
        return jnp.float32(x.shape[0])

    with caplog.at_level(logging.WARNING, logger="jaxdist"):
        strategy.run(rows_of, (X,))
    assert not _lines(caplog)


def test_what_only_an_effect_gets_is_work_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    strategy = jaxdist.MirroredStrategy()
    split = jax.device_put(X, strategy.per_replica_sharding)

    def step(x: Any, y: Any) -> Any:
        jax.debug.callback(lambda value: None, jnp.sum(y))
        return 2 * x

    with caplog.at_level(logging.WARNING, logger="jaxdist"):
        strategy.run(step, (X, split))
    assert not _lines(caplog)


def test_a_decision_of_python_op_by_op_is_work_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = jaxdist.MirroredStrategy()
    split = jax.device_put(X, strategy.per_replica_sharding)

    def step(x: Any, y: Any) -> Any:
        return 2 * x if float(jnp.sum(y)) > -1 else x

    with jaxdist.config.run_eagerly(), caplog.at_level(logging.WARNING, logger="jaxdist"):
        strategy.run(step, (X, split))
    assert not _lines(caplog)


def test_inside_of_other_traces_an_array_of_unknown_place_is_named_with_what_to_pass(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = jaxdist.MirroredStrategy()

    def run(x: Any) -> Any:
        def step(x: Any) -> Any:
            return get_replica_context().all_reduce("sum", jnp.sum(x))

        return strategy.run(step, (x,))

    split = jax.device_put(X, strategy.per_replica_sharding)
    replicated = jax.device_put(X, strategy.replicated_sharding)
    with caplog.at_level(logging.WARNING, logger="jaxdist"):
        # JAX does not say where a traced array is: here the sum counts each row 8 times.
        assert jax.jit(run)(split) == pytest.approx(8 * X.sum(), rel=1e-5)
        (line,) = _lines(caplog)
        assert "counts each row 8 times" in line
        assert "jaxdist.PerReplica.of_global(x)" in line
        right = jax.jit(lambda x: run(PerReplica.of_global(x)))(split)
        assert right == pytest.approx(X.sum(), rel=1e-5)
        jaxdist.function(lambda x: run(x))(replicated)
        assert len(_lines(caplog)) == 1
        jax.jit(lambda: run(X))()
        assert len(_lines(caplog)) == 2
        jaxdist.function(lambda x: run(x))(X)
    assert len(_lines(caplog)) == 3
    assert not any("counts each row" in line for line in _lines(caplog)[1:])


@pytest.mark.parametrize("kind", ["scan", "grad", "vmap"])
def test_a_step_in_a_trace_whose_rows_are_split_logs_nothing(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = jaxdist.MirroredStrategy()

    def step(w: Any, x: Any) -> Any:
        return get_replica_context().all_reduce("sum", jnp.sum(x @ w))

    def run(w: Any, x: Any) -> Any:
        return strategy.run(step, (w, PerReplica.of_global(x)))

    w = np.ones((4, 16), np.float32)
    with caplog.at_level(logging.WARNING, logger="jaxdist"):
        if kind == "scan":
            jax.jit(lambda w, x: jax.lax.scan(lambda c, _: (run(c, x) * c, None), w, length=2))(
                w, X
            )
        elif kind == "grad":
            jax.jit(jax.grad(run))(w, X)
        else:
            jax.jit(jax.vmap(run, in_axes=(0, None)))(w[None], X)
    assert not _lines(caplog)


def _compare(w: Any, batch: Any) -> Any:
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


def test_an_error_about_shapes_names_the_argument_that_is_not_split() -> None:
    strategy = jaxdist.MirroredStrategy()
    split = jax.device_put(X, strategy.per_replica_sharding)
    w = np.ones(4, np.float32)
    with pytest.raises(TypeError, match="incompatible shapes") as error:
        strategy.run(_compare, (w, {"x": split, "y": np.zeros(ROWS, np.float32)}))
    (note,) = [n for n in error.value.__notes__ if "is split over the replicas" in n]
    assert note.startswith(
        "args[1]['x'] is split over the replicas: each gets 2 of its 16 rows. args[1]['y'] is a "
        "plain array, and each replica gets all of its 16 rows."
    )
    assert "jax.device_put(args[1]['y'], strategy.per_replica_sharding)" in note


def test_parameters_with_as_many_rows_as_the_batch_are_not_taken_for_a_batch() -> None:
    strategy = jaxdist.MirroredStrategy()
    split = jax.device_put(X, strategy.per_replica_sharding)

    def step(params: Any, x: Any) -> Any:
        return x @ params["w"]

    with pytest.raises(TypeError) as error:
        strategy.run(step, ({"w": np.ones((ROWS, 3), np.float32)}, split))
    assert not any("is split" in n for n in getattr(error.value, "__notes__", []))


@pytest.mark.parametrize("rows", [15, 3])
def test_an_error_about_shapes_of_other_rows_has_no_such_note(rows: int) -> None:
    strategy = jaxdist.MirroredStrategy()
    split = jax.device_put(X, strategy.per_replica_sharding)
    wrong = {"x": split, "y": np.zeros(rows, np.float32)}
    with pytest.raises(TypeError, match="incompatible shapes") as error:
        strategy.run(_compare, (np.ones(4, np.float32), wrong))
    assert not any("is split" in n for n in getattr(error.value, "__notes__", []))


def _lines_of_process() -> list[str]:
    """The lines that one process of a job logs: of steps with equal batches, and of a model."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    lines: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return True

    logging.getLogger("jaxdist").addFilter(note)
    strategy.run(lambda x: x * 2, (X,))
    jaxdist.fit.Model(nnx.Linear(4, 1, rngs=nnx.Rngs(0)))
    return [line for line in lines if "each of 4 replicas" in line or "one of 4 devices" in line]


def test_in_a_job_one_process_logs_for_all() -> None:
    first, second = results_of_job(_lines_of_process, 2, devices=2)
    assert len(first) == 2, first
    assert second == []
