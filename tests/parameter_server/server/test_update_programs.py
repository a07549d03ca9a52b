"""Update programs: optax on the server, with slots that are variables."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdist._parameter_server.protocol import (
    Change,
    ChangeVariables,
    Create,
    Creation,
    GetStatistics,
    Hello,
    Read,
    RegisterUpdate,
    WriteSnapshot,
    as_array,
)
from jaxdist._parameter_server.server import VariableServer
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    MissingExtraError,
    NotFoundError,
    ShapeError,
    UnavailableError,
)
from tests.parameter_server.server.exported import export_bytes, export_update

_VALUE = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


def _server(**options: Any) -> VariableServer:
    server = VariableServer(**options)
    server.call(Create([Creation("w", _VALUE), Creation("v", _VALUE)]))
    return server


def _register(server: VariableServer, tx: Any = None, *names: str, key: str = "adam") -> int:
    program, slots = export_update(tx or optax.adam(0.1), _VALUE)
    variables = dict.fromkeys(names or ("w",), slots)
    server.call(RegisterUpdate(key, as_array(program), len(slots), variables))
    return len(slots)


def _grads(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.normal(size=_VALUE.shape).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize(
    "tx", [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.adam(0.1), optax.adamw(1e-2)]
)
def test_updates_have_the_bits_of_optax_in_one_process(tx: Any) -> None:
    server = _server()
    num_slots = _register(server, tx)
    value, state = jnp.asarray(_VALUE), tx.init(jnp.asarray(_VALUE))

    @jax.jit
    def update(value: Any, state: Any, grad: Any) -> Any:
        updates, state = tx.update(grad, state, value)
        return optax.apply_updates(value, updates), state

    names = [f"w/slot_{i}" for i in range(num_slots)]
    for n, grad in enumerate(_grads(5)):
        reply = server.call(
            ChangeVariables([Change("program:adam", "w", [grad], n)], read=["w", *names])
        )
        value, state = update(value, state, grad)
        np.testing.assert_array_equal(reply.values["w"], value)
        for name, leaf in zip(names, jax.tree.leaves(state), strict=True):
            np.testing.assert_array_equal(reply.values[name], leaf)
        assert set(reply.versions.values()) == {n + 1}
    np.testing.assert_array_equal(server.call(Read(["v"])).values["v"], _VALUE)


def test_values_that_were_read_stay_as_they_are_while_programs_take_their_memory() -> None:
    server = _server()
    _register(server)
    kept = []
    for grad in _grads(30):
        reply = server.call(
            ChangeVariables([Change("program:adam", "w", [grad])], read=["w", "w/slot_1"])
        )
        kept += [(value, value.copy()) for value in reply.values.values()]
    for value, copy in kept:
        np.testing.assert_array_equal(value, copy)


def test_programs_and_other_changes_of_one_variable_follow_each_other() -> None:
    server = _server()
    _register(server, optax.sgd(1.0))
    one = np.ones_like(_VALUE)
    ids = np.array([0])
    reply = server.call(
        ChangeVariables(
            [
                Change("add", "w", [one]),
                Change("program:adam", "w", [2 * one]),
                Change("scatter_add", "w", [ids, one[:1]]),
            ],
            read=["w"],
        )
    )
    expected = _VALUE + one - 2 * one
    expected[0] += 1
    np.testing.assert_array_equal(reply.values["w"], expected)
    server.call(ChangeVariables([Change("scatter_add", "w", [ids, one[:1]])]))
    reply = server.call(ChangeVariables([Change("program:adam", "w", [one])], read=["w"]))
    expected[0] += 1
    np.testing.assert_array_equal(reply.values["w"], expected - 1)


def test_slots_are_made_by_an_exported_initialiser() -> None:
    server = _server()
    tx = optax.trace(0.9)
    program, _ = export_update(tx, _VALUE)
    init = export_bytes(lambda value: (value * 2,), _VALUE)
    registration = RegisterUpdate(
        "m", as_array(program), 1, {"w": None, "v": None}, as_array(init), "m"
    )
    created = server.call(registration).made
    assert created == {"w/m_0": (True, 0), "v/m_0": (True, 0)}
    np.testing.assert_array_equal(server.call(Read(["v/m_0"])).values["v/m_0"], _VALUE * 2)


def test_the_same_program_again_changes_nothing() -> None:
    server = _server()
    _register(server)
    server.call(ChangeVariables([Change("program:adam", "w", [_VALUE])]))
    program, slots = export_update(optax.adam(0.1), _VALUE)
    created = server.call(RegisterUpdate("adam", as_array(program), 3, {"w": slots}))
    assert created.made == {f"w/slot_{i}": (False, 1) for i in range(3)}


def test_another_program_under_one_key_is_an_error() -> None:
    server = _server()
    _register(server)
    with pytest.raises(ArgumentError, match="another program under the key 'adam'"):
        _register(server, optax.sgd(0.1))


def test_a_variable_without_slots_for_the_program_is_an_error() -> None:
    server = _server()
    _register(server)
    with pytest.raises(ArgumentError, match="'v', which has no slots"):
        server.call(ChangeVariables([Change("program:adam", "v", [_VALUE])]))


@pytest.mark.parametrize(
    ("operands", "kind"),
    [
        ([], ArgumentError),
        ([_VALUE, _VALUE], ArgumentError),
        ([_VALUE[:1]], ShapeError),
        ([_VALUE.astype(np.float64)], ShapeError),
        ([None], ArgumentTypeError),
    ],
)
def test_operands_are_checked_before_anything_changes(operands: Any, kind: Any) -> None:
    server = _server()
    _register(server)
    with pytest.raises(kind):
        server.call(
            ChangeVariables([Change("add", "v", [_VALUE]), Change("program:adam", "w", operands)])
        )
    assert set(server.call(Read(["w", "v"])).versions.values()) == {0}


def test_slots_of_another_shape_are_an_error_and_nothing_is_added() -> None:
    server = _server()
    program, slots = export_update(optax.adam(0.1), _VALUE)
    for given in (slots[:2], [*slots[:2], slots[2][:1]], None):
        with pytest.raises(ShapeError, match=r"Program 'k' has the slots \['int32\[\]'"):
            server.call(RegisterUpdate("k", as_array(program), 3, {"w": given}))
    assert server.call(Hello()).variables == 2
    with pytest.raises(NotFoundError):
        server.call(RegisterUpdate("k", as_array(program), 3, {"w": slots, "x": slots}))
    assert server.call(Hello()).variables == 2


def test_a_program_for_another_shape_is_an_error() -> None:
    server = _server()
    program, slots = export_update(optax.sgd(0.1), np.zeros(4, np.float32))
    with pytest.raises(ShapeError, match=r"takes float32\[4\] where 'w' is float32\[2, 3\]"):
        server.call(RegisterUpdate("k", as_array(program), len(slots), {"w": slots}))


@pytest.mark.parametrize("content", [b"", b"x", b"\x00" * 1000, bytes(range(256)) * 8])
def test_bytes_that_are_no_program_are_an_error(content: bytes) -> None:
    with pytest.raises(ArgumentTypeError, match="not an exported function"):
        _server().call(RegisterUpdate("k", as_array(content), 0, {"w": []}))


def test_a_damaged_program_is_an_error_or_another_program_but_no_crash() -> None:
    program, slots = export_update(optax.sgd(0.1), _VALUE)
    rng = np.random.default_rng(0)
    for n in range(20):
        content = bytearray(program)
        # The tables of flatbuffers are at the end; bytes of the program itself are JAX's matter.
        content[int(rng.integers(len(content) - 400, len(content)))] ^= 1 << (n % 8)
        try:
            _server().call(RegisterUpdate("k", as_array(bytes(content)), len(slots), {"w": slots}))
        except (ArgumentError, ArgumentTypeError, ShapeError):
            pass


def test_programs_that_a_server_cannot_run_are_errors() -> None:
    def with_effect(value: Any) -> Any:
        jax.debug.print("{}", value)
        return value

    cases = {
        "compiled for": export_bytes(lambda v: v, _VALUE, platforms=("tpu",)),
        "nested": export_bytes(lambda v: v["a"], {"a": _VALUE}),
        "symbolic": export_bytes(
            lambda v: v, jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), np.float32)
        ),
        "returns": export_bytes(lambda v: v.sum(), _VALUE),
        r"it takes \[\]": export_bytes(lambda: jnp.zeros(3)),
    }
    for reason, content in cases.items():
        with pytest.raises(ArgumentError, match=reason):
            _server().call(RegisterUpdate("k", as_array(content), 0, {"w": []}))


def test_a_program_with_64_bits_keeps_them() -> None:
    server = VariableServer()
    with jax.enable_x64(True):
        value = np.linspace(0, 1, 5)
        program, slots = export_update(optax.adam(0.1), value)
    server.call(Create([Creation("w", value)]))
    server.call(RegisterUpdate("k", as_array(program), len(slots), {"w": slots}))
    reply = server.call(
        ChangeVariables([Change("program:k", "w", [np.ones(5)])], read=["w", "w/slot_1"])
    )
    assert {v.dtype for v in reply.values.values()} == {np.dtype(np.float64)}


def test_a_restarted_server_goes_on_with_programs_and_slots(tmp_path: pathlib.Path) -> None:
    server, other = _server(snapshot_directory=tmp_path), _server()
    for each in (server, other):
        _register(each, None, "w", "v")
    grads = _grads(4)
    for grad in grads[:2]:
        for each in (server, other):
            each.call(ChangeVariables([Change("program:adam", "w", [grad])]))
    server.close()
    kept = VariableServer(snapshot_directory=tmp_path)
    for grad in grads[2:]:
        for each in (kept, other):
            each.call(ChangeVariables([Change("program:adam", "w", [grad])]))
    reply = kept.call(Read(["w", "w/slot_2"]))
    wanted = other.call(Read(["w", "w/slot_2"]))
    for name, value in wanted.values.items():
        np.testing.assert_array_equal(reply.values[name], value)
    assert reply.versions == wanted.versions
    kept.close()


def test_a_program_that_fails_after_it_took_values_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    server = _server(snapshot_directory=tmp_path)
    _register(server, None, "w", "v")
    server.call(
        ChangeVariables(
            [Change("program:adam", "w", [_VALUE]), Change("program:adam", "v", [_VALUE])]
        )
    )
    server.call(WriteSnapshot())
    before = server.call(Read(["w", "v"]))
    program = server._state.programs["adam"]
    compiled, calls = program.compile(), 0

    def run(*arrays: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("RESOURCE_EXHAUSTED: planted")
        return compiled(*arrays)

    monkeypatch.setattr(program, "_compiled", run)
    both = [Change("program:adam", name, [_VALUE]) for name in ("w", "v")]
    for _ in range(2):
        with pytest.raises(UnavailableError, match="planted"):
            server.call(ChangeVariables(both))
    requests: list[Any] = [Hello(), GetStatistics(), Read(["w"]), WriteSnapshot()]
    for request in requests:
        with pytest.raises(UnavailableError, match="newest snapshot"):
            server.call(request)
    kept = VariableServer(snapshot_directory=tmp_path)
    for name, value in kept.call(Read(["w", "v"])).values.items():
        np.testing.assert_array_equal(value, before.values[name])
    kept.close()


def test_without_the_extra_a_program_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    def refuse(name: str, purpose: str) -> None:
        raise MissingExtraError(f"{name} is needed to {purpose}")

    monkeypatch.setattr("jaxdist._parameter_server.server.programs.require_extra", refuse)
    with pytest.raises(MissingExtraError, match="grpcio"):
        _register(_server())
