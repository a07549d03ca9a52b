"""Primitives that jaxdist adds to a trace, and notes about the trace."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jaxdist import _compat
from jaxdist._called import called, name_call, refuse_type
from jaxdist._contexts import TRACE_NUMBER
from jaxdist._validate import as_arrays, show
from jaxdist._values import is_per_replica


@dataclasses.dataclass(frozen=True)
class AllReducePlan:
    """How an all-reduce is computed, and why; `explain` shows it.

    `alternatives` are all possible algorithms, each with its predicted seconds. `pack_bytes` is the
    size of the largest pack if the caller asked for packs, else 0.
    """

    algorithm: str
    reason: str
    alternatives: tuple[tuple[str, float], ...] = ()
    ignored: tuple[str, ...] = ()
    pack_bytes: int = 0


NO_PLAN = AllReducePlan("", "")


@dataclasses.dataclass
class TraceNotes:
    """Notes of one trace: `ignored` has hints without effect, `plans` has plans by source line.

    `work` has, for each call that divides its work over an axis, its name, its line, and what it
    does.

    A plan here describes an all-reduce that is a plain `psum`. It is a function, because it takes
    time to compute, and only `explain` needs it.
    """

    ignored: dict[Any, str] = dataclasses.field(default_factory=dict)
    plans: dict[str, Callable[[], AllReducePlan]] = dataclasses.field(default_factory=dict)
    # The smallest `timeout_seconds` of a collective of the step, between processes.
    timeout_seconds: float | None = None
    work: dict[tuple[str, str], tuple[tuple[str, str], ...]] = dataclasses.field(
        default_factory=dict
    )


_RECORD: ContextVar[TraceNotes | None] = ContextVar("jaxdist_told", default=None)


@contextlib.contextmanager
def collect_notes() -> Iterator[TraceNotes]:
    """Collect the notes of the block."""
    record = TraceNotes()
    with _compat.set_in_block(_RECORD, record):
        yield record


def note_ignored(sentence: str, what: Any = None) -> None:
    """Add a sentence about an option without effect to the notes of the current trace.

    Of several sentences with the same `what`, the first one is kept.
    """
    record = _RECORD.get()
    if record is not None:
        record.ignored.setdefault(sentence if what is None else what, sentence)


def note_work(line: str, facts: Callable[[], Mapping[str, str]]) -> None:
    """Note what the public call around does, and how its work is divided, for `explain`.

    Args:
        line: The line of the user's code.
        facts: Returns what it does, by name. It is called once for each line.
    """
    record = _RECORD.get()
    if record is not None:
        call = name_call(), line
        if call not in record.work:
            record.work[call] = tuple(facts().items())


def note_limit(seconds: float) -> None:
    """Note that a collective of the current trace has a time limit."""
    record = _RECORD.get()
    if record is not None:
        before = record.timeout_seconds
        record.timeout_seconds = seconds if before is None else min(before, seconds)


def note_plan(plan: Callable[[], AllReducePlan]) -> None:
    """Add the plan of a `psum` to the notes, under the line of the user's code."""
    record = _RECORD.get()
    if record is not None:
        record.plans[_compat.find_callers_line()] = plan


# JAX caches the jaxpr of a jitted or rematerialised function. Where the jaxpr depends on something
# that JAX does not see (the rows of other replicas, the value of a variable), a number in the cache
# key separates the traces.
_numbers = itertools.count()


def fresh_trace_key() -> Any:
    """Return a context in which JAX finds no jaxpr that was traced outside of it."""
    return TRACE_NUMBER(next(_numbers))


def shared_trace_key() -> Any:
    """Return a context in which JAX finds every jaxpr traced outside of `fresh_trace_key`."""
    return TRACE_NUMBER(None)


# Note [Collectives that stay apart]
# XLA combines all-reduces over equal replica groups into one. That would undo the packs and shards
# that an option asks for. jaxdist keeps them apart in two ways:
# - Packs: the operands of each all-reduce depend on the result of the one before (`order_after`).
# - Shards: each all-reduce lists the replicas of its groups from another first member (`rotate`),
#   and XLA combines only groups that are listed in the same order. This needs no dependence, so
#   shards can run at the same time.
def order_after(before: Sequence[jax.Array], operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the operands unchanged, but available only after all of `before` are computed."""
    if _compat.KEEPS_BARRIERS:
        held = jax.lax.optimization_barrier((*operands, *before))
        return list(held[: len(operands)])
    # JAX 0.10: XLA drops barriers before it combines all-reduces. So the operands depend on
    # `before` by a `where` whose condition is always False, and XLA cannot prove that.
    never = jnp.zeros((), bool)
    for total in before:
        # Without `stop_gradient`, the derivative of this step would add operations on `before`.
        never = never | _make_false(jax.lax.stop_gradient(total))
    return [jnp.where(never, jnp.zeros_like(x), x) for x in operands]


def _make_false(array: jax.Array) -> jax.Array:
    """Return False, computed from an array in a way that XLA cannot simplify."""
    if not array.size:
        return jnp.zeros((), bool)
    first = array.ravel()[0]
    if jnp.issubdtype(first.dtype, jnp.integer):
        # The remainder of a square by 4 is 0 or 1, also after overflow. XLA does not know that.
        return (first * first) % 4 == 2
    # No number is both nan and infinite.
    first = first.real
    return jnp.isnan(first) & jnp.isinf(first)


T = TypeVar("T")


def make_mark(
    name: str, transpose: Callable[..., list[Any]] = lambda cotangent, *_, **__: [cotangent]
) -> Primitive:
    """Return a primitive that marks a value in a trace, and does not change it."""
    mark = Primitive(name)
    mark.def_impl(lambda x, **_: x)
    mark.def_abstract_eval(lambda x, **_: x)
    # The compiled program does not have the mark.
    mlir.register_lowering(mark, lambda _, x, **__: [x])
    ad.deflinear2(mark, transpose)
    batching.defvectorized(mark)
    return mark


# The derivatives are the identity, without the mark. A value that is equal on all replicas may have
# tangents and cotangents that differ.
ASSUME_REPLICATED = make_mark("jaxdist_assume_replicated")
# The analysis runs after the trace is complete, so the requirement is an operation of the trace.
REQUIRE_REPLICATED = make_mark("jaxdist_require_replicated")


@called("assume_replicated")
def assume_replicated(value: T) -> T:
    """Promise that `value` is the same on all replicas, where that cannot be proved.

    `Strategy.run` then returns it as a plain array instead of a `PerReplica`. jaxdist does not
    check the promise: if the replicas differ, each keeps its own value. `check_replicas` finds such
    values. The mark is meant for operations that the analysis does not know, such as a callback or
    a custom kernel.

    Shapes:
        Unchanged.

    Cost:
        None: the compiled program does not contain the mark.

    Args:
        value: Pytree of arrays inside a replica.

    Returns:
        The same values.

    Example:
        >>> def step(x):
        ...     same = jax.pure_callback(lambda: np.float32(3), jax.ShapeDtypeStruct((), "float32"))
        ...     return assume_replicated(same)
        >>> float(MirroredStrategy().run(step, (1.0,)))
        3.0
    """

    if any(map(is_per_replica, jax.tree.leaves(value, is_leaf=is_per_replica))):
        raise refuse_type(
            f"value={show(value)}.",
            "A replica has only its own value.",
            "Pass it to the step, strategy.run(fn, args=(value,)), and mark what the step gets.",
        )
    return jax.tree.map(ASSUME_REPLICATED.bind, as_arrays("value", value))


def require_replicated(array: Any, what: str) -> jax.Array:
    """Return `array`, marked: the analysis of the step must prove it equal on all replicas.

    Args:
        array: A traced value inside a replica.
        what: A description of the value, for the error.
    """
    return REQUIRE_REPLICATED.bind(array, what=what)


# Note [One all-reduce primitive]
# An all-reduce of jaxdist may consist of many permutes, copies and barriers. It is bound as one
# call-like primitive that holds this program and its plan, for three reasons:
# - Its transpose is the same all-reduce. JAX would otherwise transpose the parts: the messages
#   would run backwards, and the gradient would have twice the code.
# - The results carry the mark of `assume_replicated`, so the replication analysis knows that they
#   are equal on all replicas. It could not prove that from permutes.
# - `explain` finds the plan in the traced program.
# A plain `psum` is not wrapped: JAX already has its rules, and the primitive takes time to trace.
Summing = Callable[[list[jax.Array]], Sequence[jax.Array]]


# Its derivative is itself: the gradient of a sum over the replicas is the sum of their gradients.
# See Note [One all-reduce primitive].
ALL_REDUCE = Primitive("jaxdist_all_reduce")
ALL_REDUCE.multiple_results = True


def bind_all_reduce(
    arrays: Sequence[jax.Array], plan: AllReducePlan, how: Summing
) -> list[jax.Array]:
    """Return `how(arrays)`, the sums over all replicas, as one primitive.

    Args:
        arrays: The values of this replica.
        plan: A description of `how`.
        how: The sum. It returns the same bits on every replica, in the shapes and dtypes of
            `arrays`. It is a parameter of the primitive, so two that do the same compare equal.
    """
    results: list[Any] = [None] * len(arrays)
    # Only floats and complex numbers have derivatives. Integers have cotangents of dtype float0,
    # which cannot be all-reduced, so they are in a primitive of their own.
    for part in (True, False):
        chosen = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact) is part]
        if chosen:
            sums = _bind([arrays[i] for i in chosen], plan, how)
            for i, total in zip(chosen, sums, strict=True):
                results[i] = total
    return results


def _bind(arrays: Sequence[Any], plan: AllReducePlan, how: Summing) -> list[Any]:
    """Trace `how`, and bind the primitive."""

    def sum_and_mark(*given: jax.Array) -> list[jax.Array]:
        return [assume_replicated(x) for x in how(list(given))]

    program = jax.make_jaxpr(sum_and_mark)(*arrays)
    return ALL_REDUCE.bind(*arrays, program=program, plan=plan, how=how)


def _evaluate(*arrays: Any, program: Any, **_: Any) -> list[Any]:
    """Run the program of the primitive."""
    return jaxpr_as_fun(program)(*arrays)


def _transpose(
    cotangents: Sequence[Any], *_: Any, plan: AllReducePlan, how: Summing, **__: Any
) -> list[Any]:
    """Return the all-reduce of the cotangents."""
    # All replicas must reach the same collective, so symbolic zeros become arrays.
    return _bind([ad.instantiate_zeros(c) for c in cotangents], plan, how)


def _batch(
    arrays: Sequence[Any], dims: Sequence[Any], program: Any, plan: AllReducePlan, how: Summing
) -> tuple[list[Any], list[int]]:
    """Return the all-reduce with the mapped dim first."""
    pairs = list(zip(arrays, dims, strict=True))
    size = next(x.shape[d] for x, d in pairs if d is not None)
    # Every operand gets the mapped dim, because one program sums all of them.
    rows = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in pairs
    ]
    return _bind(rows, plan, how), [0] * len(rows)


ALL_REDUCE.def_impl(_evaluate)
ALL_REDUCE.def_abstract_eval(lambda *_, program, **__: program.out_avals)
mlir.register_lowering(ALL_REDUCE, mlir.lower_fun(_evaluate, multiple_results=True))
ad.deflinear2(ALL_REDUCE, _transpose)
batching.primitive_batchers[ALL_REDUCE] = _batch
