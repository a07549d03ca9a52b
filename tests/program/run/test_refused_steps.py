"""Steps that cannot run are refused with their line, their names, and what to write instead."""

from collections.abc import Callable
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist import (
    PerReplica,
    RunOptions,
    Variable,
    VariableAggregation,
    get_replica_context,
    partition,
)
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    DivergentCollectiveError,
    DonationError,
    JaxdistError,
    NoRowsError,
    ShapeError,
    ShardedArrayError,
    UnsupportedError,
)
from tests.strategies.logical import tpus
from tests.strategies.oracle import refused

NUMBERS = PerReplica([1.0, 2.0])
X, Y = jnp.ones(3), jnp.ones((4, 4))
ON_READ, MEAN = jaxdist.VariableSynchronization.ON_READ, VariableAggregation.MEAN


def two(**options: Any) -> jaxdist.MirroredStrategy:
    """Two replicas."""
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1"], **options)


def run(step: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run a step on two replicas."""
    return two(**options).run(step, args)


def op_by_op(step: Callable[..., Any], *args: Any) -> Any:
    """Run a step on two replicas without compiling."""
    with jaxdist.config.run_eagerly(True):
        return two().run(step, args)


def with_variable(use: Callable[[Variable, Any], Any], **options: Any) -> Any:
    """Run a step of two replicas that uses a variable."""
    strategy = two()
    with strategy.scope():
        held = Variable(0.0, name="total", **options)
    return strategy.run(lambda x: use(held, x), (NUMBERS,))


class Unwrapped(nnx.Module):
    """Holds an array that is in no variable, and in a tuple."""

    def __init__(self) -> None:
        self.w = nnx.data((jnp.ones(2),))


def permute_otherwise(x: Any) -> Any:
    """Send values along another ring on each replica."""
    is_first = int(get_replica_context().replica_id_in_sync_group) == 0
    return jax.lax.ppermute(x, "replica", [(0, 1)] if is_first else [(1, 0)])


def solve(x: Any) -> Any:
    """Solve an equation whose operator sums over the replicas."""
    return jax.lax.custom_linear_solve(
        lambda v: jax.lax.psum(v, "replica"), x, lambda matvec, b: b / 2, symmetric=True
    )


def gather_what_was_gathered(x: Any) -> Any:
    """Gather as many rows as were gathered before, again and again."""
    context = get_replica_context()
    own = x.shape[0]
    for _ in range(20):
        x = jnp.ones(own + context.all_gather(x, 0).shape[0] ** 2 % 1009)
    return x.sum()


def add_in_a_merge(held: Variable, x: Any) -> Any:
    """Add to all copies in a merge function."""
    merge = lambda strategy, given: held.assign_add(1.0)  # noqa: E731
    return get_replica_context().merge_call(merge, (x,))


def over_logical_devices(x: Any) -> Any:
    """Map over the other axis of the mesh in the step."""
    return jax.shard_map(lambda y: y + 1, in_specs=P(), out_specs=P(), axis_names={"logical"})(x)


def sum_over_examples_and_replicas(x: Any) -> Any:
    """Sum over the axis of vmap and over the replicas at once."""
    return jax.vmap(lambda y: jax.lax.psum(y, ("example", "replica")), axis_name="example")(x)


def count_up(held: Variable, x: Any) -> Any:
    """Loop until a variable that the loop changes is large enough."""

    def body(i: Any) -> Any:
        held.assign_add(1.0)
        return i + 1

    return jax.lax.while_loop(lambda i: held.read_value() < 3, body, 0)


def pieces() -> Any:
    """An array in pieces of two replicas."""
    return partition.place(two(), {"w": Y}, {"w": partition.Shard(0, min_bytes=0)})["w"]


def halve(x: Any) -> Any:
    """Solve `2 * y = x`."""
    return jax.lax.custom_linear_solve(lambda v: v * 2, x, lambda _, b: b / 2, symmetric=True)


def sum_each_row(x: Any) -> Any:
    """Sum over the replicas for each row."""
    total = get_replica_context().all_reduce
    return jax.lax.scan(lambda c, row: (c, total("sum", row)), 0.0, x)[1].sum()


def mean_in_variable(rows: PerReplica) -> Any:
    """Assign the mean over the rows of each replica to its copy of a variable."""
    strategy = two()
    with strategy.scope():
        total = Variable(0.0, name="total", synchronization=ON_READ, aggregation=MEAN)
    return strategy.run(lambda x: total.assign(x.mean()), (rows,))


def deleted(value: jax.Array | None = None) -> jax.Array:
    """An array that is gone."""
    value = jnp.ones(4) if value is None else value
    held = jax.device_put(value, two().replicated_sharding)
    held.delete()
    return held


Row = tuple[Callable[[], Any], type[JaxdistError], tuple[str, ...]]
ROWS: dict[str, Row] = {
    "an array of texts": (
        lambda: run(lambda x: x, np.array(["a", "b"])),
        ArgumentTypeError,
        ("args[0], an array of <U1 with shape [2]", "ids instead of text"),
    ),
    "options of another compiler": (
        lambda: two().run(abs, (NUMBERS,), options=RunOptions(experimental_xla_options=3)),
        ArgumentTypeError,
        ("RunOptions was given experimental_xla_options=3", "XLAOptions"),
    ),
    "a name that is a number": (
        lambda: jaxdist.function(abs, static_argnames=("n", 3)),  # type: ignore[call-overload]
        ArgumentTypeError,
        ("jaxdist.function was given static_argnames=('n', 3)", "the name of a parameter"),
    ),
    "an array outside of variables": (
        lambda: run(lambda module: module.w[0], Unwrapped()),
        ArgumentTypeError,
        ("hold arrays outside variables", "nnx.Param(x)"),
    ),
    "other parameters of a collective on each replica": (
        lambda: op_by_op(permute_otherwise, NUMBERS),
        DivergentCollectiveError,
        ("ppermute",),
    ),
    "a collective inside of an operation": (
        lambda: op_by_op(solve, NUMBERS),
        ContextError,
        ("cannot run custom_linear_solve op by op", "test_refused_steps.py", "run_eagerly(False)"),
    ),
    "an assignment under vmap": (
        lambda: with_variable(lambda w, x: jax.vmap(w.assign_add)(jnp.ones(2))),
        ArgumentError,
        ("Variable 'total'.assign_add", "jax.vmap maps over", "float32[]"),
    ),
    "rows that follow from gathered rows": (
        lambda: run(gather_what_was_gathered, PerReplica([jnp.ones(1), jnp.ones(2)])),
        ShapeError,
        ("did not settle in", "the shapes of the arguments"),
    ),
    "an addition to all copies of a sum": (
        lambda: with_variable(
            add_in_a_merge,
            synchronization=jaxdist.VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        ),
        ArgumentError,
        ("total", "assign_add"),
    ),
    "other values in the place of pieces": (
        lambda: run(
            lambda w, x: jax.tree.map(lambda _: x, w) + 1, pieces(), PerReplica([Y, 2 * Y])
        ),
        ShardedArrayError,
        ("test_refused_steps.py", "not proved to be pieces of one array", "float32[4, 4]"),
    ),
    "pieces in an operation that holds a program": (
        lambda: run(lambda w: jax.tree.map(halve, w), pieces()),
        ShardedArrayError,
        ("custom_linear_solve holds a program that uses arrays in pieces", "test_refused_steps.py"),
    ),
    "loops of other lengths with a collective": (
        lambda: run(sum_each_row, PerReplica([jnp.ones(2), jnp.ones(3)])),
        ShapeError,
        ("A scan at", "replicas [0]: float32[], float32[2]", "replicas [1]: float32[], float32[3]"),
    ),
    "a mean over no rows in a variable": (
        lambda: mean_in_variable(PerReplica([jnp.ones(2), jnp.ones(0)])),
        NoRowsError,
        ("variable total", "Replica 1 has no rows", "test_refused_steps.py"),
    ),
    "an array that is deleted": (
        lambda: run(lambda x: x + 1, deleted()),
        DonationError,
        ("1 array(s) whose buffers are gone", "args[0]: float32[4]"),
    ),
    "a random key that is deleted": (
        lambda: run(jax.random.normal, deleted(jax.random.key(0))),
        DonationError,
        ("1 array(s) whose buffers are gone", "args[0]: key<fry>[]"),
    ),
    "a loop that waits for a variable": (
        lambda: with_variable(count_up),
        ContextError,
        ("while_loop whose condition reads a variable", "['total']", "Carry the value"),
    ),
    "a mesh of its own on virtual replicas": (
        lambda: run(over_logical_devices, NUMBERS, deterministic=2),
        UnsupportedError,
        ("shard_map", "test_refused_steps.py"),
    ),
    "a sum over a mapped dim and virtual replicas": (
        lambda: run(sum_over_examples_and_replicas, PerReplica([X, X]), deterministic=2),
        UnsupportedError,
        ("deterministic=True", "psum at", "test_refused_steps.py"),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_step_that_cannot_run_is_refused_with_its_names(name: str) -> None:
    call, error, parts = ROWS[name]
    with refused(error, *parts):
        call()


def test_an_assignment_under_vmap_is_refused_op_by_op_too() -> None:
    with jaxdist.config.run_eagerly(True), refused(ArgumentError, "'total'", "jax.vmap maps"):
        with_variable(lambda w, x: jax.vmap(w.assign_add)(jnp.ones(2)))


def test_an_error_of_the_user_on_a_logical_device_is_passed_on() -> None:
    strategy = tpus(2, 2)

    @strategy.on_logical_device(1)
    def fail(x: Any) -> Any:
        raise ValueError("an error of the user")

    with pytest.raises(ValueError, match="an error of the user"):
        strategy.run(fail, (NUMBERS,))


def test_a_replica_that_catches_everything_does_not_go_on_after_another_has_failed() -> None:
    reached: list[str] = []

    def step(x: Any) -> Any:
        context = get_replica_context()
        if int(context.replica_id_in_sync_group) == 1:
            raise ValueError("replica 1 fails")
        try:
            context.all_reduce("sum", x)
        except BaseException:
            reached.append("caught")
            context.all_reduce("sum", x)
            reached.append("went on")
            raise
        return x

    with pytest.raises(ValueError, match="replica 1 fails"):
        op_by_op(step, NUMBERS)
    assert reached == ["caught"]


def test_a_traced_value_that_outlived_its_trace_is_named_as_a_result_of_a_function() -> None:
    kept: list[Any] = []
    jax.jit(lambda x: kept.append(x) or x)(1.0)
    dead = kept[0]

    @jaxdist.function
    def returned(x: Any) -> Any:
        return dead

    with refused(ContextError, "dead"):
        returned(1.0)
