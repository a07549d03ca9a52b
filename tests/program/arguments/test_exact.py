"""Constants share a program if they have the same type and the same bits, and only then."""

import dataclasses
import datetime
import decimal
import fractions
import functools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist
from jaxdist._program.arguments.exact import exact
from tests.tables import examples, sampled

OTHER_NAN = struct.unpack("d", struct.pack("Q", 0x7FF8000000000001))[0]


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Config:
    """A frozen dataclass, compared by its fields."""

    rate: Any
    note: Any = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class ByName:
    """A frozen dataclass with an equality of its own."""

    name: str
    rate: float

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByName) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["rate"])
@dataclasses.dataclass
class Scaled:
    """A pytree with a static part."""

    x: Any
    rate: Any


def spelled(value: Any) -> str:
    """What a constant is, in words: another way to tell constants apart."""
    kind = type(value).__qualname__
    if isinstance(value, np.generic):
        return f"{kind}:{value.dtype}:{value.tobytes().hex()}"
    if isinstance(value, float):
        return f"{kind}:{struct.pack('>d', value).hex()}"
    if isinstance(value, complex):
        return f"{kind}:{spelled(value.real)},{spelled(value.imag)}"
    if isinstance(value, tuple):
        return f"{kind}({','.join(map(spelled, value))})"
    if isinstance(value, frozenset):
        return f"{kind}({','.join(sorted(map(spelled, value)))})"
    if isinstance(value, Config):
        return f"{kind}({spelled(value.rate)})"
    return f"{kind}:{value!r}"


ATOMS: list[Any] = [
    *(0, 0.0, -0.0, False, 1, 1.0, True, 2, 2.0, 0j, complex(0.0, -0.0), complex(-0.0, 0.0)),
    *(float("nan"), -float("nan"), OTHER_NAN, float("inf"), "", "1", b"1", None, ...),
    *(np.float32(0.0), np.float32(-0.0), np.float64(0.0), np.int32(1), np.bool_(True)),
    *(decimal.Decimal("1.0"), decimal.Decimal("1.00"), decimal.Decimal(1)),
    *(fractions.Fraction(1), range(0), range(1, 1), datetime.timedelta(0)),
    datetime.datetime(2000, 1, 1, 12, tzinfo=datetime.UTC),
    datetime.datetime(2000, 1, 1, 13, tzinfo=datetime.timezone(datetime.timedelta(hours=1))),
]

# A set cannot hold a decimal beside an integer of NumPy: comparing them raises.
constants = st.recursive(
    st.sampled_from([a for a in ATOMS if not isinstance(a, decimal.Decimal)])
    | st.floats()
    | st.complex_numbers(),
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.frozensets(inner, max_size=3)
        | st.tuples(inner, inner).map(lambda p: Pair(*p))
        | inner.map(Config)
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=examples(300, 5000))
@given(constants, constants)
def test_keys_are_equal_where_type_and_bits_are(first: Any, second: Any) -> None:
    same = spelled(first) == spelled(second)
    assert (exact(first) == exact(second)) == same
    assert not same or hash(exact(first)) == hash(exact(second))


@pytest.mark.parametrize("first", ATOMS, ids=spelled)
def test_keys_of_simple_constants_are_equal_where_type_and_bits_are(first: Any) -> None:
    for wrap in (
        lambda x: x,
        lambda x: (x,),
        lambda x: frozenset([x]),
        Config,
        lambda x: (Config((x,)),),
    ):
        for second in ATOMS:
            same = spelled(first) == spelled(second)
            assert (exact(wrap(first)) == exact(wrap(second))) == same


def test_what_a_class_says_of_its_own_equality_counts() -> None:
    assert exact(ByName("a", 0.0)) == exact(ByName("a", 1.0))
    assert exact(Config(1, note="a")) == exact(Config(1, note="b"))


# Ways by which a constant becomes part of a program: a step that says which one it was traced for.
Way = Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]]
X = np.ones(2, np.float32)
_STATIC = jaxdist.RunOptions(static_argnames=("c",))


def _said(c: Any) -> Any:
    return spelled(c)


def step_of_argument(c: Any, x: Any) -> Any:
    return _said(c), x


def step_of_pytree(tree: Any, x: Any) -> Any:
    return spelled(next(iter(tree))), x


def step_of_node(node: Any, x: Any) -> Any:
    return spelled(node.rate), x


def step_of_module(model: Any, x: Any) -> Any:
    return spelled(model.rate), x


@dataclasses.dataclass(frozen=True)
class CallableStep:
    """A step that is an object."""

    rate: Any

    def __call__(self, x: Any) -> Any:
        return spelled(self.rate), x


class Model(nnx.Module):
    """A module with a static attribute."""

    def __init__(self, rate: Any) -> None:
        self.rate = rate
        self.w = nnx.Param(jnp.ones(()))


WAYS: dict[str, Way] = {
    "static_argnames": lambda c: (step_of_argument, (c, X), {}, _STATIC),
    "static_argnames by name": lambda c: (step_of_argument, (), {"c": c, "x": X}, _STATIC),
    "an object": lambda c: (step_of_node, (Config(c), X), {}, None),
    "an object in a pytree": lambda c: (
        lambda t, x: step_of_node(t["a"], x),
        ({"a": Config(c)}, X),
        {},
        None,
    ),
    "a key of a dict": lambda c: (step_of_pytree, ({c: X}, X), {}, None),
    "a static part of a pytree": lambda c: (step_of_node, (Scaled(X, c), X), {}, None),
    "a pytree beside a static argument": lambda c: (
        lambda how, node, x: step_of_node(node, x),
        ("a", Scaled(X, c), X),
        {},
        None,
    ),
    "a pytree that is donated": lambda c: (
        step_of_node,
        (Scaled(X, c), X),
        {},
        jaxdist.RunOptions(donate_argnums=(1,)),
    ),
    "an attribute of a module": lambda c: (step_of_module, (Model(c), X), {}, None),
    "the step": lambda c: (CallableStep(c), (X,), {}, None),
}
SIBLINGS: list[Any] = [
    [0.0, -0.0, 0, False],
    [1, 1.0, True, np.float32(1)],
    [(1,), (True,), (1.0,), ((1,),)],
    [float("nan"), OTHER_NAN],
    [frozenset([0.0]), frozenset([-0.0]), frozenset([False])],
    [Config(0.0), Config(-0.0)],
]


def _fits(way: str, constant: Any) -> bool:
    """Whether a constant can be there: keys of a dict that JAX sorts, and no nan."""
    return way != "a key of a dict" or constant == constant


_MADE = {
    "one": lambda: jaxdist.OneDeviceStrategy("cpu:0"),
    "many": lambda: jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]),
}
_ROWS = [
    (w, i, s)
    for w in WAYS
    for i in range(len(SIBLINGS))
    for s in _MADE
    if any(_fits(w, c) for c in SIBLINGS[i])
]


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("row", sampled(_ROWS, 24, name=lambda r: f"{r[0]}-{r[1]}-{r[2]}"))
def test_a_step_runs_the_program_of_its_own_constant(row: tuple[str, int, str]) -> None:
    way, number, made = row
    strategy = _MADE[made]()
    siblings = [c for c in SIBLINGS[number] if _fits(way, c)]
    calls = [WAYS[way](c) for c in siblings]
    for _ in range(3):
        for constant, (fn, args, kwargs, options) in zip(siblings, calls, strict=True):
            fn = fn if way == "the step" else calls[0][0]
            said, _ = strategy.run(fn, args, kwargs, options)
            assert said == spelled(constant)


@pytest.mark.parametrize(
    "way", [w for w in WAYS if w not in ("the step", "a pytree that is donated")]
)
def test_a_function_runs_the_program_of_its_own_constant(way: str) -> None:
    for siblings in SIBLINGS:
        siblings = [c for c in siblings if _fits(way, c)]
        if not siblings:
            continue
        calls = [WAYS[way](c) for c in siblings]
        fn = jaxdist.function(calls[0][0], static_argnames=("c",) if "argnames" in way else ())
        for _ in range(2):
            for constant, (_, args, kwargs, _) in zip(siblings, calls, strict=True):
                assert fn(*args, **kwargs)[0] == spelled(constant)


def test_a_constant_that_is_a_nan_is_traced_once() -> None:
    strategy, traces = jaxdist.OneDeviceStrategy("cpu:0"), []

    def step(c: Any, x: Any) -> Any:
        traces.append(c)
        return x

    for _ in range(4):
        strategy.run(step, (float("nan"), X), options=_STATIC)
    assert len(traces) == 1


def test_a_step_that_changes_the_sign_of_zero_in_a_module_is_an_error() -> None:
    def step(model: Any) -> None:
        model.rate = -0.0

    with pytest.raises(jaxdist.errors.StateDivergenceError, match="attribute"):
        jaxdist.OneDeviceStrategy("cpu:0").run(step, (Model(0.0),))
