"""A variable works wherever `nnx.Param` does, and has the names that `tf.Variable` documents."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdist
from jaxdist import Variable
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    MissingNameError,
    ShapeError,
)
from tests.tables import sampled

ROWS = np.array([[0.5, 1.5, 2.5], [3.5, 4.5, 5.5]], np.float32)
SQUARE = np.array([[4.0, 1.0, 0.5], [1.0, 3.0, 0.25], [0.5, 0.25, 2.0]], np.float32)
# They wait, write files, or ask for no array.
LEFT_OUT = {"jnp.save", "jnp.savez", "jnp.load", "jnp.fromfile", "jnp.empty", "jnp.empty_like"}
# Its text names the class.
LEFT_OUT |= {"jnp.array_repr"}
# XLA of JAX 0.12 ends the process where it puts arrays of 2 or 6 bits together on CPU.
LEFT_OUT |= {"jnp.float6_e2m3fn", "jnp.float6_e3m2fn", "jnp.int2", "jnp.uint2"}


def _functions() -> dict[str, Callable[..., Any]]:
    places = {
        "jnp": jnp,
        "jnp.linalg": jnp.linalg,
        "jnp.fft": jnp.fft,
        "nn": jax.nn,
        "lax": jax.lax,
    }
    found = {}
    for place, module in places.items():
        for name, value in vars(module).items():
            key = f"{place}.{name}"
            is_type = isinstance(value, type) and issubclass(value, np.generic)
            if callable(value) and not name.startswith("_") and not is_type:
                found[key] = value
    return {k: v for k, v in found.items() if k not in LEFT_OUT}


FUNCTIONS = _functions()
# Ways to call a function with one array.
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "f(x)": lambda f, x: f(x),
    "f(x, x)": lambda f, x: f(x, x),
    "f(x, 0)": lambda f, x: f(x, 0),
    "f([x, x])": lambda f, x: f([x, x]),
}
TRANSFORMED: dict[str, Callable[[Any], Any]] = {
    "jit": lambda x: jax.jit(lambda a: a * 2)(x),
    "nested jit": lambda x: jax.jit(lambda d: d["a"][0] * 2)({"a": (x, 1)}),
    "vmap": lambda x: jax.vmap(lambda a: a.sum() + a)(x),
    "grad": lambda x: jax.tree.leaves(jax.grad(lambda a: (a * a).sum())(x))[0],
    "value_and_grad": lambda x: jax.tree.leaves(jax.value_and_grad(lambda a: jnp.sum(a * a))(x)),
    "vjp": lambda x: jax.tree.leaves(jax.vjp(lambda a: a * 2, x)[1](jnp.ones((2, 3)))),
    "linearize": lambda x: jax.linearize(lambda a: a * 2, x)[0],
    "checkpoint": lambda x: jax.checkpoint(lambda a: a * 2)(x),
    "eval_shape": lambda x: jax.eval_shape(lambda a: a * 2, x),
    "make_jaxpr": lambda x: str(jax.make_jaxpr(lambda a: a * 2)(x)),
    "scan": lambda x: jax.lax.scan(lambda c, a: (c + a, a * 2), jnp.zeros(3), x),
    "device_put": lambda x: jax.tree.leaves(jax.device_put(x))[0],
    "device_get": lambda x: jax.tree.leaves(jax.device_get(x))[0],
    "tree.leaves": jax.tree.leaves,
    "matmul": lambda x: jnp.matmul(np.ones((2, 2), np.float32), x),
    "where": lambda x: jnp.where(True, x, 0),
    "permutation": lambda x: jax.random.permutation(jax.random.key(0), x),
    "pure_callback": lambda x: jax.pure_callback(
        np.asarray, jax.ShapeDtypeStruct((2, 3), "float32"), x
    ),
    "np.asarray": np.asarray,
    "np.sum": np.sum,
    "numpy @": lambda x: np.ones((2, 2), np.float32) @ x,
    "methods": lambda x: [x.sum(), x.T, x.reshape(3, 2), x.at[0].set(1.0), x.astype("int32")],
    "host": lambda x: [x.tolist(), x.nbytes, len(x), np.asarray(list(x))],
    "bits": lambda x: [x.max().item(), x.mean(), x.argsort(), x.block_until_ready() * 1],
}


def _outcome(call: Callable[[], Any]) -> Any:
    """The arrays that a call returns, or a text if it raises or returns something else."""
    try:
        result = call()
    except Exception:
        return "fails"
    found = [np.asarray(x) for x in jax.tree.leaves(result)]
    return "no arrays" if any(x.dtype == object for x in found) else found


def _assert_same(found: Any, expected: Any) -> None:
    assert not isinstance(found, str)
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(own, other)


def _variables(value: np.ndarray) -> list[Variable]:
    with jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        placed = Variable(value)
    return [Variable(value), placed]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sampled(sorted(FUNCTIONS), 12))
def test_a_function_of_jax_takes_a_variable_where_it_takes_a_parameter(name: str) -> None:
    fn = FUNCTIONS[name]
    for value in (ROWS, SQUARE):
        for call in CALLS.values():
            array = jnp.asarray(value)
            expected = _outcome(lambda x=array, c=call: c(fn, nnx.Param(x)))
            # A parameter is true by its length, where an array and a variable are ambiguous.
            if isinstance(expected, str) or isinstance(
                _outcome(lambda x=array, c=call: c(fn, x)), str
            ):
                continue
            for variable in _variables(value)[1:]:
                _assert_same(_outcome(lambda v=variable, c=call: c(fn, v)), expected)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_variable_goes_where_a_parameter_goes(name: str) -> None:
    expected = TRANSFORMED[name](nnx.Param(jnp.asarray(ROWS)))
    for variable in _variables(ROWS):
        found = TRANSFORMED[name](variable)
        for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            if hasattr(own, "dtype"):
                assert (own.dtype, own.shape) == (other.dtype, other.shape)
            if not isinstance(own, jax.ShapeDtypeStruct):
                np.testing.assert_array_equal(own, other)


SIGNS = ["+=", "-=", "*=", "/=", "//=", "%=", "**=", "@=", "&=", "|=", "^=", "<<=", ">>="]


@pytest.mark.parametrize("sign", SIGNS)
def test_an_operator_in_place_names_the_assignment_and_changes_nothing(sign: str) -> None:
    for v in _variables(ROWS):
        names = {"v": v}
        with pytest.raises(ContextError, match=r"variable\.assign"):
            exec(f"v {sign} 2", names)
        assert names["v"] is v
        np.testing.assert_array_equal(v.numpy(), ROWS)


def test_shifts_and_what_other_libraries_are_given_are_those_of_the_value() -> None:
    whole = np.array([[1, 2], [5, 7]], np.int32)
    for v in _variables(whole):
        assert isinstance(v, Variable)
        value: Any = v
        pairs = [(value << 1, whole << 1), (2 << value, 2 << whole), (value >> 1, whole >> 1)]
        pairs += [(64 >> value, 64 >> whole), (value << value, whole << whole)]
        pairs += [*zip(divmod(value, 2), divmod(whole, 2), strict=True)]
        pairs += [*zip(divmod(9, value), divmod(9, whole), strict=True)]
        pairs += [(round(value), whole), (np.from_dlpack(value), whole)]
        for found, expected in pairs:
            np.testing.assert_array_equal(found, expected)


JACOBIANS: dict[str, Callable[[Any], Any]] = {
    "jacrev": lambda x: jax.jacrev(lambda a: a * a)(x),
    "jacfwd": lambda x: jax.jacfwd(lambda a: a * a)(x),
    "jacobian": lambda x: jax.jacobian(lambda a: a * a)(x),
    "hessian": lambda x: jax.hessian(lambda a: (a * a * a).sum())(x),
    "jacfwd of grad": lambda x: jax.jacfwd(jax.grad(lambda a: (a * a).sum()))(x),
    "jacrev of the second": lambda x: jax.jacrev(lambda b, a: a * b, argnums=1)(ROWS, x),
    "in a dict": lambda x: jax.jacrev(lambda d: d["a"] * 2)({"a": x})["a"],
}


@pytest.mark.parametrize("name", JACOBIANS)
def test_a_jacobian_names_the_variable_and_takes_its_value(name: str) -> None:
    expected = JACOBIANS[name](nnx.Param(jnp.asarray(ROWS)))
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        placed = Variable(ROWS, name="w")
    for v in (Variable(ROWS, name="w"), placed):
        with pytest.raises(ArgumentTypeError, match=r"Variable 'w' float32\[2, 3\]") as error:
            JACOBIANS[name](v)
        assert "Pass w.value() in its place" in str(error.value)
        _assert_same([JACOBIANS[name](v.value())], [np.asarray(jax.tree.leaves(expected)[0])])

    def step() -> Any:
        with pytest.raises(ArgumentTypeError, match="Variable 'w'"):
            JACOBIANS[name](placed)
        return JACOBIANS[name](placed.value())

    found = strategy.run(step)
    _assert_same([found], [np.asarray(jax.tree.leaves(expected)[0])])


def test_a_jacobian_for_another_argument_takes_a_variable() -> None:
    for v in _variables(ROWS):
        found = jax.jacrev(lambda a, b: a * b)(ROWS, v)
        _assert_same([found], [np.asarray(jax.jacrev(lambda a: a * ROWS)(jnp.asarray(ROWS)))])


def test_functions_of_jax_see_what_a_step_assigned() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        v: Any = Variable(np.ones(2, np.float32))

    def step(x: Any) -> Any:
        first = jnp.matmul(x, v)
        v.assign(v * 2)
        gradient = jax.grad(lambda a: (a * a).sum())(v)
        return first, jnp.sum(v), gradient, jax.jit(lambda a: a + 1)(v), v[0]

    for number in (1.0, 2.0):
        first, total, gradient, more, item = strategy.run(step, (jnp.ones(2),))
        assert (float(first), float(total)) == (2 * number, 4 * number)
        assert (gradient.tolist(), more.tolist()) == ([4 * number] * 2, [2 * number + 1] * 2)
        assert float(item) == 2 * number
    with pytest.raises(jaxdist.errors.ContextError, match=r"jaxdist\.function"):
        jax.jit(lambda: jnp.sum(v))()


# What TensorFlow documents of `tf.Variable` (2.21), with the arguments in their order.
DOCUMENTED = {
    "SaveSliceInfo": None,
    "aggregation": None,
    "assign": ["value", "use_locking", "name", "read_value"],
    "assign_add": ["delta", "use_locking", "name", "read_value"],
    "assign_sub": ["delta", "use_locking", "name", "read_value"],
    "batch_scatter_update": ["sparse_delta", "use_locking", "name"],
    "constraint": None,
    "count_up_to": ["limit"],
    "device": None,
    "dtype": None,
    "eval": ["session"],
    "experimental_ref": [],
    "from_proto": ["variable_def", "import_scope"],
    "gather_nd": ["indices", "name"],
    "get_shape": [],
    "graph": None,
    "handle": None,
    "initial_value": None,
    "initialized_value": [],
    "initializer": None,
    "is_initialized": ["name"],
    "load": ["value", "session"],
    "name": None,
    "numpy": [],
    "op": None,
    "read_value": [],
    "ref": [],
    "scatter_add": ["sparse_delta", "use_locking", "name"],
    "scatter_div": ["sparse_delta", "use_locking", "name"],
    "scatter_max": ["sparse_delta", "use_locking", "name"],
    "scatter_min": ["sparse_delta", "use_locking", "name"],
    "scatter_mul": ["sparse_delta", "use_locking", "name"],
    "scatter_nd_add": ["indices", "updates", "name"],
    "scatter_nd_max": ["indices", "updates", "name"],
    "scatter_nd_min": ["indices", "updates", "name"],
    "scatter_nd_sub": ["indices", "updates", "name"],
    "scatter_nd_update": ["indices", "updates", "name"],
    "scatter_sub": ["sparse_delta", "use_locking", "name"],
    "scatter_update": ["sparse_delta", "use_locking", "name"],
    "set_shape": ["shape"],
    "shape": None,
    "sparse_read": ["indices", "name"],
    "synchronization": None,
    "to_proto": ["export_scope"],
    "trainable": None,
    "value": [],
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_what_tensorflow_documents_is_there_or_says_what_replaces_it(name: str) -> None:
    v = Variable(1.0)
    arguments = DOCUMENTED[name]
    if not hasattr(v, name):
        with pytest.raises(MissingNameError, match=f"Variable.{name} is not there"):
            getattr(v, name)
        return
    found = getattr(v, name)
    assert callable(found) is (arguments is not None)
    if arguments is not None:
        assert list(inspect.signature(found).parameters) == arguments


def test_a_variable_is_formatted_as_its_value() -> None:
    v = Variable(1.25)
    assert f"{v:.1f} {v:6.2f}" == f"{v.value():.1f} {v.value():6.2f}"
    assert f"{v}" == str(v)


def test_arguments_without_effect_change_nothing() -> None:
    v = Variable(1.0)
    assert float(v.assign(2.0, True, "name")) == 2.0
    assert v.assign_add(1.0, use_locking=True, name="add", read_value=False) is None
    assert float(v.assign_sub(1, False, None, True)) == 2.0
    v.load(5.0)
    assert (float(v), v.is_initialized(), v.experimental_ref() == v.ref()) == (5.0, True, True)


# Elements and blocks: what NumPy does.

PLACES = [[0, 2], [1, 0], [0, 2]]


@pytest.mark.parametrize("change", ["add", "sub", "update", "min", "max"])
def test_scatter_nd_does_what_numpy_does(change: str) -> None:
    expected = ROWS.copy()
    apply = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}
    at = tuple(np.array(PLACES).T)
    values = np.array([10.0, -1.0, 10.0], np.float32)
    if change == "update":
        expected[at] = values
    else:
        apply[change].at(expected, at, values)
    for v in _variables(ROWS):
        after = getattr(v, f"scatter_nd_{change}")(PLACES, values)
        np.testing.assert_array_equal(after, expected)
        np.testing.assert_array_equal(v.numpy(), expected)


def test_reads_by_place_do_what_numpy_does() -> None:
    for v in _variables(ROWS):
        np.testing.assert_array_equal(v.gather_nd(PLACES), ROWS[tuple(np.array(PLACES).T)])
        np.testing.assert_array_equal(v.gather_nd([[1]]), ROWS[[1]])
        np.testing.assert_array_equal(v.sparse_read([[1], [0]]), ROWS[[[1], [0]]])


@pytest.mark.parametrize(
    "index",
    [0, -1, (1, 2), slice(None), slice(None, None, 2), (Ellipsis, 1), (slice(1), slice(1, 3))],
    ids=str,
)
def test_a_part_of_a_variable_is_assigned(index: Any) -> None:
    for v in _variables(ROWS):
        expected, shape = ROWS.copy(), ROWS[index].shape
        for name in ("assign", "assign_add", "assign_sub"):
            value = np.full(shape, 3.0, np.float32)
            if name == "assign":
                expected[index] = value
            else:
                expected[index] += value if name == "assign_add" else -value
            np.testing.assert_array_equal(getattr(v[index], name)(value), expected)
        np.testing.assert_array_equal(v.numpy(), expected)
        assert v[index].shape == shape
        with pytest.raises(ShapeError):
            v[index].assign(np.ones((*shape, 2), np.float32))
        np.testing.assert_array_equal(v.numpy(), expected)


def test_places_that_are_wrong_are_named_and_change_nothing() -> None:
    v = Variable(ROWS, name="w")
    for places, error in (
        ([[2, 0]], ArgumentError),
        ([[-1, 0]], ArgumentError),
        ([[0, 0, 0]], ShapeError),
        ([[0.5, 0.0]], ArgumentTypeError),
    ):
        with pytest.raises(error, match="'w'"):
            v.scatter_nd_add(places, [1.0])
        with pytest.raises(error, match="'w'"):
            v.gather_nd(places)
    with pytest.raises(ShapeError, match="'w'"):
        v.scatter_nd_add([[0, 0]], [1.0, 2.0])
    with pytest.raises(ArgumentError, match="scalar"):
        Variable(1.0)[...].assign(2.0)
    np.testing.assert_array_equal(v.numpy(), ROWS)


AGGREGATED = {
    "NONE": [[0.5, 1.5, 2.5], [3.5, 4.5, 7.5]],
    "SUM": [[0.5, 1.5, 2.5], [3.5, 4.5, 9.5]],
    "MEAN": [[0.5, 1.5, 2.5], [3.5, 4.5, 7.5]],
    "ONLY_FIRST_REPLICA": [[0.5, 1.5, 2.5], [3.5, 4.5, 6.5]],
}


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("aggregation", AGGREGATED)
def test_replicas_change_elements_by_the_aggregation(aggregation: str, eagerly: bool) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        v = Variable(ROWS, aggregation=jaxdist.VariableAggregation[aggregation])

    def step(x: Any) -> Any:
        if aggregation == "NONE":
            x = jaxdist.get_replica_context().all_reduce("mean", x)
        if aggregation in ("SUM", "MEAN"):
            with pytest.raises(NotImplementedError):
                v[1, 2].assign(x)
        return v[1, 2].assign_add(x)

    with jaxdist.config.run_eagerly(eagerly):
        strategy.run(step, (jaxdist.PerReplica([np.float32(1), np.float32(3)]),))

    np.testing.assert_array_equal(v.numpy(), AGGREGATED[aggregation])


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_an_integer_beyond_those_of_jax_is_named_and_changes_nothing(method: str) -> None:
    for v in _variables(np.array(1, np.int32)):
        with pytest.raises(ArgumentError, match="beyond int32"):
            getattr(v, method)(2**40)
        assert int(v) == 1


WRONG: dict[str, Callable[[Any], Any]] = {
    "updates of no type": lambda v: v.scatter_nd_add([[0]], None),
    "updates of text": lambda v: v.scatter_nd_update([[0]], ["nonsense"]),
    "updates that the dtype cannot hold": lambda v: v.scatter_nd_add([[0]], [0.5]),
    "updates beyond int32": lambda v: v.scatter_nd_add([[0]], [2**40]),
    "indices of no type": lambda v: v.sparse_read(None),
    "indices beyond int32": lambda v: v.sparse_read([2**40]),
    "a shape that is a number": lambda v: v.set_shape(2),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_blocks_and_places_are_refused_and_change_nothing(name: str) -> None:
    variable = Variable([1, 2])
    with pytest.raises(jaxdist.errors.JaxdistError, match="Variable"):
        WRONG[name](variable)
    assert variable.numpy().tolist() == [1, 2]
