"""Proof that a step only updates a count, a mean and squared deviations with more data.

`nnx.metrics.Welford` keeps these three moments. jaxdist may merge the moments of several replicas
only if the step is a pure update: `step(a + b) == a + step(b)`, where `+` merges two sets of
moments. An update is a rational function of the moments, so the equation holds if both sides agree
at random points (the lemma of Schwartz and Zippel). This module tests that in float64, on the few
operations that use the moments.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.control_flow import Scan
from jaxdist._program.jaxprs.interpreter import Interpreter, evaluate_known, rule_for

_TRIES = 4
_SMALL = 64

Array: TypeAlias = Any


class _NoUpdateError(Exception):
    """The step has an operation that updates of moments do not have."""


def is_update(
    jaxpr: Any,
    inputs: Sequence[Any],
    results: Sequence[Any],
    places: Sequence[Mapping[str, int]],
    constants: Mapping[Any, Any],
) -> bool:
    """Whether three results of an open jaxpr are its inputs (count, mean, m2), updated with data.

    Args:
        jaxpr: The program of one replica.
        inputs: Its input variables for the three moments.
        results: Its result variables for the three moments.
        places: The replicas to test, by their index on each axis.
        constants: Inputs whose values are known.
    """
    try:
        return all(
            _is_update_at(jaxpr, inputs, results, constants, place, seed)
            for place in places
            for seed in range(_TRIES)
        )
    except _NoUpdateError:
        return False


def _is_update_at(
    jaxpr: Any,
    inputs: Sequence[Any],
    results: Sequence[Any],
    constants: Mapping[Any, Any],
    place: Mapping[str, int],
    seed: int,
) -> bool:
    # Fixed seeds: a program must give the same answer on every process and in every run.
    random = np.random.default_rng(seed)
    first, second = _make_moments(inputs, random), _make_moments(inputs, random)

    def step(state: Sequence[Array]) -> list[Array]:
        # The same seed in both runs, so both see the same made-up data.
        trial = Trial(place, seed)
        given = {v: _Free(lambda x=x: np.asarray(x)) for v, x in constants.items()}
        given.update(zip(inputs, state, strict=True))
        env = trial.environment(
            jaxpr, [given[v] if v in given else trial.make_free(v.aval) for v in jaxpr.invars]
        )
        trial.evaluate(jaxpr.eqns, env)
        return [trial.value(x) for x in env.read_all(results)]

    with np.errstate(all="ignore"):
        together = step(_merge(first, second))
        apart = _merge(first, step(second))
    return all(
        a.shape == b.shape and bool(np.all(np.isfinite(a))) and np.allclose(a, b, rtol=1e-6)
        for a, b in zip(together, apart, strict=True)
    )


def _make_moments(inputs: Sequence[Any], random: np.random.Generator) -> list[Array]:
    shapes = [v.aval.shape for v in inputs]
    num = random.integers(2, 9, shapes[0]).astype(np.float64)
    return [num, random.normal(size=shapes[1]), random.uniform(1, 2, shapes[2])]


def _merge(a: Sequence[Array], b: Sequence[Array]) -> list[Array]:
    num = a[0] + b[0]
    apart = b[1] - a[1]
    return [num, a[1] + apart * b[0] / num, a[2] + b[2] + apart**2 * a[0] * b[0] / num]


@dataclasses.dataclass(frozen=True, eq=False)
class _Free:
    """A value that does not depend on the moments; made up when it is first read, then cached."""

    make: Callable[[], Array]

    @functools.cached_property
    def value(self) -> Array:
        """The value."""
        return self.make()


_UNCHANGED = "convert_element_type copy mesh_cast reshard sharding_constraint stop_gradient".split()
# Only rational functions: for others, agreement at random points proves nothing.
_RATIONAL: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "square": np.square,
    **dict.fromkeys(_UNCHANGED, lambda x: x),
    "integer_pow": lambda x, y: x**y,
    "squeeze": lambda x, dimensions: np.squeeze(x, dimensions),
}


class Trial(Interpreter[Any]):
    """One evaluation of a step on random values.

    Args:
        place: The index of the replica on each axis.
        seed: The seed of the values that do not depend on the moments.
    """

    def __init__(self, place: Mapping[str, int], seed: int) -> None:
        self._random = np.random.default_rng(1000 + seed)
        self._place = place

    def make_free(self, aval: Any) -> _Free:
        def make() -> Array:
            if not hasattr(aval, "shape") or not _has_numbers(aval):
                raise _NoUpdateError
            if aval.dtype == np.bool_:
                return self._random.integers(0, 2, aval.shape).astype(bool)
            if np.issubdtype(aval.dtype, np.integer):
                return self._random.integers(1, 5, aval.shape).astype(np.float64)
            return self._random.uniform(1, 2, aval.shape)

        return _Free(make)

    def constant(self, variable: Any, value: Any) -> _Free:
        return self.make_free(variable.aval) if value is None else _Free(lambda: np.asarray(value))

    def value(self, x: Any) -> Array:
        return x.value if isinstance(x, _Free) else x

    def equation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        if all(isinstance(x, _Free) for x in inputs) and rule_for(eqn) != "call":
            return self._evaluate_free(eqn, eqn.primitive.name, inputs)
        return super().equation(eqn, inputs)

    def operation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        values = [self.value(x) for x in inputs]
        return [self._compute_rational(eqn, eqn.primitive.name, values, inputs)]

    def cond(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        if not isinstance(inputs[0], _Free):
            return self.operation(eqn, inputs)
        branches = eqn.params["branches"]
        chosen = int(np.clip(int(inputs[0].value), 0, len(branches) - 1))
        return self.run(branches[chosen], inputs[1:])

    def _compute_rational(
        self, eqn: Any, name: str, values: list[Array], operands: list[Any]
    ) -> Array:
        if name == "select_n" and isinstance(operands[0], _Free):
            return np.choose(values[0].astype(int), values[1:])
        if name in ("reshape", "broadcast_in_dim"):
            return np.broadcast_to(
                values[0].reshape(_insert_ones(eqn, name)), eqn.outvars[0].aval.shape
            )
        fn = _RATIONAL.get(name)
        is_number = not np.issubdtype(eqn.outvars[0].aval.dtype, np.bool_)
        if fn is None or not is_number:
            raise _NoUpdateError
        params = eqn.params if name in ("integer_pow", "squeeze") else {}
        return np.asarray(fn(*values, **params))

    def scan(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        loop = Scan.of(eqn.params)
        carry = loop.num_carry
        if loop.length > _SMALL or (len(eqn.outvars) > carry and loop.length == 0):
            raise _NoUpdateError
        held, state, over = loop.split(inputs)
        for _ in range(loop.length):
            # Rows of data are made up; no update scans over its moments.
            if not all(isinstance(x, _Free) for x in over):
                raise _NoUpdateError
            rows = [self.make_free(a) for a in loop.row_avals]
            state = self.run(loop.program, [*held, *state, *rows])[:carry]
        return [*state, *(self.make_free(v.aval) for v in eqn.outvars[carry:])]

    def _evaluate_free(self, eqn: Any, name: str, operands: list[Any]) -> list[Any]:
        """Return the results of an operation on free values."""
        if name == "axis_index" and eqn.params["axis_name"] in self._place:
            return [_Free(lambda: np.int32(self._place[eqn.params["axis_name"]]))]
        avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
        is_small = all(getattr(a, "size", _SMALL + 1) <= _SMALL and _has_numbers(a) for a in avals)
        # Large values are made up. Small ones are evaluated: a batch size that the step uses
        # twice, for the count and for the mean, must be the same number in both places.
        if name not in known.FIRST_ORDER or eqn.effects or not is_small:
            return [self.make_free(v.aval) for v in eqn.outvars]
        whole = _Free(lambda: self._evaluate(eqn, name, operands))
        return [_Free(lambda i=i: whole.value[i]) for i in range(len(eqn.outvars))]

    def _evaluate(self, eqn: Any, name: str, operands: list[Any]) -> list[Array]:
        values = [x.value for x in operands]
        if name in _RATIONAL or name in ("reshape", "broadcast_in_dim"):
            try:
                made = self._compute_rational(eqn, name, values, operands)
                return [self._replace_non_finite(made, eqn.outvars[0].aval)]
            except _NoUpdateError:
                pass
        results = evaluate_known(eqn, values)
        if results is None:
            # Any value serves as data.
            return [self.make_free(v.aval).value for v in eqn.outvars]
        pairs = zip(results, eqn.outvars, strict=True)
        return [self._replace_non_finite(x, v.aval) for x, v in pairs]

    def _replace_non_finite(self, value: Array, aval: Any) -> Array:
        """Return `value`, or a made-up one if made-up operands led to a nan or an infinity.

        A made-up label may be out of range, for example.
        """
        is_float = jnp.issubdtype(value.dtype, jnp.inexact)
        return value if not is_float or np.isfinite(value).all() else self.make_free(aval).value


def _insert_ones(eqn: Any, name: str) -> tuple[int, ...]:
    shape = eqn.outvars[0].aval.shape
    if name == "reshape":
        return tuple(shape)
    own = eqn.invars[0].aval.shape
    sizes = [1] * len(shape)
    for place, size in zip(eqn.params["broadcast_dimensions"], own, strict=True):
        sizes[place] = size
    return tuple(sizes)


def _has_numbers(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
