"""Messages of a server: fields and arrays of each method, and requests that are refused."""

import json
import pathlib
import threading
from typing import Any

import numpy as np
import optax
import pytest

from jaxdist._parameter_server.server import VariableServer, make_handlers
from jaxdist._parameter_server.transport import Message
from jaxdist.errors import ArgumentError, JaxdistError, ShapeError
from tests.parameter_server.server.exported import export_bytes, export_update


class _Client:
    """Calls handlers as a transport does: the fields are JSON."""

    def __init__(self, **options: Any) -> None:
        self.server = VariableServer(**options)
        self._handlers = make_handlers(self.server)

    def call(self, method: str, *arrays: np.ndarray, **fields: Any) -> Message:
        sent = json.loads(json.dumps(fields))
        reply = self._handlers[method](Message(method, sent, arrays))
        assert reply.method == method
        assert json.loads(json.dumps(reply.fields)) == reply.fields
        assert all(isinstance(array, np.ndarray) for array in reply.arrays)
        return reply


def _bytes(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8)


def _client() -> _Client:
    client = _Client()
    variables = [{"name": "w"}, {"name": "t"}]
    client.call("create", np.zeros(3), np.zeros((4, 2)), variables=variables, client="c")
    return client


def test_create_says_what_is_new() -> None:
    program = _bytes(export_bytes(lambda: np.ones(2, np.float32)))
    variables = [{"name": "w"}, {"name": "made", "is_program": True}]
    reply = _client().call("create", np.zeros(3), program, variables=variables)
    assert reply.fields["variables"] == {
        "w": {"status": "exists", "version": 0},
        "made": {"status": "created", "version": 0},
    }


def test_read_sends_the_values_that_are_not_known() -> None:
    client = _client()
    first = client.call("read", names=["w", "t"])
    assert (first.fields["sent"], len(first.arrays)) == (["w", "t"], 2)
    known = first.fields["versions"]
    again = client.call(
        "read", names=["w", "t"], known=known, incarnation=first.fields["incarnation"]
    )
    assert (again.fields["sent"], again.arrays) == ([], ())


def test_read_rows_has_a_version() -> None:
    reply = _client().call("read_rows", np.array([1, 1]), name="t")
    assert reply.fields["version"] == 0
    assert reply.arrays[0].shape == (2, 2)


def test_a_change_and_the_values_after_it_are_one_exchange() -> None:
    client = _client()
    changes = [
        {"op": "add", "name": "w", "operands": 1, "version": 0},
        {"op": "scatter_add", "name": "t", "operands": 2},
    ]
    arrays = (np.ones(3), np.array([1]), np.ones((1, 2)))
    fields = {"client": "c", "closure": 1, "changes": changes, "read": ["w"]}
    reply = client.call("change", *arrays, **fields)
    assert (reply.fields["status"], reply.fields["staleness"]) == ("counted", [0, None])
    np.testing.assert_array_equal(reply.arrays[0], np.ones(3))
    assert client.call("change", *arrays, **fields).fields["status"] == "already counted"


def test_an_update_program_is_registered_with_arrays_or_an_initialiser() -> None:
    client = _client()
    program, slots = export_update(optax.trace(0.9), np.zeros(3, np.float32))
    client.call("create", np.zeros(3, np.float32), variables=[{"name": "v"}])
    fields = {"key": "k", "num_slots": 1, "variables": ["v"]}
    reply = client.call("register_update", _bytes(program), *slots, **fields)
    assert reply.fields["variables"] == {"v/slot_0": {"status": "created", "version": 0}}
    init = _bytes(export_bytes(lambda v: (v,), np.zeros(3, np.float32)))
    reply = client.call("register_update", _bytes(program), init, has_init=True, **fields)
    assert reply.fields["variables"] == {"v/slot_0": {"status": "exists", "version": 0}}
    change = {"op": "program:k", "name": "v", "operands": 1}
    reply = client.call("change", np.ones(3, np.float32), changes=[change], read=["v"])
    np.testing.assert_array_equal(reply.arrays[0], np.ones(3))


def test_the_other_methods(tmp_path: pathlib.Path) -> None:
    client = _client()
    assert client.call("hello").fields["task"] == "ps:0"
    assert client.call("release", client="c", closure=1).fields == {"was_registered": False}
    assert client.call("statistics").fields["applied"] == 0
    assert client.call("delete", names=["w", "x"]).fields == {"deleted": ["w"]}
    kept = _Client(snapshot_directory=tmp_path)
    assert kept.call("snapshot").fields == {"step": 0, "applied": 0}
    kept.server.close()


_WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "no field": ("read", {}),
    "another field": ("read", {"names": ["w"], "nmaes": []}),
    "a text for a list": ("read", {"names": "w"}),
    "a number for a name": ("read", {"names": [3]}),
    "a long name": ("read", {"names": ["x" * 513]}),
    "a negative closure": ("read", {"names": ["w"], "closure": -1}),
    "a huge closure": ("read", {"names": ["w"], "closure": 1 << 64}),
    "a negative time": ("read", {"names": ["w"], "seconds": -1}),
    "no time": ("read", {"names": ["w"], "seconds": float("nan")}),
    "a negative number of operands": (
        "change",
        {"changes": [{"op": "add", "name": "w", "operands": -1}]},
    ),
    "a flag as a number": ("change", {"changes": [], "closure": True}),
    "fields where there are none": ("hello", {"x": 1}),
}


@pytest.mark.parametrize("case", _WRONG)
def test_fields_that_are_not_those_of_the_method_are_an_error(case: str) -> None:
    method, fields = _WRONG[case]
    with pytest.raises(ArgumentError, match=f"^{method} was given fields that are not valid"):
        _client().call(method, **fields)


@pytest.mark.parametrize(
    ("method", "fields", "count"),
    [
        ("create", {"variables": [{"name": "a"}, {"name": "b"}]}, 1),
        ("read", {"names": ["w"]}, 1),
        ("read_rows", {"name": "t"}, 2),
        ("change", {"changes": [{"op": "add", "name": "w", "operands": 1}]}, 0),
        ("change", {"changes": [{"op": "add", "name": "w", "operands": 1 << 60}]}, 1),
        ("register_update", {"key": "k", "num_slots": 1 << 60, "variables": ["w"]}, 1),
        ("register_update", {"key": "k", "num_slots": 0, "variables": []}, 0),
    ],
)
def test_another_number_of_arrays_is_an_error_before_anything_is_made(
    method: str, fields: dict[str, Any], count: int
) -> None:
    with pytest.raises(ShapeError, match=f"^{method} was given {count} arrays"):
        _client().call(method, *[np.zeros(3)] * count, **fields)


def test_random_requests_change_nothing_and_are_named_errors() -> None:
    client = _client()
    rng = np.random.default_rng(5)
    values = ["w", "t", "x", "", -1, 1 << 70, None, 1.5, True, [], {}, ["w"], [["w"]], [{}]]
    methods = ["create", "read", "read_rows", "change", "register_update", "release", "delete"]
    names = "names name variables client closure changes key num_slots known op operands".split()
    for _ in range(3000):
        fields = {
            str(rng.choice(names)): values[rng.integers(len(values))]
            for _ in range(rng.integers(0, 4))
        }
        if fields.get("names") == ["w"] or fields.get("changes") == []:
            continue
        arrays = [np.zeros(rng.integers(0, 3, rng.integers(0, 3))) for _ in range(rng.integers(3))]
        try:
            client.call(str(rng.choice(methods)), *arrays, **fields)
        except JaxdistError:
            pass
    reply = client.call("read", names=["w", "t"])
    assert reply.fields["versions"] == {"w": 0, "t": 0}


def test_readers_never_see_a_part_of_a_change() -> None:
    client = _client()
    is_done, errors = threading.Event(), list[BaseException]()
    ids = np.arange(4)

    def read() -> None:
        try:
            while not is_done.is_set():
                reply = client.call("read", names=["w", "t"])
                w, t = reply.arrays
                versions = set(reply.fields["versions"].values())
                assert set(w) | set(t.ravel()) == versions
                rows = client.call("read_rows", ids, name="t")
                assert set(rows.arrays[0].ravel()) == {rows.fields["version"]}
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    changes = [
        {"op": "add", "name": "w", "operands": 1},
        {"op": "scatter_add", "name": "t", "operands": 2},
    ]
    try:
        for _ in range(400):
            client.call("change", np.ones(3), ids, np.ones((4, 2)), changes=changes)
    finally:
        is_done.set()
        for thread in threads:
            thread.join()
    assert errors == []
