"""`reduce`, `gather` and `assign`: what a strategy keeps of earlier calls changes no result."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist
from jaxdist import IndexedSlices, PerReplica, Variable
from jaxdist.experimental import CommunicationOptions
from tools import calls

MAKE: dict[str, Callable[[], jaxdist.Strategy]] = {
    "eight": jaxdist.MirroredStrategy,
    "two": lambda: jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]),
    "virtual": lambda: jaxdist.MirroredStrategy(["cpu:0", "cpu:1"], deterministic=True),
    "by_ops": lambda: jaxdist.MirroredStrategy(cross_device_ops=jaxdist.ReductionToOneDevice()),
    "one": lambda: jaxdist.OneDeviceStrategy("cpu:2"),
}
OTHER = jaxdist.MirroredStrategy(["cpu:4", "cpu:5"])
DTYPES = ["float32", "int32", "bool", "float16", "complex64"]
VALUES = ["held", "scalars", "list", "uneven", "rows", "mirrored", "plain", "number", "slices"]
VALUES += ["deleted", "of_another", "text", "weak", "too_large"]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a method of a strategy."""

    method: str
    kind: str
    dtype: str
    rows: int
    inside: str
    axis: Any
    op: Any
    with_options: bool
    in_scope: bool
    x64: bool
    seed: int


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "method": st.sampled_from(["reduce", "reduce", "gather", "assign"]),
    "kind": st.sampled_from(VALUES),
    "dtype": st.sampled_from(DTYPES),
    "rows": st.sampled_from([1, 2]),
    "inside": st.sampled_from(["leaf", "list", "dict", "dict_of_true", "two"]),
    "axis": st.sampled_from([None, 0, 0, 1, -1, True, False, 0.0, (0,), (False,), "0"]),
    "op": st.sampled_from(["sum", "MEAN", jaxdist.ReduceOp.SUM, "max", None]),
    "with_options": st.sampled_from([False, False, False, True]),
    "in_scope": st.booleans(),
    "x64": st.sampled_from([False, False, True]),
    "seed": st.integers(0, 3),
}


@st.composite
def _sequences(draw: st.DrawFn) -> list[Call]:
    """Return calls with near keys: each differs from the one before in one or two fields."""
    sequence = [Call(**{name: draw(values) for name, values in FIELDS.items()})]
    for _ in range(draw(st.integers(1, 9))):
        names = draw(st.lists(st.sampled_from(list(FIELDS)), min_size=1, max_size=2))
        changed = {name: draw(FIELDS[name]) for name in names}
        sequence.append(dataclasses.replace(sequence[-1], **changed))
    return sequence


# Values that Python or JAX takes for equal, and that mean something else.
EQUAL: dict[str, list[tuple[Any, ...]]] = {
    "axis": [(0, False, 0.0), (1, True), ((0,), (False,))],
    "inside": [("dict", "dict_of_true")],
    "x64": [(False, True)],
}


def _twins(call: Call) -> Iterator[Call]:
    """Return the call twice, with all calls between whose keys could be taken for its own."""
    yield call
    for name, groups in EQUAL.items():
        own = getattr(call, name)
        group = next((g for g in groups if any(type(v) is type(own) and v == own for v in g)), ())
        yield from (dataclasses.replace(call, **{name: value}) for value in group)
    yield call


def _make_leaf(call: Call, strategy: jaxdist.Strategy) -> Any:
    count = strategy.num_replicas_in_sync
    numbers = np.random.default_rng(call.seed)

    def draw(*shape: int) -> np.ndarray:
        return np.asarray(numbers.integers(0, 5, shape)).astype(call.dtype)

    def rows() -> jax.Array:
        return jax.device_put(draw(count * call.rows, 3), strategy.per_replica_sharding)

    if call.kind == "held":
        return PerReplica.of_global(rows())
    if call.kind == "scalars":
        whole = jax.device_put(draw(count), strategy.per_replica_sharding)
        return PerReplica.of_global(whole, scalars=True)
    if call.kind == "list":
        return PerReplica([draw(call.rows, 3) for _ in range(count)])
    if call.kind == "uneven":
        return PerReplica([draw(1 + r % 2, 3) for r in range(count)])
    if call.kind == "slices":
        values = PerReplica([draw(2, 3) for _ in range(count)])
        return IndexedSlices(values, PerReplica([np.arange(2)] * count), (4, 3))
    if call.kind == "deleted":
        gone = rows()
        gone.delete()
        return PerReplica.of_global(gone)
    if call.kind == "of_another":
        there = jax.device_put(draw(2 * call.rows, 3), OTHER.per_replica_sharding)
        return PerReplica.of_global(there)
    return {
        "rows": rows,
        "mirrored": lambda: jax.device_put(draw(2, 3), strategy.replicated_sharding),
        "plain": lambda: draw(2, 3),
        "number": lambda: call.seed,
        "text": lambda: PerReplica(["a"] * count),
        "weak": lambda: jax.device_put(jax.numpy.asarray(2.0), strategy.replicated_sharding),
        "too_large": lambda: PerReplica([2**40] * count),
    }[call.kind]()


def _make_value(call: Call, strategy: jaxdist.Strategy) -> Any:
    leaf = _make_leaf(call, strategy)
    inside: dict[str, Callable[[], Any]] = {
        "leaf": lambda: leaf,
        "list": lambda: [leaf],
        # JAX takes the structures of these two for equal.
        "dict": lambda: {1: leaf},
        "dict_of_true": lambda: {True: leaf},
        "two": lambda: (leaf, _make_leaf(dataclasses.replace(call, kind="held"), strategy)),
    }
    return inside[call.inside]()


def _describe(tree: Any) -> Any:
    """Structure, types, dtypes, placements and bits: what a caller can see of a result."""
    leaves, treedef = jax.tree.flatten(tree)
    seen = []
    for leaf in leaves:
        is_array = isinstance(leaf, jax.Array)
        where = (leaf.weak_type, leaf.committed, str(leaf.sharding)) if is_array else None
        array = np.asarray(leaf)
        seen.append((type(leaf).__name__, array.dtype, array.shape, array.tobytes(), where))
    return repr(treedef), seen


@contextlib.contextmanager
def _settings(call: Call, strategy: jaxdist.Strategy) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if call.in_scope:
            stack.enter_context(strategy.scope())
        if call.x64:
            stack.enter_context(jax.enable_x64(True))
        yield


def _outcome(call: Call, strategy: jaxdist.Strategy, variables: dict[str, Variable]) -> Any:
    options = CommunicationOptions(bytes_per_pack=8) if call.with_options else None
    try:
        value = _make_value(call, strategy)
        with _settings(call, strategy):
            if call.method == "reduce":
                return _describe(strategy.reduce(call.op, value, call.axis, options))
            if call.method == "gather":
                return _describe(strategy.gather(value, call.axis, options))
            variable = variables["on_read" if call.seed % 2 else "mirrored"]
            return _describe(variable.assign(value)), _describe(variable.values)
    except Exception as error:
        return type(error), str(error)


def _make_variables(strategy: jaxdist.Strategy) -> dict[str, Variable]:
    with strategy.scope():
        return {
            "mirrored": Variable(
                np.zeros((2, 3), np.float32), aggregation=jaxdist.VariableAggregation.MEAN
            ),
            "on_read": Variable(
                np.zeros((2, 3), np.float32),
                synchronization=jaxdist.VariableSynchronization.ON_READ,
                aggregation=jaxdist.VariableAggregation.SUM,
            ),
        }


@pytest.mark.parametrize("name", MAKE)
@settings(max_examples=20, deadline=None)
@given(sequence=_sequences())
def test_calls_after_other_calls_give_the_bits_and_errors_of_a_new_strategy(
    name: str, sequence: list[Call]
) -> None:
    used = MAKE[name]()
    variables = _make_variables(used)
    for call in (twin for base in sequence for twin in _twins(base)):
        new = MAKE[name]()
        expected = _outcome(call, new, _make_variables(new))
        assert _outcome(call, used, variables) == expected, call


def test_structures_that_jax_takes_for_equal_keep_their_own_keys() -> None:
    strategy = MAKE["two"]()
    rows = jax.device_put(np.ones((2, 3)), strategy.per_replica_sharding)
    for key in [1, True, 1.0]:
        for combined in (
            strategy.reduce("sum", {key: rows}, None),
            strategy.gather({key: rows}, 0),
        ):
            assert list(map(repr, combined)) == [repr(key)]


def test_the_mean_of_integers_follows_the_setting_of_each_call() -> None:
    strategy = MAKE["two"]()
    rows = jax.device_put(np.asarray([[1], [2**24 + 2]], np.int32), strategy.per_replica_sharding)
    for x64, dtype in [(False, "float32"), (True, "float64"), (False, "float32")]:
        with jax.enable_x64(x64):
            mean = strategy.reduce("mean", rows, axis=None)
        assert mean.dtype == dtype
        assert np.asarray(mean).item() == (2**24 + 3) / 2 or not x64


def test_a_strategy_keeps_the_functions_of_a_limited_number_of_calls() -> None:
    strategy = MAKE["two"]()
    for size in range(1, 300):
        rows = jax.device_put(np.ones((2, size), np.int8), strategy.per_replica_sharding)
        total = strategy.reduce("sum", PerReplica.of_global(rows), axis=None)
        assert np.asarray(total).tolist() == [[2] * size]
    assert 0 < len(strategy._across._known) <= 256


def test_a_call_of_a_known_structure_makes_no_plan() -> None:
    strategy = MAKE["two"]()

    def value(fill: int) -> list[PerReplica]:
        rows = jax.device_put(np.full((4, 3), fill), strategy.per_replica_sharding)
        return [PerReplica.of_global(rows)]

    strategy.reduce("sum", value(1), axis=None)
    known = dict(strategy._across._known)
    (total,) = strategy.reduce("sum", value(5), axis=None)
    assert np.asarray(total).tolist() == [[10, 10, 10]] * 2
    assert strategy._across._known == known
    strategy.reduce("mean", value(5), axis=None)
    assert len(strategy._across._known) == len(known) + 1


def test_few_calls_stand_between_a_user_and_jax() -> None:
    strategy = MAKE["eight"]()
    frames = calls.frames_above_step(strategy)
    assert (len(frames), len(set(frames))) <= (9, 5)
    rows = strategy.run(lambda x: x + 1, (PerReplica([np.ones(2, np.float32)] * 8),))
    with strategy.scope():
        variable = Variable(np.float32(0))
    entries: list[tuple[Callable[[], Any], int]] = [
        (lambda: strategy.reduce("sum", rows, axis=None), 22),
        (lambda: strategy.gather(rows, 0), 22),
        (lambda: variable.assign(1.0), 17),
    ]
    for entry, most in entries:
        entry()
        assert 0 < len(calls.calls_of(entry)) <= most
