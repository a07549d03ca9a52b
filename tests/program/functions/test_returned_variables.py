"""A function or a step that returns a variable returns the variable itself, at every call."""

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import jaxdist
from jaxdist import partition
from jaxdist.coordinator import ShardedVariable

_WHOLE = np.arange(8, dtype="float32").reshape(4, 2)


def _make_one() -> Any:
    return jaxdist.Variable(_WHOLE)


def _make_sharded() -> Any:
    return ShardedVariable([jaxdist.Variable(_WHOLE[:1]), jaxdist.Variable(_WHOLE[1:])])


def _function(strategy: Any, fn: Any) -> Any:
    return jaxdist.function(fn)


def _run(strategy: Any, fn: Any) -> Any:
    return lambda *args: strategy.run(fn, args)


def _function_of_run(strategy: Any, fn: Any) -> Any:
    return jaxdist.function(lambda *args: strategy.run(fn, args))


RESULTS: dict[str, Callable[[Any, Any], Any]] = {
    "alone": lambda v, x: v,
    "list": lambda v, x: [v],
    "with arrays": lambda v, x: {"a": x + 1, "b": [v, x * 2]},
    "container": lambda v, x: collections.UserDict(a=v, b=x),
    "static": lambda v, x: ("text", v, x),
}


@pytest.mark.parametrize("make", [_make_one, _make_sharded])
@pytest.mark.parametrize("way", [_function, _run, _function_of_run])
@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("is_argument", [True, False], ids=["argument", "captured"])
def test_a_returned_variable_is_itself_at_every_call(
    make: Any, way: Any, name: str, is_argument: bool
) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        variable = make()
    build, x = RESULTS[name], np.float32(3)
    run = way(strategy, build if is_argument else lambda x: build(variable, x))
    for _ in range(3):
        found = run(variable, x) if is_argument else run(x)
        wanted = build(variable, x)
        assert _list(found) == _list(wanted)


def _list(result: Any) -> list[Any]:
    if isinstance(result, (jaxdist.Variable, ShardedVariable)):
        return [id(result)]
    if isinstance(result, (dict, collections.UserDict)):
        return [type(result), *[(k, _list(v)) for k, v in result.items()]]
    if isinstance(result, (list, tuple)):
        return [type(result), *map(_list, result)]
    if isinstance(result, jaxdist.PerReplica):
        return [float(result.values[0])]
    return [result if isinstance(result, str) else float(result)]


def test_a_padded_array_beside_a_variable_keeps_its_padding() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    rules = partition.Rules({"**": partition.Shard(pad=True)})
    params: Any = partition.place(strategy, {"w": np.ones((7, 11), "float32")}, rules)
    variable = jaxdist.Variable(1.0)
    fn = jaxdist.function(lambda p: {"p": strategy.run(lambda q: q, (p,)), "v": variable})
    for _ in range(3):
        found = fn(params)
        assert found["v"] is variable
        assert found["p"]["w"].has_padding
        np.testing.assert_array_equal(found["p"]["w"], np.ones((7, 11)))
        params = found["p"]


@pytest.mark.parametrize("make", [_make_one, _make_sharded])
def test_a_variable_that_is_an_argument_is_read_and_changed_as_a_captured_one(make: Any) -> None:
    variable = make()

    @jaxdist.function
    def change(given: Any, ids: Any) -> Any:
        rows = given["v"].sparse_read(ids)
        given["v"].assign_add(np.ones_like(_WHOLE))
        return rows, given["v"].value()

    wanted = _WHOLE.copy()
    for ids in ([0, 3], [1, 1]):
        rows, whole = change({"v": variable}, np.array(ids))
        np.testing.assert_array_equal(rows, wanted[ids])
        wanted += 1
        np.testing.assert_array_equal(whole, wanted)
    np.testing.assert_array_equal(variable.value(), wanted)


def test_an_object_that_holds_a_sharded_variable_is_part_of_the_program() -> None:
    class Holder:
        def __init__(self, variable: Any) -> None:
            self.variable = variable

    holder = Holder(_make_sharded())
    read = jaxdist.function(lambda h: h.variable.value())
    np.testing.assert_array_equal(read(holder), _WHOLE)
    holder.variable.assign(_WHOLE + 1)
    np.testing.assert_array_equal(read(holder), _WHOLE + 1)
