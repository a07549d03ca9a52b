"""Creating and reading variables of a server."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxdist._parameter_server.protocol import (
    Change,
    ChangeVariables,
    Create,
    Creation,
    Hello,
    Read,
    ReadRows,
    as_array,
)
from jaxdist._parameter_server.server import VariableServer
from jaxdist.errors import ArgumentError, ArgumentTypeError, NotFoundError, ShapeError
from tests.parameter_server.server.exported import export_bytes


def _server(**values: np.ndarray) -> VariableServer:
    server = VariableServer()
    server.call(Create([Creation(name, value) for name, value in values.items()], "tests"))
    return server


def test_a_variable_has_the_value_that_created_it_and_version_0() -> None:
    server = VariableServer()
    value = np.arange(6.0).reshape(2, 3)
    assert server.call(Create([Creation("w", value)])).made == {"w": (True, 0)}
    found = server.call(Read(["w"]))
    np.testing.assert_array_equal(found.values["w"], value)
    assert found.versions == {"w": 0}


def test_what_the_creator_does_with_its_array_later_does_not_change_the_variable() -> None:
    value = np.zeros(3)
    server = _server(w=value)
    value[:] = 7
    np.testing.assert_array_equal(server.call(Read(["w"])).values["w"], np.zeros(3))


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint64", "float16", "float64", "complex64", ml_dtypes.bfloat16]
)
def test_each_dtype_comes_back(dtype: str) -> None:
    value = np.ones((2, 2), dtype)
    found = _server(w=value).call(Read(["w"])).values["w"]
    assert found.dtype == value.dtype
    np.testing.assert_array_equal(found, value)


def test_the_second_creator_gets_the_variable_that_exists_and_its_version() -> None:
    server = _server(w=np.zeros(3))
    server.call(ChangeVariables([Change("add", "w", [np.ones(3)])]))
    assert server.call(Create([Creation("w", np.full(3, 9.0))])).made == {"w": (False, 1)}
    np.testing.assert_array_equal(server.call(Read(["w"])).values["w"], np.ones(3))


@pytest.mark.parametrize("other", [np.zeros(4), np.zeros(3, np.float32), np.zeros((3, 1))])
def test_another_shape_or_dtype_is_an_error_with_both_and_creates_nothing(
    other: np.ndarray,
) -> None:
    server = _server(w=np.zeros(3))
    with pytest.raises(ShapeError, match=r"float64\[3\], created by client 'tests'") as caught:
        server.call(Create([Creation("new", np.zeros(2)), Creation("w", other)], "b"))
    assert f"{other.dtype}{list(other.shape)}" in str(caught.value)
    with pytest.raises(NotFoundError):
        server.call(Read(["new"]))


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 513, 3, None])
def test_a_name_that_is_no_short_text_is_an_error(name: str) -> None:
    with pytest.raises(ArgumentError, match="printable characters"):
        VariableServer().call(Create([Creation(name, np.zeros(1))]))


def test_a_name_that_comes_twice_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="'w' twice"):
        VariableServer().call(Create([Creation("w", np.zeros(1)), Creation("w", np.zeros(1))]))


@pytest.mark.parametrize(
    "value", [[1.0], "text", np.array(["a"]), np.array([None]), np.zeros(2, "i4,f4"), 1.0]
)
def test_a_value_that_is_no_array_of_numbers_is_an_error(value: np.ndarray) -> None:
    with pytest.raises(ArgumentTypeError, match="of ml_dtypes"):
        VariableServer().call(Create([Creation("w", value)]))


def test_an_exported_initialiser_makes_the_value_on_the_server() -> None:
    def init() -> jax.Array:
        return jax.random.normal(jax.random.key(3), (4, 2))

    server = VariableServer()
    server.call(Create([Creation("w", program=as_array(export_bytes(init)))]))
    expected = np.asarray(jax.jit(init)())
    np.testing.assert_array_equal(server.call(Read(["w"])).values["w"], expected)


def test_an_initialiser_of_two_arrays_or_with_arguments_is_an_error() -> None:
    two = export_bytes(lambda: (jnp.zeros(1), jnp.zeros(1)))
    with pytest.raises(ArgumentError, match="returns 2 arrays"):
        VariableServer().call(Create([Creation("w", program=as_array(two))]))
    with pytest.raises(ShapeError, match="called with nothing"):
        VariableServer().call(
            Create([Creation("w", program=as_array(export_bytes(lambda x: x, jnp.zeros(2))))])
        )


def test_a_value_whose_version_the_caller_knows_is_not_sent_again() -> None:
    server = _server(w=np.zeros(3), b=np.zeros(2))
    first = server.call(Read(["w", "b"]))
    server.call(ChangeVariables([Change("add", "b", [np.ones(2)])]))
    again = server.call(Read(["w", "b"], known=first.versions, incarnation=first.incarnation))
    assert list(again.values) == ["b"]
    assert again.versions == {"w": 0, "b": 1}


def test_known_versions_of_another_incarnation_count_for_nothing() -> None:
    server = _server(w=np.zeros(3))
    assert list(server.call(Read(["w"], known={"w": 0}, incarnation="another")).values) == ["w"]
    assert list(server.call(Read(["w"], known={"w": 0})).values) == ["w"]


def test_a_variable_that_does_not_exist_is_an_error_that_lists_those_that_do() -> None:
    server = _server(**{f"v{i}": np.zeros(1) for i in range(12)})
    with pytest.raises(NotFoundError, match=r"'v0', .* and 2 more") as caught:
        server.call(Read(["v0", "x"]))
    assert "name='x'" in str(caught.value)
    with pytest.raises(NotFoundError, match="has none"):
        VariableServer().call(Read(["x"]))


def test_rows_come_in_the_order_of_the_ids_with_repetitions() -> None:
    table = np.arange(12.0).reshape(6, 2)
    found = _server(t=table).call(ReadRows("t", np.array([5, 0, 3, 0])))
    np.testing.assert_array_equal(found.rows, table[[5, 0, 3, 0]])
    assert found.version == 0


def test_no_ids_give_no_rows() -> None:
    rows = _server(t=np.zeros((6, 2))).call(ReadRows("t", np.zeros(0, np.int32))).rows
    assert rows.shape == (0, 2)


@pytest.mark.parametrize("wrong", [-1, 6])
def test_an_id_out_of_range_is_an_error_with_the_id_and_the_range(wrong: int) -> None:
    with pytest.raises(ArgumentError, match=f"the first is {wrong}") as caught:
        _server(t=np.zeros((6, 2))).call(ReadRows("t", np.array([0, wrong])))
    assert "0 to 5" in str(caught.value)


def test_ids_that_are_no_list_of_integers_are_an_error() -> None:
    server = _server(t=np.zeros((6, 2)), scalar=np.zeros(()))
    for ids in (np.zeros((1, 1), int), np.zeros(1)):
        with pytest.raises(ArgumentTypeError, match="list of integers"):
            server.call(ReadRows("t", ids))
    with pytest.raises(ShapeError, match="no dims"):
        server.call(ReadRows("scalar", np.zeros(1, int)))


def test_a_reader_keeps_its_values_when_the_variable_is_changed() -> None:
    server = _server(w=np.zeros(3), t=np.zeros((4, 2)))
    before = server.call(Read(["w", "t"])).values
    rows = server.call(ReadRows("t", np.array([1]))).rows
    ids = np.array([1])
    for _ in range(3):
        server.call(ChangeVariables([Change("add", "w", [np.ones(3)])]))
        server.call(ChangeVariables([Change("scatter_add", "t", [ids, np.ones((1, 2))])]))
        server.call(ChangeVariables([Change("scatter_update", "t", [ids, np.full((1, 2), 5.0)])]))
    for found in (*before.values(), rows):
        assert not found.any()


def test_hello_says_who_the_server_is() -> None:
    server = VariableServer("ps:3", max_staleness=2)
    said = server.call(Hello())
    assert (said.task, said.max_staleness, said.snapshot) == ("ps:3", 2, None)
    assert said.incarnation == server.incarnation != VariableServer().incarnation


@pytest.mark.parametrize("s", [-1, 1.5, True])
def test_a_bound_that_is_no_integer_from_0_up_is_an_error(s: int) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match="max_staleness"):
        VariableServer(max_staleness=s)
