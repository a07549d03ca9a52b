"""Changes of variables: each operation, and requests that are applied as a whole or not at all."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxdist._parameter_server.protocol import (
    Change,
    ChangeVariables,
    Create,
    Creation,
    GetStatistics,
    Read,
    ReadRows,
    VariableStatistics,
)
from jaxdist._parameter_server.server import VariableServer
from jaxdist.errors import ArgumentError, ArgumentTypeError, NotFoundError, ShapeError


def _server(**values: np.ndarray) -> VariableServer:
    server = VariableServer()
    server.call(Create([Creation(name, value) for name, value in values.items()]))
    return server


def _read(server: VariableServer, name: str) -> np.ndarray:
    return server.call(Read([name])).values[name]


@pytest.mark.parametrize(("op", "expected"), [("assign", 2), ("add", 5), ("sub", 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, ml_dtypes.bfloat16, np.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0)])
def test_dense_operations(op: str, expected: int, dtype: Any, shape: tuple[int, ...]) -> None:
    server = _server(w=np.full(shape, 3, dtype))
    reply = server.call(ChangeVariables([Change(op, "w", [np.full(shape, 2, dtype)])], read=["w"]))
    assert reply.values["w"].dtype == dtype
    np.testing.assert_array_equal(reply.values["w"], np.full(shape, expected, dtype))
    assert reply.versions == {"w": 1}


@pytest.mark.parametrize(
    ("op", "ufunc"),
    [
        ("scatter_add", np.add),
        ("scatter_sub", np.subtract),
        ("scatter_mul", np.multiply),
        ("scatter_div", np.divide),
        ("scatter_min", np.minimum),
        ("scatter_max", np.maximum),
    ],
)
@pytest.mark.parametrize("ids", [[4, 1], [2, 0, 2, 2, 5], []])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_operations_on_rows_count_every_row_of_one_id(
    op: str, ufunc: Any, ids: list[int], dtype: Any
) -> None:
    rng = np.random.default_rng(0)
    # Small powers of two: the result does not depend on the order.
    table = 2.0 ** rng.integers(0, 3, (6, 2))
    rows = 2.0 ** rng.integers(0, 3, (len(ids), 2))
    server = _server(t=table.astype(dtype))
    given = [np.array(ids, np.int32), rows.astype(dtype)]
    reply = server.call(ChangeVariables([Change(op, "t", given)], read=["t"]))
    ufunc.at(table, np.array(ids, int), rows)
    np.testing.assert_array_equal(reply.values["t"], table.astype(dtype))


def test_the_last_of_several_rows_with_one_id_is_taken_by_scatter_update() -> None:
    server = _server(t=np.zeros((4, 1)))
    rows = np.arange(5.0)[:, None]
    reply = server.call(
        ChangeVariables(
            [Change("scatter_update", "t", [np.array([2, 0, 2, 3, 2]), rows])], read=["t"]
        )
    )
    np.testing.assert_array_equal(reply.values["t"][:, 0], [1, 0, 4, 3])


def test_changes_of_one_request_are_applied_in_their_order_and_are_one_version() -> None:
    server = _server(t=np.zeros((4, 1)))
    one, ids = np.ones((4, 1)), np.array([1, 2])

    def rows(x: float) -> list[np.ndarray]:
        return [ids, np.full((2, 1), float(x))]

    reply = server.call(
        ChangeVariables(
            [
                Change("scatter_add", "t", rows(3)),
                Change("scatter_mul", "t", [np.array([2]), np.full((1, 1), 5.0)]),
                Change("add", "t", [one]),
                Change("scatter_update", "t", [np.array([0]), np.full((1, 1), 9.0)]),
                Change("scatter_sub", "t", rows(1)),
            ],
            read=["t"],
        )
    )
    np.testing.assert_array_equal(reply.values["t"][:, 0], [9, 3, 15, 1])
    assert reply.versions == {"t": 1}


def test_rows_after_assign_do_not_change_the_array_that_was_assigned() -> None:
    server = _server(t=np.zeros((3, 1)))
    value = np.ones((3, 1))
    server.call(ChangeVariables([Change("assign", "t", [value])]))
    server.call(ChangeVariables([Change("scatter_add", "t", [np.array([0]), np.ones((1, 1))])]))
    np.testing.assert_array_equal(value, np.ones((3, 1)))
    np.testing.assert_array_equal(_read(server, "t")[:, 0], [2, 1, 1])


_GOOD = [
    Change("add", "w", [np.ones(3)]),
    Change("scatter_add", "t", [np.array([1]), np.ones((1, 2))]),
    Change("assign", "b", [np.array(True)]),
]
_WRONG = {
    "no such variable": (Change("add", "x", [np.ones(3)]), NotFoundError),
    "no such operation": (Change("power", "w", [np.ones(3)]), ArgumentError),
    "no such program": (Change("program:x", "w", [np.ones(3)]), ArgumentError),
    "shape": (Change("add", "w", [np.ones(4)]), ShapeError),
    "a shape that broadcasts": (Change("add", "w", [np.ones(1)]), ShapeError),
    "dtype": (Change("sub", "w", [np.ones(3, np.float32)]), ShapeError),
    "no operand": (Change("add", "w", []), ArgumentError),
    "two operands": (Change("add", "w", [np.ones(3), np.ones(3)]), ArgumentError),
    "no array": (Change("add", "w", [[1.0, 1.0, 1.0]]), ArgumentTypeError),  # pyrefly: ignore
    "objects": (Change("assign", "w", [np.array([None] * 3)]), ArgumentTypeError),
    "Bools have no arithmetic": (Change("add", "b", [np.array(True)]), ArgumentError),
    "id above": (Change("scatter_add", "t", [np.array([4]), np.ones((1, 2))]), ArgumentError),
    "id below": (Change("scatter_add", "t", [np.array([-1]), np.ones((1, 2))]), ArgumentError),
    "ids of floats": (
        Change("scatter_add", "t", [np.array([1.0]), np.ones((1, 2))]),
        ArgumentTypeError,
    ),
    "rows and ids": (Change("scatter_add", "t", [np.array([1]), np.ones((2, 2))]), ShapeError),
    "width of rows": (Change("scatter_add", "t", [np.array([1]), np.ones((1, 3))]), ShapeError),
    "ids only": (Change("scatter_add", "t", [np.array([1])]), ArgumentError),
    "division of integers": (
        Change("scatter_div", "i", [np.array([1]), np.ones((1, 2), int)]),
        ArgumentError,
    ),
    "rows of bools": (
        Change("scatter_max", "m", [np.array([1]), np.ones((1, 2), bool)]),
        ArgumentError,
    ),
    "rows of a scalar": (Change("scatter_add", "b", [np.array([0]), np.ones(1)]), ShapeError),
    "a later version": (Change("add", "w", [np.ones(3)], 1), ArgumentError),
}


@pytest.mark.parametrize("k", range(len(_GOOD) + 1))
@pytest.mark.parametrize("wrong", _WRONG)
def test_a_request_that_is_wrong_at_its_kth_change_changes_nothing(wrong: str, k: int) -> None:
    values = {
        "w": np.zeros(3),
        "t": np.zeros((4, 2)),
        "b": np.array(False),
        "i": np.zeros((4, 2), int),
        "m": np.zeros((4, 2), bool),
    }
    server = _server(**values)
    change, kind = _WRONG[wrong]
    with pytest.raises(kind):
        server.call(ChangeVariables([*_GOOD[:k], change, *_GOOD[k:]], client="c", closure=1))
    found = server.call(Read(list(values)))
    assert set(found.versions.values()) == {0}
    for name, value in values.items():
        np.testing.assert_array_equal(found.values[name], value)
    # Nothing was counted either, so the closure can be sent again.
    assert server.call(ChangeVariables(_GOOD, client="c", closure=1)).status == "counted"


def test_a_request_that_reads_what_does_not_exist_changes_nothing() -> None:
    server = _server(w=np.zeros(3))
    with pytest.raises(NotFoundError):
        server.call(ChangeVariables([Change("add", "w", [np.ones(3)])], read=["x"]))
    np.testing.assert_array_equal(_read(server, "w"), np.zeros(3))


def test_a_failure_while_values_are_computed_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = _server(w=np.zeros(3), t=np.zeros((4, 2)))

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("jaxdist._parameter_server.server.stored.StagedVariable.set_rows", fail)
    with pytest.raises(MemoryError):
        server.call(ChangeVariables(_GOOD[:2], client="c", closure=1))
    monkeypatch.undo()
    assert set(server.call(Read(["w", "t"])).versions.values()) == {0}
    np.testing.assert_array_equal(_read(server, "w"), np.zeros(3))
    assert server.call(ChangeVariables(_GOOD[:2], client="c", closure=1)).status == "counted"


def test_a_change_of_few_rows_does_not_copy_the_table() -> None:
    server = _server(t=np.zeros((1 << 16, 64), np.float32))
    ids, rows = np.arange(100), np.ones((100, 64), np.float32)
    server.call(ChangeVariables([Change("scatter_add", "t", [ids, rows])]))
    table = server._state.variables["t"].value
    for _ in range(3):
        server.call(ChangeVariables([Change("scatter_add", "t", [ids, rows])]))
        server.call(ReadRows("t", ids))
    assert server._state.variables["t"].value is table


def test_the_staleness_of_a_change_counts_the_changes_since_its_read() -> None:
    server = _server(w=np.zeros(3), b=np.zeros(3))
    one = [np.ones(3)]
    for n in range(4):
        changes = [Change("add", "w", one, 0), Change("add", "b", one)]
        assert list(server.call(ChangeVariables(changes)).staleness) == [n, None]
    said = server.call(GetStatistics())
    assert said.staleness == {0: 1, 1: 1, 2: 1, 3: 1}
    assert said.variables["w"] == VariableStatistics(4, 4, 24, said.staleness)
    assert (said.applied, said.already_counted) == (4, 0)
