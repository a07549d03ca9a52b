"""Refused values: dtypes that JAX does not have, and values without known replicas."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import CrossDeviceOps, MirroredStrategy, NcclAllReduce, PerReplica, get_replica_context
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    DivergentCollectiveError,
    ReplicaValueError,
    ShapeError,
)
from tests.strategies.oracle import refused

BIG = 2**40

# A value, the error, and what the message says of it.
UNKNOWN: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "string": ("abc", ArgumentTypeError, ("str of dtype <U3",)),
    "object": (object(), ArgumentTypeError, ("of dtype object",)),
    "record": (np.zeros(2, [("a", "f4")]), ArgumentTypeError, ("('a', '<f4')",)),
    "time": (np.ones(2, "m8[s]"), ArgumentTypeError, ("timedelta64[s]",)),
    "long_double": (np.ones(2, "g"), ArgumentTypeError, ("float128", "astype('float64')")),
    "other_endian": (np.ones(2, ">f4"), ArgumentTypeError, (">f4", "astype('float32')")),
    "other_endian_ints": (np.ones(2, ">i2"), ArgumentTypeError, (">i2", "astype('int16')")),
    "masked": (
        np.ma.masked_array([1, 2], [False, True]),
        ArgumentTypeError,
        ("a masked", "filled"),
    ),
    "shape": (jax.ShapeDtypeStruct((2,), "float32"), ArgumentTypeError, ("without numbers",)),
    "big_integer": (BIG, ReplicaValueError, (str(BIG), "int32 ends at")),
    "big_integers": (
        np.array([1, BIG]),
        ReplicaValueError,
        (str(BIG), "int64 with integers", "int32"),
    ),
    "per_replica": (PerReplica([1.0, 2.0]), ContextError, ("a PerReplica", "args=(value, ...)")),
}
# Across replicas the value has another error, or is refused when the `PerReplica` is made.
OF_STEPS = {"per_replica", "big_integer", "big_integers"}


@pytest.fixture(scope="module")
def two() -> MirroredStrategy:
    return MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.mark.skipif(np.dtype("g").itemsize == 8, reason="no long double on this machine")
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_jax_does_not_have_is_named_in_a_step(two: MirroredStrategy, name: str) -> None:
    value, error, parts = UNKNOWN[name]
    with refused(error, "ReplicaContext.all_reduce", "value['a']", *parts):
        two.run(lambda: get_replica_context().all_reduce("sum", {"a": value}))
    with refused(error, "ReplicaContext.all_gather", "value['a']", *parts):
        two.run(lambda: get_replica_context().all_gather({"a": value}, 0))


@pytest.mark.skipif(np.dtype("g").itemsize == 8, reason="no long double on this machine")
@pytest.mark.parametrize("name", sorted(set(UNKNOWN) - OF_STEPS))
def test_what_jax_does_not_have_is_named_across_replicas(two: MirroredStrategy, name: str) -> None:
    value, error, parts = UNKNOWN[name]
    rows = PerReplica([value, value])
    with refused(error, "Strategy.reduce", "value", *parts):
        two.reduce("SUM", rows, axis=None)
    with refused(error, "Strategy.gather", "value", *parts):
        two.gather(rows, axis=0)
    # A mask is looked for first.
    kind = error if name == "masked" else ReplicaValueError
    with refused(kind, "NcclAllReduce.reduce", "per_replica_value"):
        NcclAllReduce().reduce("SUM", rows, "cpu:0")
    with refused(error, "NcclAllReduce.broadcast", "tensor[0]", *parts):
        NcclAllReduce().broadcast([value], "cpu:0")


def test_python_integers_are_exact_or_an_error_for_ops_on_their_own() -> None:
    ops = NcclAllReduce()
    for wrong in (BIG, PerReplica([BIG, 1])):
        with refused(ReplicaValueError, "NcclAllReduce.reduce", str(BIG), "int32 ends at"):
            ops.reduce("MEAN", wrong, "cpu:0")
    with refused(ReplicaValueError, "NcclAllReduce", "gives 2147483648", "int32 ends at"):
        ops.reduce("SUM", PerReplica([2**30, 2**30]), "cpu:0")
    assert int(ops.reduce("SUM", PerReplica([2**30, 2**30 - 1]), "cpu:0")) == 2**31 - 1


def test_ops_called_in_a_step_on_what_one_replica_has_are_refused(two: MirroredStrategy) -> None:
    ops = NcclAllReduce()
    outside = PerReplica([1.0, 2.0])
    calls: list[Any] = [
        lambda x: ops.reduce("SUM", x, "cpu:0"),
        lambda x: ops.reduce("SUM", outside, "cpu:0"),
        lambda x: ops.batch_reduce("SUM", [(x, "cpu:0")]),
        lambda x: ops.gather(x[None], "cpu:0", 0),
    ]
    for call in calls:
        with refused(ContextError, "NcclAllReduce.", "in a step", "merge_call"):
            two.run(call, (outside,))
    total = two.run(
        lambda x: get_replica_context().merge_call(lambda _, v: ops.reduce("SUM", v, v), (x,)),
        (outside,),
    )
    assert float(total) == 3.0


def test_ops_in_a_jit_are_told_what_knows_the_layout(two: MirroredStrategy) -> None:
    rows = jax.device_put(np.ones(4, "float32"), two.per_replica_sharding)
    for wrap in (lambda x: x, PerReplica.of_global):
        with refused(ReplicaValueError, "NcclAllReduce.reduce", "strategy.reduce", "jax.jit"):
            jax.jit(lambda x, wrap=wrap: NcclAllReduce().reduce("SUM", wrap(x), "cpu:0"))(rows)


def test_reduce_to_names_itself_where_it_is_called_in_a_replica(two: MirroredStrategy) -> None:
    for name, args in (("reduce_to", (1.0, "cpu:0")), ("batch_reduce_to", ([(1.0, "cpu:0")],))):
        method = getattr(two.extended, name)
        with refused(ContextError, f"extended.{name} was called", "all_reduce"):
            two.run(lambda m=method, a=args: m("SUM", *a))


class _Gives(CrossDeviceOps):
    """Ops that always return the same object."""

    def __init__(self, gives: Any) -> None:
        self.gives = gives

    def batch_reduce_implementation(self, *_: Any, **__: Any) -> Any:
        return self.gives

    def gather_implementation(self, *_: Any, **__: Any) -> Any:
        return self.gives

    def broadcast_implementation(self, *_: Any, **__: Any) -> Any:
        return self.gives


@pytest.mark.parametrize("gives", [None, {}, [], [None], [jnp.zeros(5)], "abc"], ids=repr)
def test_a_subclass_on_its_own_that_gives_the_wrong_thing_is_named(gives: Any) -> None:
    ops = _Gives(gives)
    value = PerReplica([1.0, 2.0])
    with refused(ReplicaValueError, "_Gives.batch_reduce_implementation returned"):
        ops.reduce("SUM", value, "cpu:0")
    with refused(ReplicaValueError, "_Gives.batch_reduce_implementation returned"):
        ops.batch_reduce("SUM", [(value, "cpu:0")])
    with refused(ReplicaValueError, "_Gives.broadcast_implementation returned"):
        ops.broadcast(jnp.ones(3), "cpu:0")


def test_axes_are_checked_before_a_subclass_is_asked_to_gather() -> None:
    strategy = MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=_Gives(None))
    scalars = PerReplica([1.0, 2.0])
    with refused(ShapeError, "_Gives.gather", "scalar"):
        strategy.gather(scalars, axis=0)
    with refused(ShapeError, "_Gives.gather", "axis=7", "[-1, 0]"):
        strategy.gather(PerReplica([np.ones(2)] * 2), axis=7)
    with refused(ShapeError, "_Gives.gather", "scalar"):
        strategy.run(lambda x: get_replica_context().all_gather(x, 0), (scalars,))


@pytest.mark.parametrize(
    "names",
    [
        ["cpu:0", "/cpu:0"],
        ["cpu:0", "/job:localhost/replica:0/task:0/device:CPU:0"],
        ["/job:worker/task:0", "/job:worker/replica:0/task:0"],
        ["/job:worker/task:1", "/job:Worker/task:01"],
    ],
    ids=str,
)
def test_a_worker_under_two_names_comes_twice(names: list[str]) -> None:
    with refused(ArgumentError, "one worker twice", names[1]):
        jaxdist.contrib.MultiWorkerAllReduce(names, 4)


def test_a_number_that_the_dtype_does_not_hold_is_no_accumulation() -> None:
    for gives in (1j, BIG):
        ops = jaxdist.ReductionToOneDevice(accumulation_fn=lambda _, gives=gives: gives)
        with refused(ShapeError, "accumulation_fn", repr(gives)):
            ops.reduce("SUM", PerReplica([1, 2]), "cpu:0")


def test_a_hint_that_is_none_is_told_by_the_name_it_was_given_by(two: MirroredStrategy) -> None:
    for name in ("options", "experimental_hints"):
        with refused(ArgumentTypeError, f"Strategy.reduce was given {name}=3"):
            two.reduce("MEAN", 1.0, axis=None, **{name: 3})


def test_a_collective_under_a_branch_is_told_by_the_line_that_asked_for_it() -> None:
    def step(x: Any) -> Any:
        return jax.lax.cond(x > 0, lambda x: get_replica_context().all_reduce("sum", x), abs, x)

    for ops in (NcclAllReduce(), jaxdist.ReductionToOneDevice()):
        strategy = MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
        with refused(DivergentCollectiveError, "test_wrong_values.py:", "step.<locals>"):
            strategy.run(step, (PerReplica([0.0, 1.0]),))


def test_random_keys_of_replicas_are_shown() -> None:
    keys = PerReplica([jax.random.key(0), jax.random.key(1)])
    assert "key<" in repr(keys)
    with refused(ReplicaValueError, "NcclAllReduce.reduce", "key<"):
        NcclAllReduce().reduce("SUM", keys, "cpu:0")
