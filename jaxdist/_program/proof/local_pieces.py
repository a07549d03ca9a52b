"""Evaluation of a traced step on the pieces of sharded arrays that one replica holds.

jaxdist traces a step with sharded arrays in their whole shapes. `LocalPieces` evaluates each
operation of the trace on the piece of this replica, where `ShardingProof` has proved that this
gives the same. See Note [Whole shapes, local pieces].
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jaxdist import _compat
from jaxdist._called import called, name_call
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.control_flow import Scan, While
from jaxdist._program.jaxprs.interpreter import Interpreter
from jaxdist._program.jaxprs.subprograms import aval_of, iterate_with_inner, subprograms
from jaxdist._program.proof import uncut_dims
from jaxdist._program.proof.pieces import ShardFact, ShardingProof
from jaxdist._values import (
    ELEMENTWISE,
    OPEN,
    PIECE,
    REDUCED_PIECES,
    Cut,
    cut_piece,
    is_exact_reduction,
    reduce_pieces,
    take_mean,
)
from jaxdist.errors import ShardedArrayError

# Calls that must stay calls, since they mark the values to recompute for gradients.
_REBUILT = frozenset({"remat", "remat2", "checkpoint"})


# Note [Means after a loop]
# With an array that is cut along some replica axes only, the gradient of a piece is summed over the
# other axes, by an all-reduce. In a scan over layers that would be one all-reduce for each layer.
# So `PIECE` does not take its mean at once: the value keeps it as pending, in `mean`. The first
# operation that uses the value takes it. Rows that a scan stacks, results of `jax.checkpoint` and
# sums of cotangents pass it on. So there is one all-reduce for all layers, after the loop.


class Local(NamedTuple):
    """A fact about a value, and the value: for a sharded array, the piece of this replica.

    `mean` has the parameters of a pending `take_mean`; the fact describes the value after it.
    """

    fact: ShardFact
    array: Any
    mean: tuple[int, tuple[str, ...]] | None = None


class LocalPieces(Interpreter[Local]):
    """An interpreter that evaluates programs of whole arrays on the pieces of one replica.

    Args:
        proof: The analysis that proves facts about values.

    Raises:
        ShardedArrayError: From `run`: an operation would see a piece instead of the whole array.
    """

    def __init__(self, proof: ShardingProof) -> None:
        self._proof = proof
        # The means that were taken, with their operands: an `id` stays taken as long as its object.
        self._taken: dict[tuple[int, Any], tuple[Any, Any]] = {}

    def take_mean(self, value: Local) -> Local:
        """Return a value whose mean is taken. See Note [Means after a loop]."""
        if value.mean is None:
            return value
        key = (id(value.array), value.mean)
        if key not in self._taken:
            divisor, others = value.mean
            result = take_mean(value.array, divisor=divisor, others=others)
            self._taken[key] = (value.array, result)
        return Local(value.fact, self._taken[key][1])

    def constant(self, variable: Any, value: Any) -> Local:
        is_uniform = all(n == 1 for n in variable.aval.shape)
        return Local(ShardFact(frozenset(), is_uniform=is_uniform), value)

    def equation(self, eqn: Any, inputs: list[Local]) -> list[Local]:
        name, means = eqn.primitive.name, {x.mean for x in inputs}
        if name == "add_any" and len(means) == 1 and (mean := means.pop()):
            return [x._replace(mean=mean) for x in self._bind_unchanged(eqn, inputs)]
        if not _is_inlined(name):
            inputs = [self.take_mean(x) for x in inputs]
        # Bind operations without pieces as they are: a scan or a custom derivative in them then
        # needs no second trace.
        has_pieces = any(x.fact.cut is not None for x in inputs)
        if not (has_pieces or is_marked(eqn)):
            return self._bind_unchanged(eqn, inputs)
        return super().equation(eqn, inputs)

    def operation(self, eqn: Any, inputs: list[Local]) -> list[Local]:
        if eqn.primitive is REDUCED_PIECES:
            return inputs
        if subprograms(eqn) and eqn.outvars:
            raise ShardedArrayError(_explain_not_inside(eqn))
        facts = self._proof.equation(eqn, [x.fact for x in inputs])
        if eqn.primitive is PIECE:
            mean = eqn.params["divisor"], eqn.params["others"]
            made = Local(facts[0], inputs[0].array, mean)
            return [made if eqn.params["others"] else self.take_mean(made)]
        if eqn.primitive is OPEN:
            return [Local(facts[0], self._cut_piece(inputs[0], eqn.params["cut"]))]
        pieces = [x.fact.cut for x in inputs if x.fact.cut is not None]
        if eqn.primitive.name in ELEMENTWISE:
            local = [Local(x.fact, self._cut_piece(x, pieces[0])) for x in inputs]
            return _bind(eqn, local, eqn.params, facts)
        if pieces and is_exact_reduction(eqn, pieces[0]):
            with _compat.use_source_of(eqn):
                whole = reduce_pieces(eqn, inputs[0].array, pieces[0], self._proof.layout)
            return [Local(facts[0], whole)]
        if pieces and uncut_dims.has_rule(eqn):
            cut, count = pieces[0], uncut_dims.count_arrays(eqn)
            local = [Local(x.fact, self._cut_piece(x, cut)) for x in inputs[:count]]
            moved = uncut_dims.follow(eqn, cut, cut.rows(cut.pieces(self._proof.layout)))
            return _bind(eqn, [*local, *inputs[count:]], moved.params, facts)
        return _bind(eqn, inputs, eqn.params, facts)

    def _bind_unchanged(self, eqn: Any, inputs: Sequence[Local]) -> list[Local]:
        """Bind an operation without changing it."""
        facts = self._proof.equation(eqn, [x.fact for x in inputs])
        return _bind(eqn, inputs, eqn.params, facts)

    def _cut_piece(self, value: Local, cut: Cut) -> Any:
        """Return the piece of this replica; scalars stay as they are."""
        array, layout = value.array, self._proof.layout
        if value.fact.cut is not None or not jnp.ndim(array) or cut.pieces(layout) == 1:
            return array
        array = jnp.asarray(array)
        if array.shape[cut.dim] != cut.size:
            # The dim has one element, which broadcasts against the piece of every replica.
            return array
        if value.fact.is_uniform:
            # All pieces are equal, so slice at 0, which does not depend on the replica.
            shape = cut.local_shape(array.shape, cut.pieces(layout))
            return jax.lax.slice(array, (0,) * array.ndim, shape)
        return cut_piece(array, cut, layout)

    def _convert(self, value: Local, fact: ShardFact) -> Any:
        """Return the array of a value in the form of `fact`: a piece, or whole."""
        return value.array if fact.cut is None else self._cut_piece(value, fact.cut)

    # Operations that hold programs

    def call(self, eqn: Any, inputs: list[Local]) -> list[Local]:
        name = eqn.primitive.name
        if name == "shard_map":
            return self.operation(eqn, inputs)
        parameter = known.CALLS[name]
        inner = eqn.params[parameter]
        if _is_inlined(name):
            with _compat.use_source_of(eqn):
                return self.run(inner, inputs)
        found = self._proof.equation(eqn, [x.fact for x in inputs])
        # The user wrote the backward rule for whole arrays. It cannot be rewritten, so jaxdist
        # evaluates the function and raises if it is differentiated.
        if name.startswith("custom_vjp"):
            evaluate = _raise_in_derivative(lambda *a: self._evaluate_as(inner, inputs, found, a))
            results = evaluate(*(x.array for x in inputs))
            return [Local(s, x) for s, x in zip(found, results, strict=True)]
        # The rule of a custom derivative has the same results, and takes their means.
        means: list[Any] = [None] * len(found)
        late = means if name in _REBUILT else None
        params = {**eqn.params, parameter: self._trace(inner, inputs, found, late)}
        if "jvp_jaxpr_fun" in params:
            rule = functools.partial(self._trace_jvp, inputs, found)
            params["jvp_jaxpr_fun"] = _compat.rewrite_jvp(params["jvp_jaxpr_fun"], rule)
        return _put_means(_bind(eqn, inputs, params, found), means)

    def _trace_jvp(
        self,
        inputs: Sequence[Local],
        found: Sequence[ShardFact],
        program: Any,
        zeros: Sequence[bool],
        out_zeros: Sequence[bool],
    ) -> Any:
        """Return the JVP rule of a custom derivative on pieces; tangents are cut like values."""
        moved = [inputs[i] for i, zero in enumerate(zeros) if not zero]
        tangents = [Local(ShardFact(x.fact.differs, x.fact.cut), x.array) for x in moved]
        wanted = [*found, *(s for s, zero in zip(found, out_zeros, strict=True) if not zero)]
        return self._trace(program, [*inputs, *tangents], wanted)

    def scan(self, eqn: Any, inputs: list[Local]) -> list[Local]:
        loop = Scan.of(eqn.params)
        carry = loop.num_carry
        found = self._proof.equation(eqn, [x.fact for x in inputs])
        held, start, over = loop.split(inputs)
        state = [Local(s, self._convert(x, s)) for x, s in zip(start, found[:carry], strict=True)]
        of_rows = self._proof.rows(eqn, [x.fact for x in over])
        rows = [Local(s, aval_of(x.array, 1)) for x, s in zip(over, of_rows, strict=True)]
        stacked = [ShardFact(s.differs, s.cut and s.cut.before(0)) for s in found[carry:]]
        wanted = [*found[:carry], *stacked]
        means: list[Any] = [None] * len(stacked)
        program = self._trace(loop.program, [*held, *state, *rows], wanted, means)
        results = _bind(eqn, [*held, *state, *over], {**eqn.params, "jaxpr": program}, found)
        return [*results[:carry], *_put_means(results[carry:], means)]

    def while_loop(self, eqn: Any, inputs: list[Local]) -> list[Local]:
        loop = While.of(eqn.params)
        found = self._proof.equation(eqn, [x.fact for x in inputs])
        of_condition, of_body, start = loop.split(inputs)
        state = [Local(s, self._convert(x, s)) for x, s in zip(start, found, strict=True)]
        goes_on = self._trace(loop.condition, [*of_condition, *state], [ShardFact(frozenset())])
        body = self._trace(loop.body, [*of_body, *state], found)
        params = {**eqn.params, "cond_jaxpr": goes_on, "body_jaxpr": body}
        return _bind(eqn, [*of_condition, *of_body, *state], params, found)

    def cond(self, eqn: Any, inputs: list[Local]) -> list[Local]:
        found = self._proof.equation(eqn, [x.fact for x in inputs])
        branches = tuple(self._trace(b, inputs[1:], found) for b in eqn.params["branches"])
        return _bind(eqn, inputs, {**eqn.params, "branches": branches}, found)

    def _evaluate_as(
        self,
        program: Any,
        inputs: Sequence[Local],
        wanted: Sequence[ShardFact],
        arrays: Sequence[Any],
        means: list[Any] | None = None,
    ) -> list[Any]:
        """Evaluate a program on arrays that have the facts of `inputs`.

        Fills a list `means` with the pending means of the last results.

        Returns:
            Each result in the form of the fact in `wanted`.
        """
        given = [Local(x.fact, array) for x, array in zip(inputs, arrays, strict=True)]
        results = list(zip(self.run(program, given), wanted, strict=True))
        first = len(results) - len(means or [])
        arrays = []
        for number, (x, s) in enumerate(results):
            if means is not None and number >= first and x.fact.cut == s.cut:
                means[number - first] = x.mean
            else:
                x = self.take_mean(x)
            arrays.append(self._convert(x, s))
        return arrays

    def _trace(
        self,
        program: Any,
        inputs: Sequence[Local],
        wanted: Sequence[ShardFact],
        means: list[Any] | None = None,
    ) -> Any:
        """Trace a program again on local values; open or closed, as `program` is."""

        def local(*own: Any) -> list[Any]:
            return self._evaluate_as(program, inputs, wanted, own, means)

        closed = jax.make_jaxpr(local)(*(aval_of(x.array) for x in inputs))
        return closed if isinstance(program, ClosedJaxpr) else closed.jaxpr


def _is_inlined(name: str) -> bool:
    """Whether an operation is a call whose program is evaluated in its place."""
    is_kept = name in _REBUILT or name.startswith("custom_") or name == "shard_map"
    return name in known.CALLS and not is_kept


def _put_means(values: Sequence[Local], means: Sequence[Any]) -> list[Local]:
    return [x._replace(mean=m) for x, m in zip(values, means, strict=True)]


def is_marked(eqn: Any) -> bool:
    """Whether an operation is `PIECE` or `OPEN`, or holds a program that has one of them."""
    return any(e.primitive in (PIECE, OPEN) for e in iterate_with_inner(eqn))


def _bind(
    eqn: Any, inputs: Sequence[Local], params: dict[str, Any], facts: Sequence[ShardFact]
) -> list[Local]:
    """Bind an operation on local arrays; return its results with these facts."""
    results = _compat.bind_like(eqn, [x.array for x in inputs], params)
    return [Local(s, x) for s, x in zip(facts, results, strict=True)]


def _raise_in_derivative(fn: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return `fn` with a derivative that raises `ShardedArrayError`."""
    wrapped = jax.custom_jvp(fn)

    @called("strategy.run")
    def rule(*_: Any) -> Any:
        raise ShardedArrayError(
            f"{name_call()} was differentiated from outside, with a function in its step that has "
            "a derivative of its own (jax.custom_vjp) and is used on arrays in pieces.\n\n"
            "Such a derivative is written for whole arrays, and a replica has pieces of them.\n\n"
            "Differentiate inside of the step, or gather before: jaxdist.partition.gather(tree)."
        )

    wrapped.defjvp(rule)
    return wrapped


@called("strategy.run")
def _explain_not_inside(eqn: Any) -> str:
    source = _compat.find_source(eqn)
    return (
        f"{name_call()}{f', at {source}' if source else ''}: {eqn.primitive.name} holds a program "
        "that uses arrays in pieces.\n\n"
        "Inside of it jaxdist cannot tell a piece from a whole array.\n\n"
        "Gather them before: jaxdist.partition.gather(tree)."
    )
