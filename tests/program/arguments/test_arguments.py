"""Which arguments are part of the program, and which are traced."""

import enum
import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdist
from jaxdist import RunOptions
from jaxdist.errors import ArgumentError, ArgumentTypeError
from tests.strategies.oracle import refused


class Colour(enum.Enum):
    """Two static values."""

    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    """Static, although it is a number."""

    LOW = 1


def _double(x: Any) -> Any:
    return 2 * x


ONE = np.float32(1)


def _described(x: Any, mode: Any) -> Any:
    """A result that says what the step was given."""
    names = {bool: 10, str: 20, bytes: 30, Colour: 40, Level: 50, type(_double): 60}
    return x + names.get(type(mode), 0) + (1 if type(mode) is bool and mode else 0)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 12),
        (False, 11),
        ("str", 21),
        (b"bytes", 31),
        (Colour.RED, 41),
        (Level.LOW, 51),
        (_double, 61),
        (1, 1),
        (1.0, 1),
        (np.True_, 1),
        (np.int32(1), 1),
    ],
    ids=lambda x: getattr(x, "__name__", repr(x)),
)
@pytest.mark.parametrize("by_name", [False, True], ids=["by_position", "by_name"])
def test_a_static_value_reaches_the_step_as_it_is_and_a_number_does_not(
    value: Any, expected: float, by_name: bool
) -> None:
    strategy = jaxdist.MirroredStrategy()
    for _ in range(4):
        result = strategy.run(
            _described, (ONE,) if by_name else (ONE, value), {"mode": value} if by_name else None
        )
        assert float(result) == expected


MIXED = [
    True,
    1,
    1.0,
    False,
    "a",
    "b",
    b"a",
    Colour.RED,
    Colour.BLUE,
    Level.LOW,
    _double,
    np.True_,
    np.float32(1),
    None,
    2,
    True,
    0,
    0.0,
]
MEANING = {bool: 10, str: 20, bytes: 30, Colour: 40, Level: 50, type(_double): 60, type(None): 70}


@pytest.mark.filterwarnings("ignore::jaxdist.errors.RetraceWarning")
@pytest.mark.parametrize("seed", range(3))
def test_static_and_traced_values_in_any_order_keep_their_own_meaning(seed: int) -> None:
    # A value that was static once made the next integers part of that program, or crashed it;
    # a NumPy boolean made the Python one traced.
    strategy = jaxdist.MirroredStrategy()
    traces: list[Any] = []

    def step(x: Any, mode: Any) -> Any:
        traces.append(mode)
        kind = MEANING.get(type(mode), 0)
        number = 0 if kind else mode
        return x + kind + number + (0.5 if mode is True else 0)

    order = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(MIXED)), 4))
    for i in order:
        mode = MIXED[i]
        kind = MEANING.get(type(mode), 0)
        expected = 1 + kind + (0 if kind else float(mode)) + (0.5 if mode is True else 0)
        assert float(strategy.run(step, (ONE, mode))) == expected, repr(mode)
    static = [m for m in traces if type(m) in MEANING]
    assert len(static) == len({(type(m), m) for m in static}), "each is traced once"


def test_calls_with_and_without_a_static_argument_take_turns() -> None:
    strategy = jaxdist.MirroredStrategy()

    def step(x: Any, mode: str = "none", *, flag: bool = False) -> Any:
        return x + {"none": 0, "a": 10}[mode] + (100 if flag else 0)

    for _ in range(3):
        assert float(strategy.run(step, (ONE,))) == 1
        assert float(strategy.run(step, (ONE, "a"))) == 11
        assert float(strategy.run(step, (ONE, "a"), {"flag": True})) == 111
        assert float(strategy.run(step, (ONE,), {"flag": True})) == 101
        assert float(strategy.run(step, (ONE,), {"mode": "a", "flag": False})) == 11


def test_static_values_inside_a_dict_are_part_of_the_program() -> None:
    strategy = jaxdist.MirroredStrategy()
    traces = []

    def step(batch: Any) -> Any:
        traces.append(batch["mode"])
        return batch["x"] * (2 if batch["mode"] == "double" else 3)

    for _ in range(3):
        assert float(strategy.run(step, ({"x": ONE, "mode": "double"},))) == 2
        assert float(strategy.run(step, ({"x": ONE, "mode": "treble"},))) == 3
    assert traces == ["double", "treble"]


def test_a_function_argument_may_be_another_one_each_time() -> None:
    strategy = jaxdist.MirroredStrategy()

    def step(fn: Callable[[Any], Any], x: Any) -> Any:
        return fn(x)

    for _ in range(3):
        assert float(strategy.run(step, (_double, ONE))) == 2
        assert float(strategy.run(step, (jnp.sin, ONE))) == pytest.approx(np.sin(1.0), rel=1e-6)


def test_static_argnames_make_a_number_part_of_the_program() -> None:
    strategy = jaxdist.MirroredStrategy()
    options = RunOptions(static_argnames=("n",))
    traces = []

    def step(x: Any, n: int) -> Any:
        traces.append(n)
        return x + jnp.ones(n)

    for _ in range(3):
        assert strategy.run(step, (ONE, 2), options=options).shape == (2,)
        assert strategy.run(step, (ONE,), {"n": 3}, options=options).shape == (3,)
    assert traces == [2, 3]


def test_static_argnames_keep_true_and_one_and_one_point_zero_apart() -> None:
    strategy = jaxdist.MirroredStrategy()
    options = RunOptions(static_argnames=("n",))

    def step(x: Any, n: Any) -> Any:
        return x + {bool: 10, int: 20, float: 30}[type(n)]

    for _ in range(3):
        found = [float(strategy.run(step, (ONE, n), options=options)) for n in (True, 1, 1.0)]
        assert found == [11, 21, 31]


def test_static_argnames_that_the_step_does_not_have_are_named() -> None:
    strategy = jaxdist.MirroredStrategy()
    with pytest.raises(ArgumentError, match=r"no parameter \['m'\]") as error:
        strategy.run(_double, (ONE,), options=RunOptions(static_argnames=("m",)))
    assert "['x']" in str(error.value)


class _Unhashable:
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("args", "kwargs", "name"),
    [
        ((ONE, _Unhashable()), {}, "args[1]"),
        (({"a": [_Unhashable()]},), {}, "args[0]['a'][0]"),
        ((ONE,), {"y": _Unhashable()}, "kwargs['y']"),
    ],
    ids=["argument", "nested", "keyword"],
)
def test_an_unhashable_object_is_named_with_what_to_do(args: Any, kwargs: Any, name: str) -> None:
    strategy = jaxdist.MirroredStrategy()
    with pytest.raises(ArgumentTypeError) as error:
        strategy.run(lambda x, y=None: x, args, kwargs)
    assert name in str(error.value)
    assert "_Unhashable" in str(error.value)
    assert "register_dataclass" in str(error.value)


@pytest.mark.parametrize("compiled_before", [False, True])
def test_keys_that_cannot_be_sorted_are_named(compiled_before: bool) -> None:
    strategy = jaxdist.MirroredStrategy()
    bad = {"a": np.ones(3), 1: np.ones(3)}

    def step(*x: Any, **named: Any) -> Any:
        return strategy.num_replicas_in_sync

    if compiled_before:
        strategy.run(step, (np.ones(3),))
        strategy.run(step, (np.ones(3),))
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "args[0],": ((bad,), {}),
        "args[1]['b'][0],": ((1.0, {"b": [bad]}), {}),
        "kwargs['c'],": ((), {"c": bad}),
    }
    for place, (args, kwargs) in calls.items():
        with refused(ArgumentError, place, "'a', 1", "sorts"):
            strategy.run(step, args, kwargs)
    assert strategy.run(step, ({1: 1.0, 2: 2.0},)) == 8


def test_a_value_error_of_the_step_is_passed_on() -> None:
    def step(x: Any) -> None:
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        jaxdist.MirroredStrategy().run(step, ({"a": 1.0},))


def test_a_static_argument_of_several_leaves_is_one_place_to_the_names_of_the_others() -> None:
    strategy = jaxdist.MirroredStrategy()
    options = RunOptions(static_argnames=("sizes",))

    def step(sizes: Any, x: Any) -> Any:
        return x

    sizes = (1, (2, 3), {}.get)
    with pytest.raises(ArgumentTypeError, match=r"cannot take args\[1\]\['x'\]"):
        strategy.run(step, (sizes, {"w": ONE, "x": _Unhashable()}), options=options)
    uneven = jaxdist.PerReplica([np.ones(i) for i in (1, 2)])
    with pytest.raises(jaxdist.errors.ReplicaValueError, match=r"args\[1\]\['x'\]"):
        strategy.run(step, (sizes, {"w": ONE, "x": uneven}), options=options)


# Nothing is kept that the user let go.


def test_a_deleted_function_is_freed_with_its_programs() -> None:
    strategy = jaxdist.MirroredStrategy()
    held = np.ones(3, np.float32)

    def step(x: Any) -> Any:
        return x + held

    for _ in range(3):
        strategy.run(step, (ONE,))
    program = weakref.ref(strategy.lower(step, (ONE,)))
    alive = weakref.ref(step)
    del step
    gc.collect()
    assert alive() is None
    assert program() is None


def test_deleted_functions_with_options_and_static_arguments_are_freed() -> None:
    strategy = jaxdist.MirroredStrategy()

    def step(x: Any, mode: Any) -> Any:
        return x + 1 if mode == "a" else x

    for mode in ("a", "b", "a"):
        strategy.run(step, (ONE, mode))
        strategy.run(step, (ONE, mode), options=RunOptions(static_argnames=("mode",)))
    alive = weakref.ref(step)
    del step
    gc.collect()
    assert alive() is None


def test_a_deleted_model_is_freed_while_its_step_lives_on() -> None:
    strategy = jaxdist.MirroredStrategy()

    def step(model: Any, x: Any) -> Any:
        model.bias[...] = model.bias[...] + 1
        return model(x)

    x = np.ones((1, 2), np.float32)
    alive = []
    for seed in range(3):
        model: Any = nnx.Linear(2, 2, rngs=nnx.Rngs(seed))
        for _ in range(3):
            strategy.run(step, (model, x))
        kernel = model.kernel.get_raw_value()
        alive += [weakref.ref(model), weakref.ref(kernel)]
        del model, kernel
    gc.collect()
    assert [r() for r in alive] == [None] * len(alive)


def test_a_deleted_strategy_is_freed() -> None:
    strategy = jaxdist.MirroredStrategy()
    for _ in range(3):
        strategy.run(_double, (ONE,))
    alive = weakref.ref(strategy)
    del strategy
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("way", ["run", "op by op", "function"])
def test_what_a_step_writes_to_a_parameter_in_a_dict_is_not_lost_without_a_word(way: str) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    param: Any = nnx.Param(jnp.ones(2))

    def writes(d: Any) -> None:
        d["p"][...] = d["p"][...] + 1

    def returns(d: Any) -> Any:
        writes(d)
        return d["p"][...]

    def call(step: Any) -> Any:
        given = {"p": param}
        if way == "function":
            return jaxdist.function(step)(given)
        with jaxdist.config.run_eagerly(way == "op by op"):
            return strategy.run(step, (given,))

    with pytest.raises(ArgumentTypeError, match=r"args\[0\]\['p'\], a Param"):
        call(writes)
    assert call(lambda d: d["p"] * 3).tolist() == [3.0, 3.0]
    assert call(returns).tolist() == [2.0, 2.0]
    module = nnx.Dict(p=param)
    strategy.run(writes, (module,))
    assert param[...].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.ones(3, ">f4"), r"it is ndarray of dtype >f4.*value.astype\('float32'\)"),
        (np.ones(3, ">i8"), r"it is ndarray of dtype >i8.*value.astype\('int64'\)"),
        (np.ones(3, np.longdouble), r"up to 64 bits.*value.astype\('float64'\)"),
        (np.ones(3, np.clongdouble), r"up to 64 bits.*value.astype\('complex128'\)"),
        (np.ma.masked_array([1.0, 2.0], [False, True]), r"it is a masked array.*value.filled\(0\)"),
        (np.ones(3, [("a", "f4"), ("b", "i4")]), r"with the fields \['a', 'b'\].*as a dict of"),
    ],
    ids=lambda x: str(getattr(x, "dtype", "")),
)
@pytest.mark.parametrize("eagerly", [False, True])
def test_an_array_that_jax_does_not_have_is_named(
    array: np.ndarray, found: str, *, eagerly: bool
) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    jaxdist.config.run_eagerly(eagerly)
    try:
        with pytest.raises(ArgumentTypeError, match=rf"(?s)args\[0\]\['x'\].*{found}"):
            strategy.run(lambda batch: batch["x"], ({"x": array},))
    finally:
        jaxdist.config.run_eagerly(False)
