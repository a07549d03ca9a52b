"""`max_staleness`: no change is staler than the bound, and nothing waits for ever."""

import random
import threading
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
    Read,
    Release,
)
from jaxdist._parameter_server.server import VariableServer
from jaxdist._parameter_server.server.server import HOLD_SECONDS
from jaxdist.errors import ArgumentError, DeadlineExceededError
from tests import tables

_ONE = [np.ones(1)]


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _server(s: int, *names: str, **options: Any) -> VariableServer:
    server = VariableServer(max_staleness=s, **options)
    server.call(Create([Creation(name, np.zeros(1)) for name in names or ("w",)]))
    return server


def _read(server: VariableServer, closure: int, *names: str, **options: Any) -> int:
    options = {"seconds": 0.0, **options}
    found = server.call(Read(names or ("w",), client="c", closure=closure, **options))
    assert found.is_registered
    return found.versions[(names or ("w",))[0]]


def _change(server: VariableServer, closure: int, *names: str, **options: Any) -> Any:
    changes = [Change("add", name, _ONE) for name in names or ("w",)]
    given: dict[str, Any] = {"seconds": 0.0, **options}
    return server.call(ChangeVariables(changes, client="c", closure=closure, **given))


@pytest.mark.parametrize("s", [0, 1, 3])
def test_a_read_is_admitted_while_at_most_s_others_are_in_flight(s: int) -> None:
    server = _server(s)
    for n in range(s + 1):
        _read(server, n)
    with pytest.raises(DeadlineExceededError, match=f"function {s + 1} waited 0 s") as caught:
        _read(server, s + 1)
    assert "function 0 of client 'c'" in str(caught.value)
    _change(server, 0)
    _read(server, s + 1)


def test_a_read_without_a_closure_never_waits() -> None:
    server = _server(0)
    _read(server, 1)
    assert not server.call(Read(["w"], client="c", seconds=0.0)).is_registered


def test_without_a_bound_nothing_is_registered() -> None:
    server = VariableServer()
    server.call(Create([Creation("w", np.zeros(1))]))
    assert not server.call(Read(["w"], client="c", closure=1)).is_registered
    assert server.call(Release("c", 1)).was_registered is False


def test_a_change_waits_while_it_would_make_an_older_closure_too_stale() -> None:
    server = _server(1)
    _read(server, 1)
    _read(server, 2)
    _change(server, 2)  # Closure 1 may be one change late.
    _read(server, 3)
    with pytest.raises(DeadlineExceededError, match="function 3 waited") as caught:
        _change(server, 3)
    assert "function 1 of client 'c'" in str(caught.value)
    assert _change(server, 1).staleness == (1,)
    assert _change(server, 3).staleness == (1,)


def test_the_same_closure_reads_again_in_the_place_of_its_first_read() -> None:
    server = _server(0)
    for _ in range(3):
        _read(server, 1)
    assert _change(server, 1).status == "counted"


def test_a_released_closure_lets_others_go_on() -> None:
    server = _server(0)
    _read(server, 1)
    assert server.call(Release("c", 1)).was_registered is True
    assert server.call(Release("c", 1)).was_registered is False
    _read(server, 2)


def test_a_closure_is_released_when_its_deadline_is_over() -> None:
    clock = _Clock()
    server = _server(0, clock=clock)
    _read(server, 1)
    with pytest.raises(DeadlineExceededError):
        _read(server, 2)
    clock.now = HOLD_SECONDS
    _read(server, 2)
    # The first one comes back: it is now a write like any other, which waits for its turn.
    with pytest.raises(DeadlineExceededError):
        _change(server, 1)
    _change(server, 2)
    late = server.call(
        ChangeVariables([Change("add", "w", _ONE, 0)], client="c", closure=1, seconds=0.0)
    )
    assert late.status == "too stale"
    assert server.call(Read(["w"])).versions["w"] == 1
    _read(server, 1)
    assert _change(server, 1).status == "counted"


def test_a_read_that_waits_goes_on_when_a_deadline_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jaxdist._parameter_server.server.server.HOLD_SECONDS", 0.05)
    server = _server(0)
    _read(server, 1)
    assert _read(server, 2, seconds=30.0) == 0


def test_writes_of_the_coordinator_take_their_turn_and_are_applied() -> None:
    server = _server(1)
    _read(server, 1)
    reply = server.call(ChangeVariables([Change("assign", "w", _ONE)], client="c", seconds=0.0))
    assert (reply.status, reply.staleness) == ("counted", (None,))
    with pytest.raises(DeadlineExceededError, match="a change outside of a function"):
        server.call(ChangeVariables([Change("assign", "w", _ONE)], client="c", seconds=0.0))
    assert _change(server, 1).staleness == (1,)


def test_a_registered_closure_changes_only_what_it_registered() -> None:
    server = _server(1, "w", "b")
    _read(server, 1, "w")
    with pytest.raises(ArgumentError, match=r"'b', which closure 1 did not register.*'w'"):
        _change(server, 1, "w", "b")
    server.call(Release("c", 1))
    server.call(Read(["w"], client="c", closure=1, register=["b"]))
    assert _change(server, 1, "w", "b").staleness == (0, 0)


def test_a_change_ends_the_registration_also_of_variables_that_it_left() -> None:
    server = _server(0, "w", "b")
    _read(server, 1, "w", "b")
    _change(server, 1, "w")
    _read(server, 2, "w", "b")


def test_a_change_computed_before_a_restart_counts_the_changes_that_are_not_lost() -> None:
    server = _server(1)
    variable = server._state.variables["w"]
    variable.version = variable.start_version = 5
    for base, expected in ((9, 0), (5, 1), (4, None)):
        reply = server.call(
            ChangeVariables(
                [Change("add", "w", _ONE, base)], client="c", closure=base, incarnation="before"
            )
        )
        assert reply.status == ("too stale" if expected is None else "counted")
        if expected is not None:
            assert reply.staleness == (expected,)


def test_a_request_that_comes_twice_while_the_first_waits_counts_once() -> None:
    server = _server(0)
    _read(server, 1)
    statuses: list[str] = []

    def send() -> None:
        reply = server.call(
            ChangeVariables([Change("add", "w", _ONE)], client="d", closure=1, seconds=30.0)
        )
        statuses.append(reply.status)

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    _change(server, 1)
    for thread in threads:
        thread.join(30)
    assert sorted(statuses) == ["already counted", "counted"]
    assert server.call(Read(["w"])).versions["w"] == 2


_NAMES = ("a", "b", "c")


@given(data=st.data(), s=st.integers(0, 3))
@settings(max_examples=tables.examples(60), deadline=None)
def test_in_any_order_the_bound_holds_and_the_oldest_never_waits(data: Any, s: int) -> None:
    server = _server(s, *_NAMES)
    flight: list[tuple[int, tuple[str, ...]]] = []
    number = 0
    for _ in range(data.draw(st.integers(1, 40))):
        number += 1
        action = data.draw(st.sampled_from(["read", "oldest", "any", "release", "write"]))
        if action == "read":
            names = tuple(data.draw(st.sets(st.sampled_from(_NAMES), min_size=1)))
            counts = [sum(name in others for _, others in flight) for name in names]
            try:
                _read(server, number, *names)
                assert max(counts) <= s
                flight.append((number, names))
            except DeadlineExceededError:
                assert max(counts) > s
        elif action == "write":
            try:
                server.call(ChangeVariables([Change("add", "a", _ONE)], client="c", seconds=0.0))
            except DeadlineExceededError:
                assert any("a" in names for _, names in flight)
        elif flight:
            n = 0 if action == "oldest" else data.draw(st.integers(0, len(flight) - 1))
            closure, names = flight[n]
            if action == "release":
                assert server.call(Release("c", closure)).was_registered
                del flight[n]
                continue
            try:
                reply = _change(server, closure, *names)
            except DeadlineExceededError:
                assert n > 0
                continue
            assert reply.status == "counted"
            assert all(0 <= found <= s for found in reply.staleness)
            del flight[n]
    # All that are left come through, the oldest first.
    for closure, names in flight:
        assert all(found <= s for found in _change(server, closure, *names).staleness)


@pytest.mark.parametrize("s", [0, 2])
def test_threads_of_different_speed_come_through_within_the_bound(s: int) -> None:
    server = _server(s, *_NAMES)
    workers, rounds = 5, 40
    errors: list[BaseException] = []

    def work(worker: int) -> None:
        rng = random.Random(worker)
        try:
            for n in range(rounds):
                names = rng.sample(_NAMES, rng.randint(1, 3))
                options: dict[str, Any] = {"client": f"{worker}", "closure": n, "seconds": 60.0}
                found = server.call(Read(names, **options))
                for _ in range(rng.randint(0, 3000) * (1 + 9 * (worker == 0))):
                    pass
                changes = [Change("add", x, _ONE, found.versions[x]) for x in names]
                reply = server.call(ChangeVariables(changes, **options))
                assert reply.status == "counted"
                assert all(x is not None and 0 <= x <= s for x in reply.staleness)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert errors == []
    assert not any(thread.is_alive() for thread in threads)
    said = server.call(GetStatistics())
    assert said.applied == workers * rounds
    assert max(said.staleness) <= s
