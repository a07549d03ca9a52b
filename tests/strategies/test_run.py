"""`Strategy.run`: what each replica is given, and what comes back."""

import collections
import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdist
from jaxdist import MirroredStrategy, OneDeviceStrategy, PerReplica, RunOptions, Strategy
from jaxdist.errors import ArgumentTypeError, ReplicaValueError, ShapeError
from tests.strategies.oracle import assert_each, each, is_plain, per_replica, placed, refused, split

pytestmark = pytest.mark.both_executors


class Pair(NamedTuple):
    left: Any
    right: Any


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["weights", "count"], meta_fields=["name"]
)
@dataclasses.dataclass
class Record:
    weights: Any
    count: Any
    name: str


class Colour(enum.Enum):
    RED = 1


def _id() -> jax.Array:
    return jaxdist.get_replica_context().replica_id_in_sync_group


def _two() -> MirroredStrategy:
    return MirroredStrategy(["cpu:0", "cpu:1"])


# What a replica is given


def test_every_replica_gets_its_own_part_of_a_per_replica_value(strategy: Strategy) -> None:
    x = per_replica(strategy, lambda r: np.full((2, 3), r, np.float32))
    got = strategy.run(lambda x: x * 2, (x,))
    count = strategy.num_replicas_in_sync
    assert_each(strategy, got, [np.full((2, 3), 2.0 * r) for r in range(count)])


def test_every_replica_gets_its_rows_of_an_array_in_the_per_replica_layout(
    strategy: Strategy,
) -> None:
    count = strategy.num_replicas_in_sync
    rows = np.arange(count * 6, dtype=np.float32).reshape(count * 2, 3)
    got = strategy.run(lambda x: x + 1, (split(strategy, rows),))
    assert_each(strategy, got, np.split(rows + 1, count))


def test_every_replica_gets_the_whole_of_a_mirrored_array(strategy: Strategy) -> None:
    rows = np.arange(16, dtype=np.float32).reshape(8, 2)
    got = strategy.run(lambda x: x.sum(0), (placed(strategy, rows),))
    assert is_plain(got)
    assert_each(strategy, got, [rows.sum(0)] * strategy.num_replicas_in_sync)


def test_every_replica_gets_the_whole_of_a_value_that_is_not_distributed(
    strategy: Strategy,
) -> None:
    count = strategy.num_replicas_in_sync
    rows = np.arange(16, dtype=np.float32).reshape(8, 2)
    on_another_device = jax.device_put(rows, jax.local_devices()[-1])
    for given in (rows, jnp.asarray(rows), on_another_device):
        got = strategy.run(_sum_of_rows, (given,))
        assert_each(strategy, got, [rows.sum(0)] * count)
    assert float(strategy.run(_double, (2.5,))) == 5.0
    assert int(strategy.run(_double, (3,))) == 6
    assert complex(strategy.run(_double, (1 + 2j,))) == 2 + 4j


def _sum_of_rows(x: Any) -> Any:
    return x.sum(0)


def _double(x: Any) -> Any:
    return x * 2


def test_per_replica_leaves_are_found_anywhere_in_the_arguments(strategy: Strategy) -> None:
    count = strategy.num_replicas_in_sync
    x = per_replica(strategy, lambda r: np.float32(r))
    y = np.float32(10)

    def step(given: Any, pair: Pair, *, record: Record) -> Any:
        assert type(given) is dict
        assert type(given["list"]) is list
        assert type(given["tuple"]) is tuple
        assert type(pair) is Pair
        assert type(record) is Record
        assert record.name == "r"
        leaves = [given["list"][0], given["tuple"][1], pair.left, record.weights["w"]]
        shared = [given["tuple"][0], pair.right, record.count]
        return jnp.stack(leaves), jnp.stack(shared)

    own, shared = strategy.run(
        step,
        args=({"list": [x], "tuple": (y, x)}, Pair(x, y)),
        kwargs={"record": Record({"w": x}, y, "r")},
    )
    assert_each(strategy, own, [np.full(4, float(r)) for r in range(count)])
    assert is_plain(shared)
    assert_each(strategy, shared, [np.full(3, 10.0)] * count)


def test_keyword_arguments_are_handled_like_positional_ones(strategy: Strategy) -> None:
    x = per_replica(strategy, lambda r: float(r + 1))
    got = strategy.run(lambda x, y: x * y, (x,), {"y": 10.0})
    assert_each(strategy, got, [10.0 * (r + 1) for r in range(strategy.num_replicas_in_sync)])


def test_arguments_may_be_a_list(strategy: Strategy) -> None:
    assert int(strategy.run(lambda a, b: a - b, [5, 3])) == 2


@pytest.mark.compiled
@pytest.mark.parametrize(
    "constant",
    [True, False, "text", b"bytes", None, Colour.RED, len, (), [], {}, np.dtype("int8")],
    ids=repr,
)
def test_a_python_object_reaches_the_step_as_it_is(constant: Any) -> None:
    seen = []
    _two().run(lambda x, y: seen.append((x, y["nested"])), (constant, {"nested": constant}))
    assert seen == [(constant, constant)]
    assert type(seen[0][0]) is type(constant)


@pytest.mark.compiled
@pytest.mark.parametrize("number", [3, 2.5, 1j, np.int8(4), np.float32(2)], ids=repr)
def test_a_number_reaches_the_step_traced_with_its_dtype(number: Any) -> None:
    seen = []
    _two().run(lambda x: seen.append((isinstance(x, jax.Array), x.dtype, x.shape)), (number,))
    assert seen == [(True, jnp.asarray(number).dtype, ())]


def test_a_python_constant_that_changes_gives_another_program() -> None:
    strategy = _two()

    def step(mode: str, x: Any) -> Any:
        return x + 1 if mode == "up" else x - 1

    got = [int(strategy.run(step, (mode, 5))) for mode in ("up", "down", "up", "down")]
    assert got == [6, 4, 6, 4]


def test_1_and_true_and_1_0_are_different_arguments() -> None:
    strategy = _two()

    def step(x: Any) -> str:
        return type(x).__name__ if isinstance(x, bool) else str(x.dtype)

    given = [1, True, 1.0, True, 1, 1.0, False]
    want = ["int32", "bool", "float32", "bool", "int32", "float32", "bool"]
    assert [strategy.run(step, (x,)) for x in given] == want


def test_a_captured_array_is_the_same_on_every_replica(strategy: Strategy) -> None:
    captured = np.arange(3.0, dtype=np.float32)
    on_device = jnp.asarray(captured)
    got = strategy.run(lambda: captured + on_device)
    assert is_plain(got)
    assert_each(strategy, got, [captured * 2] * strategy.num_replicas_in_sync)


def test_a_captured_per_replica_value_is_refused_with_the_remedy() -> None:
    strategy = _two()
    x = PerReplica([1.0, 2.0])
    with refused(ReplicaValueError, "as result['x']", "Pass it as an argument"):
        strategy.run(lambda: {"x": x})
    with refused(ArgumentTypeError, "inside strategy.run(fn, args=(value,))"):
        strategy.run(lambda: x + 1)


# What comes back


def test_what_is_proved_equal_comes_back_as_a_plain_replicated_array(strategy: Strategy) -> None:
    got = strategy.run(lambda x: x + 1, (np.arange(3.0, dtype=np.float32),))
    assert is_plain(got)
    assert got.is_fully_replicated
    assert got.devices() == set(strategy.mesh.devices.flat)
    assert_each(strategy, got, [np.arange(1.0, 4.0)] * strategy.num_replicas_in_sync)


def test_what_differs_comes_back_as_a_value_for_each_replica(strategy: Strategy) -> None:
    got = strategy.run(_id)
    count = strategy.num_replicas_in_sync
    assert isinstance(got, PerReplica) is (count > 1)
    assert_each(strategy, got, list(range(count)))


def test_the_result_of_an_all_reduce_is_plain_and_goes_in_again_mirrored(
    strategy: Strategy,
) -> None:
    count = strategy.num_replicas_in_sync
    total = strategy.run(lambda: jaxdist.get_replica_context().all_reduce("sum", _id()))
    assert is_plain(total)
    again = strategy.run(lambda t: t * 2, (total,))
    assert is_plain(again)
    assert int(again) == count * (count - 1)


def test_with_one_replica_everything_is_plain() -> None:
    for strategy in (
        jaxdist.get_strategy(),
        OneDeviceStrategy("cpu:2"),
        MirroredStrategy(["cpu:1"]),
    ):
        got = strategy.run(lambda x: (x, _id(), 7), (PerReplica([np.ones(2, np.float32)]),))
        assert is_plain(got[0])
        assert is_plain(got[1])
        assert got[2] == 7


@pytest.mark.parametrize(
    "constant", [7, 1000, 3.5, True, "str", None, Colour.RED, (), [], {}], ids=repr
)
def test_a_python_constant_comes_back_as_it_is(constant: Any) -> None:
    got = _two().run(lambda: {"a": _id(), "b": constant})
    assert got["b"] == constant
    assert type(got["b"]) is type(constant)
    assert isinstance(got["a"], PerReplica)


def test_a_string_argument_that_is_returned_comes_back_as_it_is(strategy: Strategy) -> None:
    got = strategy.run(lambda s, x: (s, x), ("text", 1.0))
    assert got[0] == "text"
    assert float(got[1]) == 1.0


def test_structures_and_their_types_are_kept(strategy: Strategy) -> None:
    def step() -> Any:
        return {
            "tuple": (_id(), 1),
            "list": [_id(), [_id()]],
            "named": Pair(_id(), "text"),
            "ordered": collections.OrderedDict(z=_id(), a=None),
            "default": collections.defaultdict(list, k=_id()),
            "record": Record(_id(), 2, "r"),
        }

    got = strategy.run(step)
    assert type(got["tuple"]) is tuple
    assert type(got["list"]) is list
    assert type(got["named"]) is Pair
    assert got["named"].right == "text"
    assert type(got["ordered"]) is collections.OrderedDict
    assert list(got["ordered"]) == ["z", "a"]
    assert got["ordered"]["a"] is None
    assert type(got["default"]) is collections.defaultdict
    assert got["default"]["missing"] == []
    assert type(got["record"]) is Record
    assert (got["record"].name, got["record"].count) == ("r", 2)
    for leaf in (
        got["tuple"][0],
        got["list"][0],
        got["list"][1][0],
        got["named"].left,
        got["ordered"]["z"],
        got["default"]["k"],
        got["record"].weights,
    ):
        assert_each(strategy, leaf, list(range(strategy.num_replicas_in_sync)))


# Numbers of less than a byte: tests/collectives/test_less_than_a_byte.py.
DTYPES = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "float16",
    "bfloat16",
    "float32",
    "complex64",
    "float8_e4m3fn",
]


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (2,), (0, 3)], ids=str)
def test_every_dtype_goes_in_and_out_as_it_is(name: str, shape: tuple[int, ...]) -> None:
    strategy = _two()
    mirrored = np.ones(shape, _dtype(name))
    own = per_replica(strategy, lambda r: np.full(shape, r, _dtype(name)))
    same, different = strategy.run(lambda a, b: (a, b), (mirrored, own))
    assert is_plain(same)
    assert same.dtype == _dtype(name)
    assert isinstance(different, PerReplica)
    assert {v.dtype for v in different.values} == {_dtype(name)}
    for have, want in zip(each(strategy, same), [mirrored] * 2, strict=True):
        np.testing.assert_array_equal(have, want)
    for have, want in zip(different.values, own.values, strict=True):
        assert have.shape == shape
        np.testing.assert_array_equal(np.asarray(have), want)


def test_typed_random_keys_go_in_and_out(strategy: Strategy) -> None:
    def step(key: jax.Array) -> Any:
        own = jax.random.fold_in(key, _id())
        return key, own, jax.random.uniform(own)

    key = jax.random.key(3)
    same, own, drawn = strategy.run(step, (key,))
    assert is_plain(same)
    assert jax.dtypes.issubdtype(same.dtype, jax.dtypes.prng_key)
    np.testing.assert_array_equal(jax.random.key_data(same), jax.random.key_data(key))
    count = strategy.num_replicas_in_sync
    want = [float(jax.random.uniform(jax.random.fold_in(key, r))) for r in range(count)]
    assert_each(strategy, drawn, want)
    again = strategy.run(lambda k: jax.random.uniform(k), (own,))
    assert_each(strategy, again, want)


# The documented examples


def test_outputs_of_one_step_are_the_inputs_of_the_next(strategy: Strategy) -> None:
    ids = np.arange(strategy.num_replicas_in_sync)
    out1 = strategy.run(lambda: _id() + 1)
    assert_each(strategy, out1, list(ids + 1))
    out2 = strategy.run(lambda x: {"a": 2 * x, "b": x * x}, args=(out1,))
    assert_each(strategy, out2["a"], list(2 * (ids + 1)))
    assert_each(strategy, out2["b"], list((ids + 1) ** 2))
    out3 = strategy.run(lambda b, a: 2 + 2 * b + a, kwargs=out2)
    assert_each(strategy, out3, list(2 + 2 * (ids + 1) ** 2 + 2 * (ids + 1)))
    if len(ids) == 2:
        assert_each(strategy, out3, [6, 14])


def test_rows_are_squared_where_they_lie() -> None:
    rows = PerReplica([np.array([5.0, 6.0]), np.array([7.0, 8.0])])
    assert_each(_two(), _two().run(lambda x: x * x, (rows,)), [[25.0, 36.0], [49.0, 64.0]])


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"])
def test_gradients_inside_a_step_are_those_of_the_replica(wrap: Callable[..., Any]) -> None:
    strategy = _two()
    rows = PerReplica([np.array([5.0, 6.0]), np.array([7.0, 8.0])])
    got = strategy.run(wrap(jax.grad(lambda x: (x * x).sum())), (rows,))
    assert_each(strategy, got, [[10.0, 12.0], [14.0, 16.0]])


def test_gradients_of_mirrored_parameters_are_local_until_they_are_all_reduced(
    strategy: Strategy,
) -> None:
    count = strategy.num_replicas_in_sync
    x = per_replica(strategy, lambda r: np.float32(r + 1))

    def step(w: Any, x: Any) -> Any:
        grad = jax.grad(lambda w: w * x)(w)
        return grad, jaxdist.get_replica_context().all_reduce("mean", grad)

    local, mean = strategy.run(step, (2.0, x))
    assert_each(strategy, local, [r + 1.0 for r in range(count)])
    assert is_plain(mean)
    assert float(mean) == (count + 1) / 2


def test_a_nested_dict_of_ids_comes_back_for_each_replica(strategy: Strategy) -> None:
    got = strategy.run(lambda: {"id": {"a": _id() - 1, "b": _id() + 1}})
    count = strategy.num_replicas_in_sync
    assert_each(strategy, got["id"]["a"], [r - 1 for r in range(count)])
    assert_each(strategy, got["id"]["b"], [r + 1 for r in range(count)])


def test_a_step_on_many_replicas_is_that_of_one_device_on_the_same_batch(
    strategy: Strategy,
) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 5)).astype(np.float32)
    y = x @ rng.normal(size=(5, 1)).astype(np.float32)
    assert not 24 % strategy.num_replicas_in_sync

    def step(w: Any, batch: Any) -> Any:
        x, y = batch
        loss, grad = jax.value_and_grad(lambda w: ((x @ w - y) ** 2).mean())(w)
        loss, grad = jaxdist.get_replica_context().all_reduce("mean", (loss, grad))
        return w - 0.1 * grad, loss

    def losses(strategy: Strategy) -> list[float]:
        w = np.zeros((5, 1), np.float32)
        batch = split(strategy, x), split(strategy, y)
        found = []
        for _ in range(5):
            w, loss = strategy.run(step, (w, batch))
            found.append(float(loss))
        return found

    np.testing.assert_allclose(losses(strategy), losses(OneDeviceStrategy("cpu:0")), rtol=1e-5)


# Functions of all kinds, and how often they are traced


class _Scaler:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: Any) -> Any:
        return x * self.by

    def method(self, x: Any) -> Any:
        return x * self.by


@pytest.mark.parametrize(
    "fn",
    [
        jax.jit(lambda x: x * 3.0),
        functools.partial(lambda a, x: x * a, 3.0),
        _Scaler(3.0),
        _Scaler(3.0).method,
        jax.vmap(lambda x: x * 3.0),
        functools.wraps(len)(lambda x: x * 3.0),
    ],
    ids=["jit", "partial", "callable_object", "bound_method", "vmap", "wrapper"],
)
def test_every_kind_of_callable_runs(fn: Callable[..., Any]) -> None:
    strategy = _two()
    rows = PerReplica([np.array([1.0]), np.array([2.0])])
    for _ in range(2):
        assert_each(strategy, strategy.run(fn, (rows,)), [[3.0], [6.0]])


@pytest.mark.compiled
def test_a_step_is_traced_once_for_all_replicas_and_once_for_all_calls(
    strategy: Strategy,
) -> None:
    traces = []

    def step(x: Any) -> Any:
        traces.append(x.shape)
        return x + _id()

    for value in (1.0, 2.0, 3.0):
        x = per_replica(strategy, lambda r, v=value: np.full(2, v, np.float32))
        strategy.run(step, (x,))
    assert traces == [(2,)]
    strategy.run(step, (per_replica(strategy, lambda r: np.ones(3, np.float32)),))
    assert traces == [(2,), (3,)]


@pytest.mark.a_device_for_each
def test_a_step_inside_a_users_jit_is_traced_once_for_each_trace_of_it(
    strategy: Strategy,
) -> None:
    traces = []

    def step(x: Any) -> Any:
        traces.append(x.shape)
        return jaxdist.get_replica_context().all_reduce("sum", x)

    @jax.jit
    def outer(x: Any) -> Any:
        return strategy.run(step, (x,)) + 1

    for value in (1.0, 2.0):
        got = float(outer(np.float32(value)))
        assert got == value * strategy.num_replicas_in_sync + 1
    assert traces == [()]


@pytest.mark.a_device_for_each
def test_a_step_inside_a_users_scan_keeps_its_meaning(strategy: Strategy) -> None:
    def step(w: Any, x: Any) -> Any:
        return w + jaxdist.get_replica_context().all_reduce("mean", x * (_id() + 1.0))

    @jax.jit
    def outer(xs: Any) -> Any:
        return jax.lax.scan(lambda w, x: (strategy.run(step, (w, x)), 0), 0.0, xs)[0]

    count = strategy.num_replicas_in_sync
    want = 6.0 * (count + 1) / 2
    np.testing.assert_allclose(float(outer(jnp.asarray([1.0, 2.0, 3.0]))), want, rtol=1e-6)


# Errors


class _OwnError(Exception):
    pass


def test_exceptions_of_a_step_keep_their_type_and_identity(strategy: Strategy) -> None:
    raised: list[Exception] = []

    def step() -> None:
        raise raised[-1]

    for error in (ZeroDivisionError("0"), KeyError("key"), _OwnError("own")):
        raised.append(error)
        with pytest.raises(type(error)) as caught:
            strategy.run(step)
        assert caught.value is error


def test_a_step_that_raised_can_be_run_again() -> None:
    strategy = _two()
    fails = [True]

    def step(x: Any) -> Any:
        if fails:
            fails.clear()
            raise _OwnError
        return x + 1

    with pytest.raises(_OwnError):
        strategy.run(step, (1,))
    assert int(strategy.run(step, (1,))) == 2


@pytest.mark.compiled
def test_python_control_flow_on_the_replica_id_is_jaxs_error() -> None:
    with pytest.raises(jax.errors.TracerBoolConversionError):
        _two().run(lambda: 1 if _id() == 0 else [2])


@pytest.mark.parametrize("args", [{"x": 1}, 1.0, "ab", None, {1}], ids=repr)
def test_arguments_that_are_no_list_are_refused(args: Any) -> None:
    strategy = _two()
    with refused(
        ArgumentTypeError,
        "strategy.run was given args=",
        "args is a list or tuple",
        "args=(value,)",
    ):
        strategy.run(lambda *a: a, args)
    with pytest.raises(ValueError, match="list or tuple"):
        strategy.run(lambda *a: a, args)


def test_an_array_as_args_is_refused_and_not_taken_apart() -> None:
    with refused(ArgumentTypeError, "of type ndarray", "Wrap a single argument"):
        _two().run(lambda *a: a, np.ones(2))  # type: ignore[arg-type]


def test_keyword_arguments_that_are_no_dict_are_refused() -> None:
    with refused(ArgumentTypeError, "kwargs is a dict", "of type list"):
        _two().run(lambda **k: k, (), [("x", 1)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kwargs"):
        _two().run(lambda **k: k, (), [("x", 1)])  # type: ignore[arg-type]


@pytest.mark.parametrize("fn", [None, 3, "step", np.ones(2)], ids=["None", "3", "str", "array"])
def test_what_is_no_function_is_refused_with_the_way_to_pass_one(fn: Any) -> None:
    strategy = _two()
    with refused(
        ArgumentTypeError,
        "strategy.run was given fn=",
        f"of type {type(fn).__name__}",
        "strategy.run(step, args=(state, batch))",
    ):
        strategy.run(fn)


def test_options_are_a_run_options_and_leave_the_result_as_it_is() -> None:
    strategy = _two()
    options = RunOptions(experimental_enable_dynamic_batch_size=False)
    assert int(strategy.run(lambda x: x + 1, (1,), options=options)) == 2
    with refused(ArgumentTypeError, "options is a jaxdist.RunOptions", "of type str"):
        strategy.run(lambda x: x + 1, (1,), options="fast")  # type: ignore[arg-type]


def test_run_options_have_the_documented_fields_and_defaults() -> None:
    assert RunOptions()._asdict() == {
        "experimental_enable_dynamic_batch_size": True,
        "experimental_bucketizing_dynamic_shape": False,
        "experimental_xla_options": None,
        "donate_argnums": (),
        "static_argnames": (),
        "compiler_options": (),
        "saved_program": None,
    }


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_per_replica_argument_with_the_wrong_number_of_values_is_named(count: int) -> None:
    given = {"batch": [PerReplica(range(count))]}
    with refused(
        ReplicaValueError,
        "args[0]['batch'][0]",
        f"with {count} values",
        "2 replicas",
        "Pass a PerReplica of 2 value(s)",
    ):
        _two().run(lambda b: b, (given,))


def test_a_per_replica_keyword_argument_is_named_by_its_keyword() -> None:
    with refused(ReplicaValueError, "kwargs['batch']", "3 values"):
        _two().run(lambda batch: batch, kwargs={"batch": PerReplica(range(3))})


def test_a_per_replica_argument_of_another_strategy_is_named_with_both_places() -> None:
    theirs = MirroredStrategy().run(_id)
    with refused(
        ReplicaValueError,
        "args[1]['ids'] is a PerReplica of another strategy",
        "8 devices",
        "2 replicas",
        "gather(value, axis=0)",
    ):
        _two().run(lambda a, b: b, (1.0, {"ids": theirs}))


def test_a_per_replica_argument_of_a_strategy_on_other_devices_is_refused() -> None:
    theirs = MirroredStrategy(["cpu:2", "cpu:3"]).run(_id)
    with refused(ReplicaValueError, "args[0] is a PerReplica of another strategy"):
        _two().run(lambda b: b, (theirs,))


def test_a_per_replica_argument_of_a_strategy_on_one_device_is_refused() -> None:
    theirs = _two().run(_id)
    for strategy in (OneDeviceStrategy("cpu:0"), MirroredStrategy(["cpu:3"])):
        with refused(ReplicaValueError, "args[0] is a PerReplica of another strategy"):
            strategy.run(lambda b: b, (theirs,))


def test_values_of_other_ranks_are_named_with_their_shapes_and_the_remedy() -> None:
    uneven = PerReplica([np.ones((3, 2), np.float32), np.ones(2, np.float32)])
    with refused(
        ShapeError,
        "args[0]['x'] is a PerReplica whose values differ in shape or dtype",
        "replica 0: float32[3, 2]",
        "replica 1: float32[2]",
        "Pad dim 0 to 3 rows",
        "drop_remainder=True",
    ):
        _two().run(lambda d: d, ({"x": uneven},))


def test_per_replica_strings_are_named_and_refused() -> None:
    with refused(
        ReplicaValueError, "args[0]", "replica 0 is str: 'a0'", "Pass it as a plain argument"
    ):
        _two().run(lambda s: s, (PerReplica(["a0", "a1"]),))


def test_an_object_that_cannot_be_hashed_is_named_with_the_remedy() -> None:
    class Odd:
        __hash__ = None  # type: ignore[assignment]

    with refused(ArgumentTypeError, "args[1]['odd']", "Odd", "register_dataclass"):
        _two().run(lambda a, b: a, (1.0, {"odd": Odd()}))


def test_after_every_error_the_strategy_works_and_its_values_are_unchanged() -> None:
    strategy = _two()
    kept = strategy.run(lambda: _id() + 1.5)
    with pytest.raises(ReplicaValueError):
        strategy.run(_double, (PerReplica(range(3)),))
    with pytest.raises(ShapeError):
        strategy.run(_double, (PerReplica([np.ones(1), np.ones((2, 2))]),))
    with pytest.raises(ArgumentTypeError):
        strategy.run(3)  # type: ignore[arg-type]
    with pytest.raises(jaxdist.errors.ArgumentError):
        strategy.reduce("max", kept, axis=None)
    assert_each(strategy, kept, [1.5, 2.5])
    assert_each(strategy, strategy.run(_double, (kept,)), [3.0, 5.0])
