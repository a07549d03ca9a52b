"""What can be registered, when, and what says so."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist.errors import ArgumentError, ArgumentTypeError, ContextError
from jaxdist.experimental import rpc
from tests.parameter_server.rpc.serving import FLOAT, INT, serve_methods


def make_server() -> rpc.Server:
    return rpc.Server.create("local", "localhost:0")


@pytest.mark.parametrize("layer", ["http", "GRPC", "", None])
def test_other_layers_are_refused_by_both_sides(layer: Any) -> None:
    for create in (rpc.Server.create, rpc.Client.create):
        with pytest.raises(ArgumentError, match="rpc_layer="):
            create(layer, "localhost:8470")


@pytest.mark.parametrize("address", ["localhost", "localhost:x", "localhost:70000", ""])
def test_an_address_that_is_none_is_refused_by_both_sides(address: str) -> None:
    with pytest.raises(ArgumentError, match=r"Server\.create was given address="):
        rpc.Server.create("grpc", address)
    with pytest.raises(ArgumentError, match=r"Client\.create was given address="):
        rpc.Client.create("grpc", address)


@pytest.mark.parametrize(
    "function", [lambda x: x, lambda x=1: x, lambda *args: args, jaxdist.function(lambda x: x), max]
)
def test_a_function_with_arguments_needs_a_signature(function: Any) -> None:
    with pytest.raises(ArgumentError, match=r"without input_signature(.|\n)*Type hints"):
        make_server().register("f", function)


def test_a_function_in_c_that_tells_no_signature_is_called_with_the_declared_one() -> None:
    vector = jax.ShapeDtypeStruct((3,), jnp.float32)
    with serve_methods({"largest": (max, [vector])}, "local") as (_, client):
        assert client.largest_blocking(np.array([1, 3, 2], np.float32)) == 3


@pytest.mark.parametrize("signature", [[], [INT, INT], [INT, INT, INT, INT]])
def test_a_signature_of_another_number_of_arguments_is_refused(signature: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"{len(signature)} argument\(s\) in input_signature"):
        make_server().register("f", lambda a, b, c: a, signature)


@pytest.mark.parametrize(
    ("signature", "kind", "text"),
    [
        (INT, ArgumentTypeError, "is a list with one entry"),
        ("x", ArgumentTypeError, "is a list with one entry"),
        ([int], ArgumentTypeError, r"input_signature\[0\]"),
        ([{"x": 3}], ArgumentTypeError, r"input_signature\[0\]\['x'\]"),
        ([{1: INT}], ArgumentTypeError, "keys"),
        ([np.array(["a"])], ArgumentError, "dtype <U1"),
        ([jax.ShapeDtypeStruct((), "float64")], ArgumentError, "jax_enable_x64"),
        ([jax.ShapeDtypeStruct((-1,), "int32")], ArgumentError, "dimension -1"),
        (
            [jax.ShapeDtypeStruct(jax.export.symbolic_shape("2*n"), "int32")],
            ArgumentError,
            r"dimension 2\*n",
        ),
    ],
)
def test_a_signature_that_describes_no_arrays_is_refused(
    signature: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        make_server().register("f", lambda x: x, signature)


def test_a_compiled_function_has_its_signature_already() -> None:
    vector = jax.ShapeDtypeStruct((3,), jnp.float32)
    compiled = jax.jit(lambda x, y: {"z": x["a"] * y}).lower({"a": vector}, FLOAT).compile()
    server = rpc.Server.create("local", "localhost:0")
    server.register("scale", compiled)
    with pytest.raises(ArgumentError, match="compiled function 'again' with input_signature="):
        server.register("again", compiled, [FLOAT])
    by_name = jax.jit(lambda *, y: y).lower(y=np.float32(1)).compile()
    with pytest.raises(ArgumentError, match=r"'named' with arguments \['y'\]"):
        server.register("named", by_name)
    server.start()
    client: Any = rpc.Client.create("local", server.address)
    found = client.scale_blocking({"a": np.arange(3, dtype=np.float32)}, 2)
    np.testing.assert_array_equal(found["z"], [0, 2, 4])
    client.close()
    server.stop()


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="func=3"):
        make_server().register("f", 3)
    wrong: Any = 1
    with pytest.raises(ArgumentTypeError, match="concurrent=1"):
        make_server().register("f", lambda: 1, concurrent=wrong)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (None, ArgumentTypeError),
        ("", ArgumentError),
        ("x" * 201, ArgumentError),
        ("\ud800", ArgumentError),
        ("_connection", ArgumentError),
        ("call", ArgumentError),
        ("create", ArgumentError),
        ("close", ArgumentError),
    ],
)
def test_a_name_that_clients_cannot_have_is_refused(name: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="method_name="):
        make_server().register(name, lambda: 1)


@pytest.mark.parametrize(
    ("first", "second"), [("add", "add"), ("add", "add_blocking"), ("add_blocking", "add")]
)
def test_a_name_belongs_to_one_function(first: str, second: str) -> None:
    server = make_server()
    server.register(first, lambda: 1)
    with pytest.raises(ArgumentError, match=f"'{second}', and '{first}' is already registered"):
        server.register(second, lambda: 2)


def test_a_name_that_is_no_identifier_is_called_by_call() -> None:
    with serve_methods({"a/b c": (lambda: 7, None)}, "local") as (_, client):
        assert client.call("a/b c").get_value() == [7]
        assert getattr(client, "a/b c_blocking")() == 7


@pytest.mark.parametrize("layer", ["grpc", "local"])
def test_start_twice_is_tolerated_and_register_after_it_is_not(layer: str) -> None:
    server = rpc.Server.create(layer, "localhost:0")
    assert repr(server) == "<rpc.Server at localhost:0: not started>"
    server.register("one", lambda: 1)
    server.start()
    address = server.address
    server.start()
    assert server.address == address
    assert repr(server) == f"<rpc.Server at {address}: 1 methods>"
    with pytest.raises(ContextError, match="after the server was started"):
        server.register("two", lambda: 2)
    server.stop()
    server.stop()
    assert repr(server) == f"<rpc.Server at {address}: stopped>"
    with pytest.raises(ContextError, match="the server was stopped"):
        server.start()


def test_a_server_without_methods_has_clients() -> None:
    with serve_methods({}) as (_, client):
        assert client.call("nothing").get_error()[0] == 3
