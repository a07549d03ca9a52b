"""`pipeline_loss`: the loss of a stack of layers whose stages are on different devices."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdist import _compat, _pipeline, _replica
from jaxdist._called import called, refuse, refuse_type
from jaxdist._collectives import current_log, note_work
from jaxdist._validate import (
    as_flag,
    as_integer,
    format_lines,
    show,
)
from jaxdist._values import gather_whole, is_sharded
from jaxdist.errors import ShapeError
from jaxdist.nn._axis import find_axis
from jaxdist.nn._pipeline_arguments import (
    check_functions,
    check_layer,
    check_leaves,
    check_options,
)
from jaxdist.nn._pipeline_chunks import check_not_in_chunks, find_chunks
from jaxdist.nn._pipeline_facts import list_facts
from jaxdist.nn._random import example_keys
from jaxdist.nn._vocabulary_head import VocabularyHead

_STAGE = "stage"
_NAMES = ("embed", "layers", "head")


@called("nn.pipeline_loss", replaces="nn.example_keys")
def pipeline_loss(
    embed: Callable[..., Any],
    layer: Callable[..., Any],
    head: Callable[..., Any],
    parts: tuple[Any, Any, Any],
    batch: Any,
    *,
    micro_batches: int,
    axis: str = _STAGE,
    schedule: str = "1f1b",
    chunks: int | None = None,
    key: jax.Array | None = None,
    reduce: str = "mean",
    has_aux: bool = False,
) -> Any:
    """Return the loss of a model whose stacked layers are the stages of a pipeline.

    It takes the place of a loop over layers:
    `x = embed(parts[0], batch)`, `x = layer(w, x)` for each row `w` of `parts[1]`, and
    `loss = head(parts[2], x, batch)`. The rest of a step stays as it is: `jax.value_and_grad`,
    `all_reduce` of the gradients, the optimizer. The rows of a replica are divided into
    micro-batches, which run through the stages one after another.

    Without the axis (outside of steps, op by op, on a mesh without it, or with one device for each
    replica) the same micro-batches run one after another on each device, in the same order and with
    the same sums: gradient accumulation.

    Shapes:
        `batch`: arrays `[b, ...]`, where `b` is the rows of this replica. Leaves of `parts[1]`:
        `[layers, ...]`, or `[chunks, layers / chunks, ...]` (`partition.Stage`). Out: a scalar,
        and with `has_aux` arrays `[b, ...]` beside it.

    Cost:
        With S stages, M micro-batches and v chunks: `2 * (v*M + S - 1)` permutes of one activation,
        forward and backward. A device waits for `(S - 1) / (v*M)` of its useful time with `"1f1b"`
        and `"gpipe"`, and a third of it with `"zero_bubble"`. `"1f1b"` keeps what the backward
        needs of `2*S - 1` micro-batches, `"gpipe"` of all. Parameters in pieces (FSDP) are gathered
        once, before the first micro-batch, and their gradients are scattered once. `embed` and
        `head` are whole on each stage; see `nn.vocabulary_head` for a large head. With `has_aux`
        each stage keeps aux of all rows, and one all-reduce sends it from the last stage to all.

    Guarantees:
        The loss and its gradients do not depend on stages, schedule, chunks and replicas, but for
        the order of sums.

    Args:
        embed: `embed(parts[0], rows)` returns `x`, an array or a pytree, for the rows of one
            micro-batch.
        layer: `layer(w, x)` returns `x` with the same shapes and dtypes, where `w` is one layer.
            What it needs of the rows, such as a mask, is a part of `x` that it returns unchanged.
            With `key` it is `layer(w, x, keys)`. It may return `(x, loss)` with a loss of its own,
            a scalar: these are summed over layers, and their mean over micro-batches is added.
            Wrap it in `jax.checkpoint` to keep less for the backward.
        head: `head(parts[2], x, rows)` returns the loss of a micro-batch, a scalar.
        parts: Parameters of `embed`, of all layers, and of `head`. Each is a pytree, or has objects
            of Flax NNX: then the functions get such objects.
        batch: Arrays with one row for each example.
        micro_batches: The number M of micro-batches, which divides `b`.
        axis: The axis of the mesh whose devices are the stages.
        schedule: `"1f1b"`, `"gpipe"` or `"zero_bubble"`; `print(nn.schedules.zero_bubble(4, 8))`
            shows one. More chunks make `"1f1b"` and `"zero_bubble"` interleaved.
        chunks: The number v of parts of the model that each stage has. None takes it from the
            placement of the layers on the stages, and is 1 where they have none. Pass it if the
            same step also runs without the axis, or op by op.
        key: One key of the step, equal on all replicas: each layer gets a key for each row, by the
            row's position in the global batch and the number of the layer.
        reduce: `"mean"` returns the mean of the losses of micro-batches, `"sum"` their sum: for
            losses that are sums, which the step divides by a number that it knows.
        has_aux: Whether `head` returns `(loss, aux)`, as in `jax.value_and_grad`. `aux` is a pytree
            of numbers with a row for each example, such as logits or the count of right answers;
            it has no gradients.

    Returns:
        The loss of this replica, in the dtype of `head`'s, at least float32. With `has_aux`
        `(loss, aux)`, with the rows in the order of the batch.

    Raises:
        ShapeError: M does not divide the rows, a replica has other rows than another, the layers
            are not placed on the stages or do not divide over them, a layer changes `x`, or aux
            has not a row for each example.
        ArgumentError: Unknown axis, `schedule` or `reduce`, an axis of replicas, other chunks than
            those of the placement, or a function that changes NNX state, assigns a variable,
            communicates over the axis, or gathers an array in pieces that is not in `parts`. Or
            `key` is one that `nn.example_keys` refuses.
        ArgumentTypeError: A function is not callable or takes other arguments, `parts` are not
            three, or a leaf is not an array.
        UnsupportedError: The loss is differentiated twice, or aux is.

    Example:
        >>> def layer(w, x):
        ...     return x + jnp.tanh(x @ w)
        >>> def loss(params, batch):
        ...     embed, head = lambda e, rows: rows @ e, lambda h, x, rows: jnp.mean((x @ h) ** 2)
        ...     return jaxdist.nn.pipeline_loss(
        ...         embed, layer, head, params, batch, micro_batches=4)
        >>> mesh = jax.make_mesh((2, 4), ("data", "stage"))
        >>> strategy = MirroredStrategy(mesh=mesh, replica_axes=("data",))
        >>> rules = [("1", partition.Stage()), ("{0,2}", partition.Replicate())]
        >>> params = np.eye(2), np.ones((8, 2, 2)), np.ones((2, 1))
        >>> rows = jax.device_put(np.ones((8, 2)), strategy.per_replica_sharding)
        >>> placed = partition.place(strategy, params, rules)
        >>> losses = strategy.run(loss, (placed, rows))
        >>> bool(np.allclose(losses.array, loss(params, np.ones((8, 2)))))
        True

    Source:
        GPipe, arXiv:1811.06965; 1F1B, arXiv:1806.03377; interleaved, arXiv:2104.04473; zero
        bubble, arXiv:2401.10241.
    """
    check_functions(embed, layer, head, parts)
    check_options(head, schedule, reduce, has_aux=as_flag("has_aux", has_aux))
    if chunks is not None:
        as_integer("chunks", chunks, least=1)
    found = find_axis(axis, _STAGE)
    # The placement of the layers is one of the step, so JAX must not reuse the trace of another.
    _replica.find_notes()
    rows = _count_rows(batch, micro_batches)
    opened = [
        _open_part(part, fn, name)
        for part, fn, name in zip(parts, (embed, layer, head), _NAMES, strict=True)
    ]
    trees, (own_embed, own_layer, own_head) = zip(*opened, strict=True)
    for number, tree in enumerate(trees):
        check_leaves(
            f"parts[{number}]",
            tree,
            "Close over other values, or make them a part of the function.",
        )

    @functools.wraps(layer)
    def without_key(w: Any, x: Any, _: Any) -> Any:
        return own_layer(w, x)

    fns = _pipeline.StageFns(own_embed, without_key if key is None else own_layer, own_head)

    def divide(x: Any) -> Any:
        return jnp.reshape(x, (micro_batches, rows // micro_batches, *jnp.shape(x)[1:]))

    batch = jax.tree.map(divide, batch)
    keys = None if key is None else divide(example_keys(key, rows))
    check_layer(layer, has_keys=key is not None)
    if found is None:
        if chunks is None:
            check_not_in_chunks(trees[1])
        result = _pipeline.run_plain(
            fns,
            trees,
            batch,
            chunks=chunks or 1,
            keys=keys,
            reduce=reduce,
            has_aux=has_aux,
        )
        return _join_rows(result, rows) if has_aux else result
    chunks = find_chunks(trees[1], found, chunks)
    layout = found.frame.strategy.layout
    has_split_head = isinstance(head, VocabularyHead)
    line = _compat.find_line_of_model()

    def tell(table: _pipeline.Table, kept: Mapping[str, _pipeline.Kept]) -> None:
        if table.has_gradients:
            note_work(line, lambda: list_facts(schedule, table, kept, splits_head=has_split_head))

    # Gathered once for all micro-batches: a gather in each tick would send M times the bytes.
    whole = jax.tree.map(
        lambda x: gather_whole(x, layout) if is_sharded(x) else x, trees, is_leaf=is_sharded
    )
    result = _pipeline.run_pipeline(
        fns,
        whole,
        batch,
        axis=found.name,
        stages=found.size,
        schedule=schedule,
        chunks=chunks,
        keys=keys,
        reduce=reduce,
        head_specs=head.specs(whole[2], found.name) if has_split_head else None,
        # A TPU sends to the devices that a permute names, and to no other.
        permutes_meet=layout.mesh.devices.flat[0].platform != "tpu",
        has_aux=has_aux,
        told=tell,
    )
    return _join_rows(result, rows) if has_aux else result


def _join_rows(result: Any, rows: int) -> Any:
    """Return the loss, and aux with the rows of all micro-batches in one dim."""
    loss, aux = result
    return loss, jax.tree.map(lambda a: jnp.reshape(a, (rows, *a.shape[2:])), aux)


def _count_rows(batch: Any, micro_batches: int) -> int:
    """Return the number of rows of this replica, which the micro-batches divide."""
    as_integer("micro_batches", micro_batches, least=1)
    check_leaves("batch", batch, "Pass the rows as numbers, and close over other values.")
    if not jax.tree.leaves(batch):
        raise refuse_type(
            f"batch={show(batch)}, without an array.",
            "Dim 0 of each array of the batch is over the examples.",
            "Pass the rows of this replica.",
        )
    counts = {
        f"batch{jax.tree_util.keystr(path)}": jnp.shape(x)[0] if jnp.ndim(x) else -1
        for path, x in jax.tree_util.tree_flatten_with_path(batch)[0]
    }
    found = {*counts.values()}
    if len(found) != 1 or -1 in found:
        lines = [f"{name}: {'a scalar' if n < 0 else f'{n} rows'}" for name, n in counts.items()]
        raise refuse(
            f"a batch of {len(counts)} array(s) with different rows.\n{format_lines(lines)}",
            "Dim 0 of each array of the batch is over the same examples.",
            "Leave other values out of the batch: put them into parts, or close over them.",
            kind=ShapeError,
        )
    [rows] = found
    log = current_log()
    of_replicas = [rows] if log is None else log.next(rows)
    if len({*of_replicas}) > 1:
        raise refuse(
            f"batches of {list(of_replicas)} rows on the replicas.",
            "Every replica runs the same micro-batches. The last batch of a dataset may be short.",
            "Drop it (drop_remainder=True), or pad it, give the added rows the weight 0 in head, "
            'and pass reduce="sum".',
            kind=ShapeError,
        )
    if not rows or rows % micro_batches:
        divide = [n for n in range(1, rows + 1) if rows % n == 0]
        below = rows - rows % micro_batches
        near = " or ".join(str(n) for n in (below, below + micro_batches) if n)
        raise refuse(
            f"{rows} rows on this replica, and micro_batches={micro_batches}.",
            "The micro-batches have equal numbers of rows of a replica.",
            f"Pass micro_batches among {divide}, or {near} rows. "
            "Pad a short last batch, give the added rows the weight 0 in head, and pass "
            'reduce="sum".',
            kind=ShapeError,
        )
    return rows


def _open_part(part: Any, fn: Callable[..., Any], name: str) -> tuple[Any, Callable[..., Any]]:
    """Return the arrays of a part, and the function on them; objects of NNX become their state."""
    nodes = jax.tree.leaves(part, is_leaf=lambda x: isinstance(x, nnx.Pytree))
    if not any(isinstance(x, nnx.Pytree) for x in nodes):

        @functools.wraps(fn)
        def call_plain(*args: Any) -> Any:
            return _check_arrays(name, fn(*args))

        return part, call_plain
    graphdef, state = nnx.split(part)

    @functools.wraps(fn)
    def call(state: Any, *args: Any) -> Any:
        # Read before: the variables of the object are those of the state.
        before = _list_values(state)
        node = nnx.merge(graphdef, state)
        result = _check_arrays(name, fn(node, *args))
        _check_unchanged(name, before, _list_values(nnx.state(node)))
        return result

    return state, call


def _check_arrays(name: str, result: Any) -> Any:
    """Check that a function has returned arrays, and at least one; return them."""
    leaves = jax.tree.leaves(result)
    wrong = [
        x for x in leaves if not isinstance(x, (jax.Array, np.ndarray, np.generic, int, float))
    ]
    if leaves and not wrong:
        return result
    fn = name.removesuffix("s")
    rule = "the loss, a scalar" if fn == "head" else "x, an array or a pytree of arrays"
    raise refuse_type(
        f"{fn} that returns {f'a {type(wrong[0]).__name__}' if wrong else 'no array'}.",
        f"{fn} returns {rule}.",
        "Return what it computes.",
    )


def _list_values(state: Any) -> dict[str, Any]:
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in flat}


def _check_unchanged(name: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Check that a function left the state of its NNX objects as it was."""
    paths = [*before, *(path for path in after if path not in before)]
    changed = [
        path.removesuffix("/value")
        for path in paths
        if path not in before or before[path] is not after.get(path)
    ]
    if changed:
        raise refuse(
            f"a function for {name} that changes NNX state: {', '.join(changed)}.",
            "Stages run the micro-batches in another order than one device, and the forward of a "
            "micro-batch may run more than once. So the functions change nothing.",
            "Return what changes as a part of x. For dropout pass key=, and take the keys in layer "
            "instead of nnx.Rngs. For batch statistics use a norm without them.",
        )
