"""Functions and arguments that a pipeline refuses, before anything runs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist import errors
from jaxdist._pipeline import StageFns, run_pipeline, run_plain
from tests.pipeline.models import (
    FNS,
    embed,
    head,
    layer,
    make_batch,
    make_parts,
    on_stages,
    run_on_stages,
)

BATCH = make_batch(4, 2)


def _refused(fns: StageFns, kind: type[errors.JaxdistError], text: str) -> None:
    """Both paths refuse a model, with the same text."""
    with pytest.raises(kind, match=text):
        run_on_stages(fns, make_parts(4), BATCH)
    with pytest.raises(kind, match=text):
        run_plain(fns, make_parts(4), BATCH)


def test_a_layer_that_changes_x_is_refused_with_both_shapes() -> None:
    def wide(w: Any, x: Any, keys: Any) -> Any:
        return x @ w["up"]

    def narrow(w: Any, x: Any, keys: Any) -> Any:
        return x.astype(jnp.bfloat16)

    def renamed(w: Any, x: Any, keys: Any) -> Any:
        return {"y": x}

    found = r"wide\) that makes float32\[2, 4, 32\] of float32\[2, 4, 16\]"
    _refused(StageFns(embed, wide, head), errors.ShapeError, found)
    found = r"narrow\) that makes bfloat16\[.*\] of float32.*\n\n.*\n\nReturn y.astype\(x.dtype\)"
    _refused(StageFns(embed, narrow, head), errors.ShapeError, found)
    found = r"renamed\) that makes \{y: float32\[2, 4, 16\]\} of float32"
    _refused(StageFns(embed, renamed, head), errors.ShapeError, found)


def test_a_loss_that_is_not_one_number_is_refused() -> None:
    found = r"a head \(.*\) with the loss float32\[2, 4, 32\]"
    _refused(StageFns(embed, layer, lambda h, x, one: x @ h), errors.ShapeError, found)
    found = r"a head \(.*\) with the loss int32\[\]"
    _refused(StageFns(embed, layer, lambda h, x, one: jnp.int32(1)), errors.ShapeError, found)
    found = r"a layer \(.*\) with the loss float32\[2\]"
    fns = StageFns(embed, lambda w, x, keys: (x, jnp.ones(2)), head)
    _refused(fns, errors.ShapeError, found)


def _send(x: Any) -> Any:
    return jax.lax.ppermute(x, "stage", [(0, 1), (1, 0)])


@pytest.mark.parametrize(
    ("fns", "text"),
    [
        (
            StageFns(embed, jax.jit(lambda w, x, keys: jax.lax.psum(x, "stage")), head),
            "a layer .* that calls psum",
        ),
        (
            StageFns(lambda e, one: jax.checkpoint(_send)(embed(e, one)), layer, head),
            "an embed .* that calls ppermute",
        ),
        (
            StageFns(
                embed,
                layer,
                lambda h, x, one: jax.lax.cond(
                    x.sum() > 0, lambda: jax.lax.pmax(x, "stage").sum(), lambda: 0.0
                ),
            ),
            "a head .* that calls pmax",
        ),
        (
            StageFns(embed, lambda w, x, keys: x + jax.lax.axis_index("stage"), head),
            "a layer .* that calls axis_index",
        ),
    ],
    ids=["layer", "embed", "head", "place"],
)
def test_functions_that_use_the_axis_of_the_stages_are_refused(fns: StageFns, text: str) -> None:
    with pytest.raises(errors.ArgumentError, match=f"{text} over the axis 'stage'"):
        run_on_stages(fns, make_parts(4), BATCH)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda parts, batch: ((*parts, 1), batch), "parts with 4 elements"),
        (
            lambda parts, batch: (make_parts(6), batch),
            r"6 layers for 4 pieces.*\n\n.*\n\nUse 4 or 8 layers",
        ),
        (lambda parts, batch: (make_parts(3), batch), r"3 layers.*\n\n.*\n\nUse 4 layers"),
        (
            lambda parts, batch: ((parts[0], {"a": np.ones(4), "b": np.ones(8)}, parts[2]), batch),
            r"parts\[1\]\['a'\]: \[4\], parts\[1\]\['b'\]: \[8\]",
        ),
        (lambda parts, batch: ((parts[0], {}, parts[2]), batch), "those of no array"),
        (
            lambda parts, batch: (parts, {**batch, "labels": batch["labels"][:3]}),
            r"a batch whose leading dims are \[\[3\], \[4\]\]",
        ),
        (lambda parts, batch: (parts, {}), "a batch whose leading dims are"),
        (
            lambda parts, batch: (parts, jax.tree.map(lambda a: a[:0], batch)),
            r"a batch whose leading dims are \[\[0\]\]",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    change: Callable[[Any, Any], tuple[Any, Any]], text: str
) -> None:
    parts, batch = change(make_parts(4), BATCH)
    with pytest.raises(errors.InvalidArgumentError, match=text):
        run_on_stages(FNS, parts, batch, stages=4)


def test_stacks_of_chunks_have_a_dim_for_them() -> None:
    with pytest.raises(errors.ShapeError, match=r"a stack \[2, layers / 2, ...\]"):
        run_plain(FNS, make_parts(4), BATCH, chunks=2)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(errors.ArgumentError, match=r"schedule='1f1'.*\n\n.*\n\n.*'1f1b'"):
        run_on_stages(FNS, make_parts(4), BATCH, schedule="1f1")
    with pytest.raises(errors.ArgumentError, match="reduce='max'"):
        run_on_stages(FNS, make_parts(4), BATCH, reduce="max")
    with pytest.raises(errors.ArgumentError, match="reduce='max'"):
        run_plain(FNS, make_parts(4), BATCH, reduce="max")


def test_second_derivatives_are_refused() -> None:
    parts = make_parts(4)

    def size_of_gradient(loss_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda h: jnp.sum(jax.grad(loss_of)(h) ** 2)

    def on_pipeline(h: Any) -> Any:
        return run_pipeline(FNS, (*parts[:2], h), BATCH, axis="stage", stages=2)

    def on_one_device(h: Any) -> Any:
        return run_plain(FNS, (*parts[:2], h), BATCH)

    with pytest.raises(errors.UnsupportedError, match="differentiated twice"):
        on_stages(jax.grad(size_of_gradient(on_pipeline)), parts[2])
    for twice in (jax.grad, jax.jacfwd):
        with pytest.raises(errors.UnsupportedError, match="differentiated twice"):
            twice(size_of_gradient(on_one_device))(parts[2])
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(on_one_device, (parts[2],), (parts[2],))
