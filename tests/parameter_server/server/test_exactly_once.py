"""A closure that is sent several times counts once, also after a restart."""

import dataclasses
import pathlib
import tempfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist._parameter_server.protocol import (
    Change,
    ChangeVariables,
    Create,
    Creation,
    GetStatistics,
    Hello,
    Read,
    WriteSnapshot,
)
from jaxdist._parameter_server.server import VariableServer
from jaxdist.errors import ArgumentError
from tests import tables

_ROWS = 4


def _make_server(**options: Any) -> VariableServer:
    server = VariableServer(**options)
    server.call(Create([Creation("w", np.zeros(2)), Creation("t", np.zeros((_ROWS, 2)))]))
    return server


def test_a_request_that_comes_again_changes_nothing_and_gets_the_values() -> None:
    server = _make_server()
    changes = [Change("add", "w", [np.ones(2)])]
    first = server.call(ChangeVariables(changes, client="c", closure=1, read=["w"]))
    again = server.call(ChangeVariables(changes, client="c", closure=1, read=["w"]))
    assert (first.status, again.status) == ("counted", "already counted")
    np.testing.assert_array_equal(again.values["w"], np.ones(2))
    assert again.versions == first.versions
    assert server.call(GetStatistics()).already_counted == 1


def test_closures_of_two_clients_with_one_number_are_two() -> None:
    server = _make_server()
    for client in ("a", "b"):
        reply = server.call(
            ChangeVariables([Change("add", "w", [np.ones(2)])], client=client, closure=1)
        )
        assert reply.status == "counted"


def test_a_change_without_a_closure_is_always_applied() -> None:
    server = _make_server()
    for n in range(3):
        assert (
            server.call(ChangeVariables([Change("add", "w", [np.ones(2)])], client="c")).status
            == "counted"
        )
        assert server.call(Read(["w"])).versions["w"] == n + 1


def test_a_closure_below_the_watermark_is_finished_and_not_applied() -> None:
    server = _make_server()
    one = [Change("add", "w", [np.ones(2)])]
    assert (
        server.call(ChangeVariables(one, client="c", closure=5, done_below=5)).status == "counted"
    )
    # An older watermark that comes late changes nothing.
    assert (
        server.call(ChangeVariables(one, client="c", closure=6, done_below=2)).status == "counted"
    )
    assert server.call(ChangeVariables(one, client="c", closure=4)).status == "finished"
    assert server.call(Read(["w"])).versions["w"] == 2


def test_closures_below_the_watermark_are_forgotten() -> None:
    server = _make_server()
    for n in range(1, 200):
        server.call(ChangeVariables([], client="c", closure=n, done_below=max(n - 3, 0)))
    assert server._state.counted.to_json() == {"c": {"below": 196, "counted": [196, 197, 198, 199]}}


def test_a_closure_below_its_own_watermark_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="closure=3 and done_below=4"):
        _make_server().call(ChangeVariables([], client="c", closure=3, done_below=4))


@dataclasses.dataclass(frozen=True)
class _Sent:
    """One closure: its changes, in whole numbers, so that the order does not matter."""

    client: str
    closure: int
    value: int
    ids: tuple[int, ...]

    def changes(self) -> list[Change]:
        rows = np.full((len(self.ids), 2), float(self.value))
        return [
            Change("add", "w", [np.full(2, float(self.value))]),
            Change("scatter_add", "t", [np.array(self.ids, int), rows]),
            Change("scatter_sub", "t", [np.array(self.ids[:1], int), rows[:1]]),
        ]


class _Model:
    """The oracle: NumPy, and a set of the closures that were counted."""

    def __init__(self) -> None:
        self.w, self.t = np.zeros(2), np.zeros((_ROWS, 2))
        self.counted: set[tuple[str, int]] = set()

    def apply(self, sent: _Sent) -> None:
        if (sent.client, sent.closure) not in self.counted:
            self.counted.add((sent.client, sent.closure))
            self.w += sent.value
            np.add.at(self.t, np.array(sent.ids, int), sent.value)
            self.t[list(sent.ids[:1])] -= sent.value

    def check(self, server: VariableServer) -> None:
        found = server.call(Read(["w", "t"]))
        np.testing.assert_array_equal(found.values["w"], self.w)
        np.testing.assert_array_equal(found.values["t"], self.t)
        assert found.versions["w"] == len(self.counted)


def _closures(count: int) -> list[_Sent]:
    rng = np.random.default_rng(count)
    return [
        _Sent(f"client {n % 3}", 1 + n // 3, int(rng.integers(-9, 9)), tuple(rng.integers(0, 4, 3)))
        for n in range(count)
    ]


@given(order=st.lists(st.integers(0, 11), max_size=40))
@settings(max_examples=tables.examples(60), deadline=None)
def test_any_order_of_closures_and_retries_equals_a_model_that_counts_each_once(
    order: list[int],
) -> None:
    closures, server, model = _closures(12), _make_server(), _Model()
    for n in order:
        sent = closures[n]
        is_new = (sent.client, sent.closure) not in model.counted
        reply = server.call(
            ChangeVariables(sent.changes(), client=sent.client, closure=sent.closure)
        )
        model.apply(sent)
        assert reply.status == ("counted" if is_new else "already counted")
    model.check(server)


@pytest.mark.parametrize("k", range(7))
def test_a_restart_loses_what_came_after_the_snapshot_and_counts_retries_once(
    tmp_path: pathlib.Path, k: int
) -> None:
    closures, model = _closures(6), _Model()
    server = _make_server(snapshot_directory=tmp_path, snapshot_seconds=1e6)
    for n, sent in enumerate(closures):
        if n == k:
            server.call(WriteSnapshot())
        server.call(ChangeVariables(sent.changes(), client=sent.client, closure=sent.closure))
    if k == len(closures):
        server.call(WriteSnapshot())
    # A killed server writes no last snapshot; its lock ends with the process.
    kept = VariableServer(snapshot_directory=tmp_path, snapshot_seconds=1e6)
    for sent in closures[:k]:
        model.apply(sent)
    model.check(kept)
    assert kept.call(Hello()).applied == k
    assert kept.call(Hello()).versions == {"w": k, "t": k}
    for sent in closures:
        is_new = (sent.client, sent.closure) not in model.counted
        reply = kept.call(ChangeVariables(sent.changes(), client=sent.client, closure=sent.closure))
        assert reply.status == ("counted" if is_new else "already counted")
        model.apply(sent)
    model.check(kept)


@given(
    order=st.lists(st.integers(0, 8), min_size=1, max_size=20),
    snapshot=st.integers(0, 20),
    end=st.integers(0, 20),
)
@settings(max_examples=tables.examples(8), deadline=None)
def test_a_restart_at_any_request_equals_the_model_at_the_snapshot(
    order: list[int], snapshot: int, end: int
) -> None:
    closures, model, at_snapshot = _closures(9), _Model(), _Model()
    with tempfile.TemporaryDirectory() as folder:
        server = _make_server(snapshot_directory=folder, snapshot_seconds=1e6)
        server.call(WriteSnapshot())
        for n, number in enumerate(order[:end]):
            if n == snapshot:
                server.call(WriteSnapshot())
                at_snapshot.w, at_snapshot.t = model.w.copy(), model.t.copy()
                at_snapshot.counted = set(model.counted)
            sent = closures[number]
            server.call(ChangeVariables(sent.changes(), client=sent.client, closure=sent.closure))
            model.apply(sent)
        kept = VariableServer(snapshot_directory=folder, snapshot_seconds=1e6)
        at_snapshot.check(kept)
        for sent in closures:
            kept.call(ChangeVariables(sent.changes(), client=sent.client, closure=sent.closure))
            at_snapshot.apply(sent)
        at_snapshot.check(kept)
        kept.close()
        server.close()
