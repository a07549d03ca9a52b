"""Unusual arguments of pipelines: keys, losses of layers, dtypes, frozen and shared arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxdist._pipeline import (
    StageFns,
    run_pipeline,
    run_plain,
    vocabulary_loss,
)
from tests.pipeline.models import (
    FNS,
    LENGTH,
    WIDTH,
    chunked,
    difference,
    embed,
    head,
    layer,
    loop_loss,
    make_batch,
    make_parts,
    on_stages,
    run_on_stages,
)

MICRO_BATCHES, ROWS = 4, 2
BATCH = make_batch(MICRO_BATCHES, ROWS)
EACH = pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("1f1b", 1), ("zero_bubble", 2), pytest.param("zero_bubble", 1, marks=pytest.mark.long)],
)


def _clean(tree: Any) -> Any:
    """Zeros for the gradients of integers, which have no values."""
    zero = np.zeros(())
    return jax.tree.map(lambda a: zero if a.dtype == jax.dtypes.float0 else a, tree)


def _check(
    fns: StageFns,
    schedule: str,
    chunks: int,
    *,
    parts: Any = None,
    most: float = 1e-6,
    reduce: str = "mean",
    keys: Any = None,
    **options: Any,
) -> None:
    """The loop, the plain path and the pipeline have the same loss and gradients."""
    parts = make_parts(4) if parts is None else parts

    def loop(parts: Any) -> Any:
        return loop_loss(fns, jax.tree.map(jnp.asarray, parts), BATCH, keys, reduce)

    def plain(parts: Any) -> Any:
        return run_plain(fns, parts, BATCH, keys=keys, reduce=reduce)

    wanted, on_one = (_clean(jax.value_and_grad(f, allow_int=True)(parts)) for f in (loop, plain))
    found, alone = run_on_stages(
        fns,
        chunked(parts, chunks),
        BATCH,
        schedule=schedule,
        chunks=chunks,
        keys=keys,
        reduce=reduce,
        **options,
    )
    found = jax.tree.map(lambda a, b: a.reshape(b.shape), _clean(found), on_one)
    assert difference(found, on_one) < min(most, 1e-6)
    assert difference(on_one, wanted) < most
    np.testing.assert_allclose(alone, on_one[0], rtol=1e-6)


def _drop(w: Any, x: Any, keys: Any) -> Any:
    kept = jax.vmap(lambda key, x: jax.random.bernoulli(key, 0.5, x.shape))(keys, x)
    return x + jnp.where(kept, jnp.tanh(x @ w["up"]) @ w["down"], 0)


@EACH
@pytest.mark.parametrize(
    ("make", "wrap"),
    [(jax.random.key, jax.checkpoint), (jax.random.PRNGKey, lambda f: f)],
    ids=["typed_remat", "raw"],
)
def test_dropout_depends_on_the_row_and_the_layer_only(
    schedule: str, chunks: int, make: Callable[[int], Any], wrap: Callable[[Any], Any]
) -> None:
    keys = jax.random.split(make(0), (MICRO_BATCHES, ROWS))
    _check(StageFns(embed, wrap(_drop), head), schedule, chunks, keys=keys)


@EACH
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_losses_of_layers_are_summed_over_layers_and_a_mean_over_micro_batches(
    schedule: str, chunks: int, reduce: str
) -> None:
    def with_loss(w: Any, x: Any, keys: Any) -> Any:
        y = layer(w, x, keys)
        return y, jnp.mean(y**2)

    _check(StageFns(embed, with_loss, head), schedule, chunks, reduce=reduce)


@EACH
def test_integers_and_unused_parameters_have_no_gradients(schedule: str, chunks: int) -> None:
    e, w, h = make_parts(4)
    parts = (
        {**e, "scale": np.int32(3)},
        {**w, "is_on": np.array([1, 0, 1, 1]), "unused": np.ones((4, 3), np.float32)},
        {"matrix": h, "bias": np.arange(3), "unused": np.ones(2, np.float32)},
    )
    fns = StageFns(
        lambda e, one: embed(e, one) * e["scale"],
        lambda w, x, keys: jnp.where(w["is_on"] == 1, layer(w, x, keys), x),
        lambda h, x, one: head(h["matrix"], x, one) + h["bias"][1],
    )
    _check(fns, schedule, chunks, parts=parts)


def _embed_tree(e: Any, one: Any) -> Any:
    x = embed(e, one)
    narrow = jnp.ones(2, jnp.bfloat16)
    keys = jax.random.split(jax.random.key(1), 2)
    mask = one["labels"] > 5
    return {"x": x, "place": one["tokens"], "mask": mask, "narrow": (narrow,), "keys": keys}


def _layer_of_tree(w: Any, x: Any, keys: Any) -> Any:
    y = jnp.where(x["mask"][..., None], layer(w, x["x"], keys), x["x"])
    return {**x, "x": y, "place": x["place"] + 1}


@EACH
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_x_may_be_a_tree_with_integers_masks_and_keys(
    schedule: str, chunks: int, is_split: bool
) -> None:
    def head_of_tree(h: Any, x: Any, one: Any) -> Any:
        loss = vocabulary_loss(h, x["x"], one["labels"]) + 1e-2 * jnp.mean(x["place"])
        loss += jax.random.uniform(x["keys"][1])
        return loss + jnp.sum(x["narrow"][0].astype(jnp.float32)) + jnp.mean(x["mask"])

    fns = StageFns(_embed_tree, _layer_of_tree, head_of_tree)
    specs = PartitionSpec(None, "stage") if is_split else None
    _check(fns, schedule, chunks, head_specs=specs)


@EACH
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_of_narrow_parameters_are_summed_in_float32(
    schedule: str, chunks: int, dtype: Any
) -> None:
    parts = jax.tree.map(lambda a: a.astype(dtype), make_parts(4))
    _check(FNS, schedule, chunks, parts=parts, most=2e-2)


@EACH
def test_a_number_of_python_keeps_narrow_activations(schedule: str, chunks: int) -> None:
    e, w, h = make_parts(4)
    fns = StageFns(
        lambda e, one: embed(e, one).astype(jnp.bfloat16) * e["scale"],
        lambda w, x, keys: layer(w, x.astype(jnp.float32), keys).astype(jnp.bfloat16),
        lambda h, x, one: head(h[0], (x * h[1]).astype(jnp.float32), one),
    )
    x, scale = jnp.ones(2, jnp.bfloat16), 1.5
    assert (x * scale).dtype == x.dtype
    _check(fns, schedule, chunks, parts=({**e, "scale": scale}, w, (h, 1.25)), most=2e-2)


def test_many_small_gradients_are_not_lost_in_bfloat16() -> None:
    parts = 1.0, {"w": jnp.ones(4, jnp.bfloat16)}, jnp.ones((), jnp.bfloat16)
    fns = StageFns(lambda e, one: e * one, lambda w, x, keys: x, lambda h, x, one: (h * x).mean())
    batch = jnp.asarray([[1.0]] + [[1e-3]] * 999, jnp.bfloat16)
    grads = jax.grad(lambda parts: run_plain(fns, parts, batch, reduce="sum"))(parts)
    assert grads[2].dtype == jnp.bfloat16
    np.testing.assert_allclose([float(grads[2]), grads[0]], 2.0, rtol=1e-2)


@EACH
def test_rows_that_are_differentiated_have_their_gradients(schedule: str, chunks: int) -> None:
    noise = np.linspace(0.5, 1.5, MICRO_BATCHES * ROWS * LENGTH * WIDTH, dtype=np.float32)
    noise = noise.reshape(MICRO_BATCHES, ROWS, LENGTH, WIDTH)
    fns = StageFns(
        lambda e, one: embed(e, one) * one["noise"],
        layer,
        lambda h, x, one: head(h, x, one) + jnp.mean(x * one["noise"]),
    )
    parts = make_parts(4)

    def differentiate(run: Callable[..., Any], parts: Any, noise: Any) -> Any:
        def loss_of(noise: Any) -> Any:
            return run(fns, parts, {**BATCH, "noise": noise})

        return jax.grad(loss_of)(noise)

    def on_pipeline(*args: Any) -> Any:
        return run_pipeline(*args, axis="stage", stages=2, schedule=schedule, chunks=chunks)

    wanted = differentiate(loop_loss, jax.tree.map(jnp.asarray, parts), noise)
    assert difference(differentiate(run_plain, parts, noise), wanted) < 1e-6
    parts = chunked(parts, chunks)
    found = on_stages(lambda noise: differentiate(on_pipeline, parts, noise), noise)
    assert difference(found, wanted) < 1e-6


@EACH
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "remat"])
def test_arrays_around_the_functions_have_their_gradients(
    schedule: str, chunks: int, wrap: Callable[..., Any]
) -> None:
    def differentiate(run: Callable[..., Any], parts: Any, scale: Any) -> Any:
        def loss_of(scale: Any) -> Any:
            fns = StageFns(
                lambda e, one: embed(e, one) * scale,
                lambda w, x, keys: x + jnp.tanh(x @ w["up"] * scale) @ w["down"],
                lambda h, x, one: head(h, x * scale, one),
            )
            return run(fns, parts, BATCH)

        return jax.grad(wrap(loss_of))(scale)

    def on_pipeline(*args: Any) -> Any:
        return run_pipeline(*args, axis="stage", stages=2, schedule=schedule, chunks=chunks)

    parts, scale = make_parts(4), np.float32(1.5)
    wanted = differentiate(loop_loss, jax.tree.map(jnp.asarray, parts), scale)
    assert difference(differentiate(run_plain, parts, scale), wanted) < 1e-6
    parts = chunked(parts, chunks)
    found = on_stages(lambda scale: differentiate(on_pipeline, parts, scale), scale)
    assert difference(found, wanted) < 1e-6


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_frozen_part_changes_no_gradient_of_the_others(schedule: str) -> None:
    parts = make_parts(4)
    wanted = jax.grad(lambda p: run_plain(FNS, p, BATCH))(parts)

    def one_of(n: int, part: Any) -> Any:
        def loss_of(part: Any) -> Any:
            mixed = (*parts[:n], part, *parts[n + 1 :])
            return run_pipeline(FNS, mixed, BATCH, axis="stage", stages=2, schedule=schedule)

        return jax.grad(loss_of)(part)

    for n in range(3):
        found = on_stages(lambda part, n=n: one_of(n, part), parts[n])
        assert difference(found, wanted[n]) < 1e-6


@EACH
def test_x_may_be_complex(schedule: str, chunks: int) -> None:
    fns = StageFns(
        lambda e, one: embed(e, one).astype(jnp.complex64) * (1 + 0.5j),
        lambda w, x, keys: x + jnp.tanh(x @ w["up"]) @ w["down"] * 1j,
        lambda h, x, one: head(h, jnp.abs(x), one),
    )
    _check(fns, schedule, chunks)


def measure(parts: Any, batch: Any, *, stages: int = 4, **options: Any) -> Any:
    """What a stage keeps for gradients, from a trace."""
    found = []
    mesh = AbstractMesh((stages,), ("stage",), axis_types=(AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(
            jax.grad(
                lambda parts, batch: run_pipeline(
                    FNS,
                    parts,
                    batch,
                    axis="stage",
                    stages=stages,
                    told=lambda _, kept: found.append(kept),
                    **options,
                )
            ),
            parts,
            batch,
        )
    [kept] = found
    return kept


def test_what_a_stage_keeps_is_known_without_running() -> None:
    def aval(a: Any) -> Any:
        return jax.ShapeDtypeStruct(a.shape, a.dtype)

    parts, batch = jax.tree.map(aval, (make_parts(8), make_batch(16, 2)))
    kept = measure(parts, batch, schedule="zero_bubble")
    x = 2 * LENGTH * WIDTH * 4
    # A cotangent for x, and one for twice the width; of each of the two layers of a stage.
    assert kept["deferred"] == (7, 7 * 2 * 3 * x)
    assert kept["inputs"] == (1, 2 * x), "with the slot for what nobody needs"
    assert kept["cotangents"] == (1, 2 * x)
    # x, tanh and its derivative.
    assert kept["residuals"] == (10, 10 * 2 * 5 * x)
    other = measure(chunked(make_parts(8), 2), make_batch(16, 2), schedule="1f1b", chunks=2)
    assert other["residuals"] == (11, 11 * 5 * x)
    assert other["deferred"] == (0, 0)


@EACH
def test_zeros_in_idle_slots_make_no_nan(schedule: str, chunks: int) -> None:
    fns = StageFns(
        lambda e, one: embed(e, one) + 3,
        lambda w, x, keys: jnp.log(jnp.abs(x)) + layer(w, x, keys),
        lambda h, x, one: head(h, 1e-2 / x, one),
    )
    _check(fns, schedule, chunks)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_vmap_around_a_pipeline_is_right(schedule: str) -> None:
    parts = make_parts(4)
    heads = jnp.stack([parts[2], -parts[2]])

    def run(h: Any) -> Any:
        return run_pipeline(FNS, (*parts[:2], h), BATCH, axis="stage", stages=2, schedule=schedule)

    def plain(h: Any) -> Any:
        return run_plain(FNS, (*parts[:2], h), BATCH)

    found = on_stages(jax.vmap(jax.value_and_grad(run)), heads)
    wanted = [jax.value_and_grad(plain)(h) for h in heads]
    assert difference(found, jax.tree.map(lambda *a: jnp.stack(a), *wanted)) < 1e-6
