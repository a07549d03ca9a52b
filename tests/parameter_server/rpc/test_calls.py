"""Calls: what arrives at a function, and what comes back."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdist
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    CallArgumentsError,
    DonationError,
    InvalidArgumentError,
    MissingNameError,
    UnsupportedError,
)
from jaxdist.experimental import rpc
from tests.parameter_server.rpc.serving import FLOAT, INT, LAYERS, serve_methods
from tests.strategies.oracle import refused

ADD = {"addition": (lambda a, b: a + b, [INT, INT])}


@pytest.mark.parametrize("layer", LAYERS)
def test_the_documented_example_works_by_call_by_attribute_and_blocking(layer: str) -> None:
    with serve_methods(ADD, layer) as (_, client):
        a, b = jnp.int32(2), np.int32(3)
        result = client.call(args=[a, b], method_name="addition", output_specs=INT)
        assert result.is_ok() is True
        assert result.get_value() == 5
        assert result.get_error() == (0, "")
        result = client.addition(a, b)
        assert result.is_ok()
        assert result.get_value() == 5
        assert client.addition_blocking(a, b) == 5
        assert client.addition_blocking(a, b, timeout_in_ms=10_000).dtype == np.int32
        assert {"addition", "addition_blocking", "call"} <= set(dir(client))


def test_methods_say_in_their_docstrings_what_they_call_and_take() -> None:
    with serve_methods(ADD) as (server, client):
        text = f"RPC Call for addition method to server {server.address}"
        for method, name in (
            (client.addition, "addition"),
            (client.addition_blocking, "addition_blocking"),
        ):
            assert method.__doc__.startswith(text)
            assert "(int32[], int32[])" in method.__doc__
            assert method.__name__ == name


@pytest.mark.parametrize("layer", LAYERS)
def test_structures_arrive_and_return_as_they_were_given(layer: str) -> None:
    spec = {"x": INT, "y": (INT, [INT, None])}

    def swap(tree: Any, number: Any) -> Any:
        assert sorted(tree) == ["x", "y"]
        assert isinstance(tree["x"], jax.Array)
        return {"b": [tree["y"][1][0], number], "a": (tree["x"], None), "c": {}, "d": ()}

    with serve_methods({"swap": (swap, [spec, INT])}, layer) as (_, client):
        args = ({"y": (2, [3, None]), "x": 1}, 4)
        value = client.swap_blocking(*args)
        assert value == {"a": (1, None), "b": [3, 4], "c": {}, "d": ()}
        # The order of JAX, whose dicts are sorted.
        assert client.call("swap", args).get_value() == [1, 3, 4]
        specs = {"first": INT, "rest": [INT, INT]}
        packed = client.call("swap", args, output_specs=specs).get_value()
        assert packed == {"first": 1, "rest": [3, 4]}


DTYPES = ["bool", "int8", "uint32", "float16", "float32", "bfloat16", "complex64", "float8_e4m3fn"]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_arrives_bit_for_bit(layer: str, dtype: str) -> None:
    given = np.array([[0, 1, 2], [3, 4, 5]]).astype(jnp.dtype(dtype))
    spec = jax.ShapeDtypeStruct((2, 3), dtype)
    with serve_methods({"same": (lambda x: x, [spec])}, layer) as (_, client):
        for value in (given, jnp.asarray(given), np.asfortranarray(given)):
            found = client.same_blocking(value)
            assert isinstance(found, np.ndarray)
            assert (found.dtype, found.shape) == (given.dtype, given.shape)
            assert found.tobytes() == given.tobytes()


def test_large_arrays_and_arrays_without_elements_arrive() -> None:
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 3"), jnp.float32)
    with serve_methods({"double": (lambda x: 2 * x, [rows])}) as (_, client):
        for count in (0, 1, 300_000):
            x = np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)
            np.testing.assert_array_equal(client.double_blocking(x), 2 * x)


def test_equal_names_of_dimensions_are_equal_sizes_within_a_call() -> None:
    n = jax.export.symbolic_shape("n")
    vector = jax.ShapeDtypeStruct(n, jnp.float32)
    with serve_methods({"dot": (lambda a, b: a @ b, [vector, vector])}) as (_, client):
        assert client.dot_blocking(np.ones(2, np.float32), np.ones(2, np.float32)) == 2
        assert client.dot_blocking(np.ones(5, np.float32), np.ones(5, np.float32)) == 5
        result = client.dot(np.ones(2, np.float32), np.ones(3, np.float32))
        code, text = result.get_error()
        assert code == 3
        assert "float32[3] as array 2" in text
        assert "n=2" in text


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        ("int32", 3),
        ("uint8", 255),
        ("float32", 3),
        ("float32", 0.1),
        ("bfloat16", 1.5),
        ("complex64", 2),
        ("complex64", 1j),
        ("float32", float("inf")),
        ("bool", True),
    ],
)
def test_a_number_of_python_becomes_the_registered_dtype(dtype: str, number: Any) -> None:
    spec = jax.ShapeDtypeStruct((), dtype)
    with serve_methods({"same": (lambda x: x, [spec])}, "local") as (_, client):
        found = client.same_blocking(number)
        assert found.dtype == jnp.dtype(dtype)
        assert found == jnp.asarray(number, dtype)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        ("int32", 1.0),
        ("int32", 2**31),
        ("uint8", -1),
        ("uint8", True),
        ("float32", True),
        ("float32", 1j),
        ("float16", 1e30),
        ("float16", 2**20),
        ("float32", 2**24 + 1),
        ("bfloat16", 257),
        ("complex64", 2**24 + 1),
        ("bool", 1),
    ],
)
def test_a_number_that_would_change_is_refused(dtype: str, number: Any) -> None:
    spec = jax.ShapeDtypeStruct((), dtype)
    with serve_methods({"same": (lambda x: x, [spec])}, "local") as (_, client):
        code, text = client.same(number).get_error()
        assert code == 3
        assert f"the {type(number).__name__} " in text
        assert f"{dtype}[]" in text


@pytest.mark.parametrize(
    "wrong", [np.float32(1), jnp.zeros(3, jnp.int32), np.int64(1), np.zeros((1, 1), np.int32)]
)
def test_another_dtype_or_shape_is_an_error_of_the_server(wrong: Any) -> None:
    with serve_methods(ADD) as (_, client):
        for result in (client.addition(wrong, 1), client.call("addition", [wrong, 1])):
            assert not result.is_ok()
            assert result.get_error()[0] == 3
            with pytest.raises(InvalidArgumentError, match="A call of 'addition' was given"):
                result.get_value()


STRUCTURES = [(1,), (1, 2, 3), ({"x": 1}, 2), ([1], 2), (1, None), ()]


@pytest.mark.parametrize("args", STRUCTURES, ids=repr)
def test_another_structure_raises_at_once_by_attribute_and_is_a_status_by_call(args: Any) -> None:
    with serve_methods(ADD, "local") as (_, client):
        for method in (client.addition, client.addition_blocking):
            with pytest.raises(ArgumentError, match=r"takes \(int32\[\], int32\[\]\)"):
                method(*args)
        code, text = client.call("addition", args).get_error()
        assert code == 3
        assert "A call of 'addition' was given args=" in text


def test_lists_and_tuples_are_different_structures() -> None:
    with serve_methods({"first": (lambda x: x[0], [[INT, INT]])}, "local") as (_, client):
        assert client.first_blocking([1, 2]) == 1
        with pytest.raises(
            ArgumentError, match=r"\(\(int, int\),\), and the method takes \(\[int32"
        ):
            client.first((1, 2))


class Point(NamedTuple):
    x: int
    y: int


def _deleted() -> jax.Array:
    array = jnp.arange(3)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: "text", ArgumentTypeError, r"args\[0\]='text'"),
        (lambda: np.array(["a"]), ArgumentTypeError, r"args\[0\]"),
        (lambda: np.array([None]), ArgumentTypeError, r"args\[0\]"),
        (lambda: np.ma.masked_array([1, 2], [True, False]), ArgumentTypeError, "masked"),
        (lambda: Point(1, 2), ArgumentTypeError, "Point"),
        (lambda: OrderedDict(x=1), ArgumentTypeError, "OrderedDict"),
        (lambda: {1: 2}, ArgumentTypeError, "keys"),
        (lambda: {"\ud800": 2}, ArgumentTypeError, "keys"),
        (lambda: {"x": {"y": object()}}, ArgumentTypeError, r"args\[0\]\['x'\]\['y'\]"),
        (lambda: 2**64, ArgumentError, "64 bits"),
        (lambda: jax.random.key(0), ArgumentTypeError, "key_data"),
        (lambda: jaxdist.PerReplica([1, 2]), ArgumentTypeError, "PerReplica"),
        (lambda: jaxdist.Variable(1), ArgumentTypeError, "variable.value"),
        (_deleted, DonationError, "deleted or donated"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_its_name(
    make: Any, kind: type[Exception], text: str
) -> None:
    with serve_methods({"one": (lambda x: x, [INT])}, "local") as (_, client):
        with pytest.raises(kind, match=text):
            client.call("one", [make()])


def test_what_is_nested_too_deeply_is_refused() -> None:
    deep: list[Any] = []
    deep.append(deep)
    with serve_methods(ADD, "local") as (_, client):
        with pytest.raises(ArgumentError, match="51 levels deep"):
            client.call("addition", [deep, 1])


def test_args_are_a_list_and_names_are_texts() -> None:
    with serve_methods(ADD, "local") as (_, client):
        with pytest.raises(CallArgumentsError, match="args is a list or tuple"):
            client.call("addition", 1)
        with pytest.raises(ArgumentTypeError, match="method_name"):
            client.call(None)
        with pytest.raises(ArgumentError, match="method_name"):
            client.call("\ud800")


def test_an_argument_may_change_after_the_call_was_started() -> None:
    go_on = threading.Event()
    vector = jax.ShapeDtypeStruct((3,), jnp.float32)

    def wait() -> int:
        go_on.wait(20)
        return 0

    methods = {"wait": (wait, None), "total": (lambda x: x.sum(), [vector])}
    for layer in LAYERS:
        go_on.clear()
        with serve_methods(methods, layer) as (_, client):
            first = client.wait()
            x = np.ones(3, np.float32)
            # It does not start while the first one runs.
            second = client.total(x)
            x[:] = 100
            go_on.set()
            assert first.is_ok()
            assert second.get_value() == 3


def test_a_call_does_not_wait_for_its_result() -> None:
    go_on = threading.Event()
    with serve_methods({"wait": (lambda: go_on.wait(20), None)}) as (_, client):
        result = client.wait()
        assert repr(result) == "<StatusOrResult: the call has not ended>"
        go_on.set()
        assert result.get_value()
        assert repr(result) == "<StatusOrResult: ok>"


@pytest.mark.parametrize("result", [None, (), {}, [None]])
def test_a_function_without_arrays_in_its_result_gives_none_by_call(result: Any) -> None:
    with serve_methods({"nothing": (lambda: result, None)}, "local") as (_, client):
        assert client.call("nothing").get_value() is None
        assert client.nothing_blocking() == result


def test_results_of_numbers_are_what_jax_makes_of_them_and_cannot_be_written() -> None:
    with serve_methods({"numbers": (lambda: {"i": 1, "f": 0.5, "b": True}, None)}) as (_, client):
        found = client.numbers_blocking()
        assert {name: x.dtype.name for name, x in found.items()} == {
            "i": jnp.asarray(1).dtype.name,
            "f": jnp.asarray(0.5).dtype.name,
            "b": "bool",
        }
        assert not any(x.flags.writeable for x in found.values())


@pytest.mark.parametrize(
    "specs",
    [
        FLOAT,
        [INT, INT],
        jax.ShapeDtypeStruct((1,), jnp.int32),
        {},
        jax.ShapeDtypeStruct((), ml_dtypes.bfloat16),
    ],
)
def test_output_specs_of_another_result_are_an_error_of_get_value(specs: Any) -> None:
    with serve_methods(ADD, "local") as (_, client):
        result = client.call("addition", [1, 2], output_specs=specs)
        assert result.is_ok()
        with pytest.raises(InvalidArgumentError, match=r"output_specs(.|\n)*int32\[\]"):
            result.get_value()


def test_output_specs_of_eval_shape_and_of_any_size_fit() -> None:
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), jnp.int32)
    with serve_methods({"range": (lambda: {"x": jnp.arange(5)}, None)}, "local") as (_, client):
        for specs in (jax.eval_shape(lambda: {"x": jnp.arange(5)}), {"x": rows}):
            found = client.call("range", output_specs=specs).get_value()
            np.testing.assert_array_equal(found["x"], np.arange(5))


def test_output_specs_that_describe_nothing_are_refused() -> None:
    with serve_methods(ADD, "local") as (_, client):
        with pytest.raises(ArgumentTypeError, match="output_specs=3"):
            client.call("addition", [1, 2], output_specs=3)


def test_nothing_is_called_while_a_function_is_traced() -> None:
    with serve_methods(ADD, "local") as (server, client):
        calls = (
            lambda x: client.addition(1, 2),
            lambda x: client.addition_blocking(1, 2),
            lambda x: client.call("addition", [1, 2]),
            lambda x: rpc.Client.create("local", server.address),
            lambda x: rpc.Server.create("local", "localhost:0"),
        )
        for call in calls:
            for transform in (jax.jit, jaxdist.function):
                with pytest.raises(UnsupportedError, match="while a function is traced"):
                    transform(call)(1.0)
    leaked: list[Any] = []
    jax.jit(leaked.append)(1)
    with serve_methods(ADD, "local") as (_, client):
        with pytest.raises(UnsupportedError, match="of a function that is traced"):
            client.addition(leaked[0], 1)


def test_io_callback_calls_a_server_from_a_compiled_function() -> None:
    with serve_methods(ADD) as (_, client):

        def step(x: Any) -> Any:
            return jax.experimental.io_callback(client.addition_blocking, INT, x, x)

        assert jax.jit(step)(jnp.int32(4)) == 8


def test_a_method_that_the_server_has_not_is_an_attribute_error_that_lists_the_others() -> None:
    with serve_methods(ADD, "local") as (_, client):
        assert not hasattr(client, "nothing")
        with pytest.raises(MissingNameError, match=r"'nothing'(.|\n)*\['addition'\]"):
            _ = client.nothing


@pytest.fixture
def x64() -> Iterator[Callable[[bool], None]]:
    """What turns 64 bits on and off, for all threads."""
    before = jax.config.read("jax_enable_x64")
    yield lambda value: jax.config.update("jax_enable_x64", value)
    jax.config.update("jax_enable_x64", before)


def test_64_bits_arrive_where_they_are_on_and_are_refused_where_they_were_turned_off(
    x64: Callable[[bool], None],
) -> None:
    x64(True)
    wide = jax.ShapeDtypeStruct((), jnp.float64)
    with serve_methods({"third": (lambda x: x / 3, [wide])}) as (_, client):
        assert client.third_blocking(1.0) == 1 / 3
        assert client.third_blocking(np.float64(1)).dtype == np.float64
        x64(False)
        code, text = client.third(np.float64(1)).get_error()
        assert code == 12
        assert "float64 would become one of float32" in text


def test_an_array_of_which_parts_are_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    array = jnp.arange(3)
    with serve_methods(ADD, "local") as (_, client):
        monkeypatch.setattr(type(array), "is_fully_addressable", property(lambda self: False))
        with pytest.raises(UnsupportedError, match="with parts on other processes"):
            client.call("addition", [array, 1])


def test_the_name_of_a_client_is_a_text_and_in_its_repr() -> None:
    with serve_methods(ADD, "local") as (server, client):
        with pytest.raises(ArgumentTypeError, match="name=3"):
            rpc.Client.create("local", server.address, name=3)  # type: ignore[arg-type]
        named = rpc.Client.create("local", server.address, name="eval")
        assert repr(named) == f"<rpc.Client 'eval' of {server.address}>"
        assert repr(client) == f"<rpc.Client of {server.address}>"
        named.close()


def test_an_error_that_is_none_of_a_call_is_raised_as_it_is() -> None:
    reply: Future[Any] = Future()
    reply.set_exception(RuntimeError("a fault of a library"))
    result = rpc.StatusOrResult(reply, lambda reply: reply, None)
    for method in (result.is_ok, result.get_error, result.get_value):
        with pytest.raises(RuntimeError, match="a fault of a library"):
            method()


@pytest.mark.parametrize("way", ["addition", "addition_blocking"])
def test_arguments_by_name_are_refused_with_the_signature(way: str) -> None:
    with serve_methods(ADD, "local") as (_, client):
        words = (
            "keywords b, seconds",
            "(int32[], int32[]) by place",
            "client.addition(value, ...)",
        )
        with refused(CallArgumentsError, f"Client.{way} was given", *words):
            getattr(client, way)(1, b=2, seconds=3)
        assert getattr(client, way.partition("_")[0])(1, 2).get_value() == 3


def test_a_method_without_arguments_takes_none_by_name() -> None:
    with serve_methods({"get": (lambda: 1, [])}, "local") as (_, client):
        with refused(CallArgumentsError, "the keyword x.", "Leave x out: client.get()."):
            client.get(x=1)
