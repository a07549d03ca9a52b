"""Runs several micro-batches in one update, and several updates in one dispatch.

Both functions work on the local values inside a replica and need no strategy.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import keystr, tree_flatten_with_path

from jaxdist._called import called, name_call, refuse
from jaxdist._program import is_same_but_for_states
from jaxdist._typing import PyTree
from jaxdist._validate import (
    as_arrays,
    as_integer,
    check_callable,
    check_instance,
    format_lines,
    is_array,
    show,
)
from jaxdist._values import divide_parts, is_nnx_object
from jaxdist.errors import ArgumentError, ArgumentTypeError, ShapeError

S = TypeVar("S")
Out = TypeVar("Out")


@called("accumulate_gradients")
def accumulate_gradients(
    grad_fn: Callable[[Any, Any], Out], num_microbatches: int
) -> Callable[[Any, Any], Out]:
    """Return a `grad_fn` that splits its batch into micro-batches and returns the mean over them.

    Then one all-reduce of the result is enough. Memory holds the activations of only one
    micro-batch at a time.

    Shapes:
        In: every leaf of the local batch is `[b, ...]`, where `b` is a multiple of
        `num_microbatches`. `grad_fn` gets `[b / num_microbatches, ...]`.
        Out: as from `grad_fn(params, batch)`.

    Cost:
        No collective of its own. One `lax.scan`; `grad_fn` is traced twice and compiled once.
        16-bit outputs are summed in float32.

    Guarantees:
        If `grad_fn` is a mean over its rows, the result is the mean over all rows.
        State of a Flax NNX module that `grad_fn` changes (BatchNorm statistics) is carried from
        one micro-batch to the next, and the module holds it afterwards.

    Args:
        grad_fn: `(params, batch) -> ` pytree of floats, such as `jax.value_and_grad(loss_fn)`
            or, if `params` is a Flax NNX module, `nnx.value_and_grad(loss_fn)`.
        num_microbatches: The number of micro-batches.

    Returns:
        A function like `grad_fn`.

    Raises:
        ArgumentError: `num_microbatches` is not a positive integer.
        ShapeError: In a call: a leaf of the batch is a scalar or cannot be divided; `grad_fn`
            changes shapes or dtypes in the state of an NNX module.
        ArgumentTypeError: In a call: an output of `grad_fn` is not a float, so it has no mean; a
            leaf of `params` or of the batch is not an array.

    Example:
        >>> grads = jax.value_and_grad(lambda w, x: jnp.mean(w * x))
        >>> loss, grad = accumulate_gradients(grads, 4)(2.0, jnp.arange(8.0))
        >>> float(loss), float(grad)
        (7.0, 3.5)

    Source:
        Replaces manual gradient accumulation in `tf.distribute` training loops.
        `optax.MultiSteps` accumulates over calls instead, with an all-reduce in each.
    """
    check_callable(grad_fn, "grad_fn")
    remedy = "Pass the number of pieces that each replica's batch is cut into, for instance 4."
    count = as_integer(
        "num_microbatches", num_microbatches, least=1, remedy=remedy, wrong_type=ArgumentError
    )

    @called("accumulate_gradients")
    def accumulated(params: Any, batch: Any) -> Out:
        microbatches = _split_batch(batch, count)
        graph, carried = _split_modules(params)
        _check_given("params", carried)

        @called("accumulate_gradients")
        def call(carried: Any, microbatch: Any) -> tuple[Any, Any]:
            # Flatten before the call: `grad_fn` may update the module in place.
            given = tree_flatten_with_path(carried)
            joined = _merge_modules(graph, carried)
            out = _check_gradients(grad_fn(joined, microbatch))
            kept = _split_modules(joined)[1]
            _check_state_form("grad_fn", given, kept)
            return kept, out

        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), microbatches)
        # The carry of the scan needs the dtypes of the outputs before the scan is traced.
        _, outputs = jax.eval_shape(call, carried, first)
        _check_floats(outputs)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, _get_sum_dtype(x.dtype)), outputs)

        def add(carry: tuple[Any, Any], microbatch: Any) -> tuple[tuple[Any, Any], None]:
            carried, out = call(carry[0], microbatch)
            total = jax.tree.map(lambda t, o: t + jnp.asarray(o, t.dtype), carry[1], out)
            return (carried, total), None

        (carried, total), _ = jax.lax.scan(add, (carried, zeros), microbatches)
        _write_back(params, graph, carried)
        # Not by shares, as means over replicas are: the warning of uneven rows knows those by them.
        return jax.tree.map(lambda t, o: divide_parts(t, count).astype(o.dtype), total, outputs)

    return accumulated


@called("multi_step")
def multi_step(
    step_fn: Callable[[S, Any], tuple[S, Out]],
) -> Callable[[S, Sequence[Any]], tuple[S, Out]]:
    """Return a step that takes K batches and runs `step_fn` on each, in one dispatch.

    Shapes:
        In: K batches of one structure, with equally shaped leaves `[b, ...]`.
        Out: every leaf of the second result of `step_fn`, stacked: `[K, ...]`.

    Cost:
        One dispatch instead of K, and one copy of the batches to stack them. `step_fn` is traced
        and compiled once for each K.

    Args:
        step_fn: `(state, batch) -> (state, out)`. The state may be or contain Flax NNX modules
            and optimizers that the step updates in place.

    Returns:
        `(state, batches) -> (state, stacked outs)`. NNX state is also updated in place.

    Raises:
        ArgumentTypeError: In a call: `batches` is not a list or tuple; `step_fn` does not return
            a pair; a leaf of the state, of a batch or of a result is not an array.
        ArgumentError: In a call: `batches` is empty.
        ShapeError: In a call: batches differ in structure, or in the shape or dtype of a leaf;
            `step_fn` changes shapes or dtypes of the state.

    Example:
        >>> add = multi_step(lambda total, x: (total + x.sum(), total))
        >>> total, seen = add(jnp.float32(0), [jnp.ones(2), jnp.ones(2), jnp.ones(2)])
        >>> float(total), seen.tolist()
        (6.0, [0.0, 2.0, 4.0])

    Source:
        `steps_per_execution` of Keras and `tf.function` loops over `strategy.run`.
    """

    check_callable(step_fn, "step_fn")

    @called("multi_step")
    def steps(state: S, batches: Sequence[Any]) -> tuple[S, Out]:
        batches = _check_batches(batches)
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *batches)  # [step, row, ...]

        @called("multi_step")
        def run_one(carried: Any, batch: Any) -> tuple[Any, Out]:
            # Flatten before the call: a merged module writes into the state it was merged from.
            given = tree_flatten_with_path(carried)
            after, out = _check_pair(step_fn(_merge_modules(graph, carried), batch))
            kept = _keep_containers(graph, given, _split_modules(after)[1])
            _check_returned("step_fn", (kept, out))
            _check_state_form("step_fn", given, kept)
            return kept, out

        graph, carried = _split_modules(state)
        _check_given("state", carried)
        carried, outs = jax.lax.scan(run_one, carried, stacked)
        return _write_back(state, graph, carried), outs

    return steps


# Note [Modules in a scan]
# `lax.scan` carries only arrays. So the state of Flax NNX modules is split off before the scan,
# carried as arrays, merged into a temporary module in each iteration, and written back into the
# caller's module after the scan. `nnx.scan` would need to know which arguments are modules, and
# these functions accept any pytree.


def _split_modules(tree: PyTree) -> tuple[Any, Any]:
    """Return the graph of the modules in `tree`, and the values that a scan can carry.

    See Note [Modules in a scan]. The graph is None if `tree` has no modules.
    """
    if not any(map(is_nnx_object, jax.tree.leaves(tree, is_leaf=is_nnx_object))):
        return None, tree
    return nnx.split(tree)


def _keep_containers(graph: Any, before: tuple[Any, Any], after: Any) -> Any:
    """Return a state with the lists and dicts that it had before the step.

    `nnx.Optimizer.update` replaces the containers in its variables by an `nnx.State`.
    """
    if graph is None or not isinstance(after, nnx.State):
        return after
    leaves, structure = jax.tree.flatten(after)
    is_same = is_same_but_for_states(before[1], structure, leaves)
    return jax.tree.unflatten(before[1], leaves) if is_same else after


def _merge_modules(graph: Any, carried: Any) -> Any:
    return carried if graph is None else nnx.merge(graph, carried)


def _write_back(tree: PyTree, graph: Any, carried: Any) -> Any:
    """Return `tree` with its own modules, updated in place, and with new values elsewhere."""
    if graph is None:
        return carried
    nnx.update(tree, carried)
    after = nnx.merge(graph, carried)
    return jax.tree.map(
        lambda old, new: old if is_nnx_object(old) else new, tree, after, is_leaf=is_nnx_object
    )


# Checks


@called("accumulate_gradients")
def _split_batch(batch: PyTree, count: int) -> PyTree:
    leaves, treedef = tree_flatten_with_path(as_arrays("batch", batch))
    bad = [
        f"batch{keystr(path)} is {_describe(leaf)}: {_explain_remainder(leaf, count)}"
        for path, leaf in leaves
        if not _is_divisible(leaf, count)
    ]
    if bad or not leaves:
        found = format_lines(bad) if leaves else "The batch has no arrays."
        raise refuse(
            f"num_microbatches={count}, which does not divide the batch.\n{found}",
            "Inside a replica a batch has the rows of that replica, and their number must be a "
            f"multiple of {count}.",
            _suggest_counts(leaves),
            kind=ShapeError,
        )
    cut = [jnp.reshape(x, (count, x.shape[0] // count, *x.shape[1:])) for _, x in leaves]
    return jax.tree.unflatten(treedef, cut)  # [microbatch, row, ...]


def _is_divisible(leaf: Any, count: int) -> bool:
    shape = jnp.shape(leaf)
    # 0 rows are valid: a replica may have no rows, and then each micro-batch has none.
    return bool(shape) and shape[0] % count == 0


def _suggest_counts(leaves: Sequence[tuple[Any, Any]]) -> str:
    """Return the remedy: numbers of micro-batches that divide all leaves."""
    shapes = [jnp.shape(leaf) for _, leaf in leaves]
    if not shapes or not all(shapes):
        return "Pass a batch in which every leaf has rows."
    rows = math.gcd(*(shape[0] for shape in shapes))
    counts = [n for n in range(1, rows + 1) if rows % n == 0][:8]
    if not counts:
        return "Pass a batch with rows."
    return f"Pass num_microbatches={' or '.join(map(str, counts))}, or another global batch."


def _explain_remainder(leaf: Any, count: int) -> str:
    shape = jnp.shape(leaf)
    if not shape:
        return "a scalar has no rows to cut."
    rows = shape[0]
    low, high = rows - rows % count, rows + (-rows) % count
    either = f"drop {rows - low} row(s) to get {low}, or " if low else ""
    return (
        f"{rows} rows are not a multiple of {count}; {either}"
        f"pad with {max(high, count) - rows} to get {max(high, count)}."
    )


@called("accumulate_gradients")
def _check_gradients(out: Any) -> Any:
    _check_returned("grad_fn", out)
    if not jax.tree.leaves(out):
        raise ArgumentTypeError(
            f"accumulate_gradients called grad_fn, and it returned {show(out)}, without arrays.\n\n"
            "It takes the mean of what grad_fn returns; a function without a return statement "
            "returns None.\n\nReturn the gradients from grad_fn."
        )
    return out


def _check_floats(outputs: PyTree) -> None:
    bad = [
        f"result{keystr(path)} is {_describe(leaf)}"
        for path, leaf in jax.tree.leaves_with_path(outputs)
        if not jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    if bad:
        raise ArgumentTypeError(
            "accumulate_gradients called grad_fn, and some of its results are not floats:\n"
            f"{format_lines(bad)}\n\n"
            "It takes the mean of the results, and a mean is a float.\n\n"
            "Return it as a float, for instance count.astype(jnp.float32), or leave it out."
        )


def _check_given(name: str, tree: PyTree) -> None:
    caller = name_call()
    remedy = f"Leave it out of {name}, and use it in the function from outside."
    _check_arrays(f"{caller} was given {name} with a leaf that is not an array", name, tree, remedy)


def _check_returned(name: str, tree: PyTree) -> None:
    caller = name_call()
    found = f"{caller} called {name}, and it returned a leaf that is not an array"
    _check_arrays(found, "result", tree, f"Return arrays from {name}.")


def _check_arrays(found: str, name: str, tree: PyTree, remedy: str) -> None:
    leaves = jax.tree.leaves_with_path(tree)
    wrong = [f"{name}{keystr(path)}: {show(x)}" for path, x in leaves if not is_array(x)]
    if wrong:
        raise ArgumentTypeError(
            f"{found}:\n{format_lines(wrong)}\n\nEach leaf is an array or a number.\n\n{remedy}"
        )


def _check_state_form(name: str, before: tuple[Any, Any], after: PyTree) -> None:
    """Check that a call returned state of the form that the next call needs.

    `before` is the state before the call, flattened with paths.
    """
    # JAX would also raise here, but its error names the carry of a scan that the user did not
    # write.
    given, treedef = before
    if jax.tree.structure(after) != treedef:
        raise ShapeError(
            f"{name_call()} called {name}, and the state that it returned has a different "
            "structure.\n"
            f"Before: {treedef}\nAfter: {jax.tree.structure(after)}\n\n"
            "Each call takes the state that the previous call returned.\n\n"
            f"Return it from {name} with the same keys and the same number of leaves."
        )
    changed = [
        f"state{keystr(path)} was {_describe(x)}, and is {_describe(y)} after the call"
        for (path, x), y in zip(given, jax.tree.leaves(after), strict=True)
        if jnp.shape(x) != jnp.shape(y) or (_describe(x) != _describe(y) and not _is_weak(x))
    ]
    if changed:
        raise ShapeError(
            f"{name_call()} called {name}, and the state that it returned has different shapes or "
            "dtypes.\n"
            f"{format_lines(changed)}\n\n"
            "Each call takes the state that the previous call returned.\n\n"
            "Keep the shapes, and the dtypes: new.astype(old.dtype)."
        )


def _is_weak(x: Any) -> bool:
    # A Python number takes the dtype of the array that it is added to, so its dtype may change.
    return bool(getattr(jax.typeof(x), "weak_type", False))


def _check_pair(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise ArgumentTypeError(
            f"multi_step called step_fn, and it returned {show(result)}.\n\n"
            "step_fn is (state, batch) -> (state, out).\n\n"
            "Return two values; out may be None: return state, None."
        )
    return result


@called("multi_step")
def _check_batches(batches: Any) -> list[PyTree]:
    what = "a list or tuple of batches, one for each step"
    remedy = "Collect K of them: list(itertools.islice(data, K))."
    check_instance("batches", batches, (list, tuple), what, remedy)
    if not batches:
        raise refuse(
            f"batches={batches!r}, which is empty.",
            "batches has one batch for each step.",
            "Pass at least one batch.",
        )
    batches = [as_arrays(f"batches[{i}]", one) for i, one in enumerate(batches)]
    first, treedef = tree_flatten_with_path(batches[0])
    bad: list[str] = []
    for i, batch in enumerate(batches[1:], 1):
        if jax.tree.structure(batch) != treedef:
            bad.append(f"batches[{i}] is {jax.tree.structure(batch)}, batches[0] is {treedef}")
            continue
        bad += [
            f"batches[{i}]{keystr(path)} is {_describe(x)}, in batches[0] it is {_describe(y)}"
            for (path, y), x in zip(first, jax.tree.leaves(batch), strict=True)
            if _describe(x) != _describe(y)
        ]
    if bad:
        raise ShapeError(
            f"multi_step cannot stack its {len(batches)} batches: they differ.\n"
            f"{format_lines(bad)}\n\n"
            "All batches of a call have the same structure, shapes and dtypes.\n\n"
            "Drop the short one, or pad it and give each row a weight."
        )
    return batches


def _describe(leaf: Any) -> str:
    dtype = leaf.dtype if isinstance(leaf, jax.Array) else jnp.result_type(leaf)
    return f"{dtype}{list(jnp.shape(leaf))}"


def _get_sum_dtype(dtype: Any) -> Any:
    # A sum of many small bfloat16 gradients would lose the bits of the small ones.
    return jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype
