"""What the head of a pipeline returns beside the loss: a row for each example, as on one device."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxdist
from jaxdist import nn, partition
from jaxdist.errors import ArgumentError, ArgumentTypeError, ShapeError, UnsupportedError
from jaxdist.partition import Replicate, Rules, Stage
from tests.nn.pipelines import (
    ROWS,
    embed,
    head,
    largest_difference,
    layer,
    make_batch,
    make_params,
    one_device,
    pipeline,
    strategy_of,
    to_numpy,
)


def head_with_aux(h: Any, x: Any, rows: Any) -> Any:
    """The loss, and of each row: the losses, how many words are right, and whether all are."""
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ h, rows["labels"])
    right = (x @ h).argmax(-1) == rows["labels"]
    return losses.mean(), {"losses": losses, "right": right.sum(-1), "all": right.all(-1)}


def loop_aux(params: Any, batch: Any) -> Any:
    x = embed(params["embed"], batch)
    for n in range(len(params["layers"]["up"])):
        x = layer(jax.tree.map(lambda w, n=n: w[n], params["layers"]), x)
    return head_with_aux(params["head"], x, batch)


def step_of(loss: Any, has_gradients: bool = True) -> Any:
    def step(params: Any, batch: Any) -> Any:
        if not has_gradients:
            value, aux = loss(params, batch)
            return jaxdist.get_replica_context().all_reduce("mean", value), aux, ()
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        value, grads = jaxdist.get_replica_context().all_reduce("mean", (value, grads))
        return value, aux, grads

    return step


def with_aux(micro_batches: int, **options: Any) -> Any:
    return pipeline(micro_batches, **{"head": head_with_aux, "has_aux": True, **options})


@pytest.mark.parametrize(
    ("shape", "chunks", "options"),
    [
        ({"data": 2, "stage": 4}, 1, {}),
        ({"data": 2, "stage": 4}, 1, {"schedule": "gpipe"}),
        ({"data": 2, "stage": 2}, 2, {"schedule": "zero_bubble"}),
        ({"data": 2, "stage": 2, "model": 2}, 1, {}),
        ({"data": 4}, 1, {}),
    ],
)
@pytest.mark.parametrize("has_gradients", [True, False])
def test_rows_and_gradients_are_those_of_a_loop(
    shape: dict[str, int], chunks: int, options: dict[str, Any], has_gradients: bool
) -> None:
    strategy = strategy_of(shape)
    rules = Rules([("layers/**", Stage(chunks=chunks))], otherwise=Replicate())
    params = make_params(chunks)
    placed = partition.place(strategy, params, rules) if "stage" in shape else params
    batch = make_batch()
    rows = jax.device_put(batch, strategy.per_replica_sharding)
    step = step_of(with_aux(2, **options), has_gradients)
    value, aux, grads = strategy.run(step, (placed, rows))
    (wanted, wanted_aux), wanted_grads = jax.value_and_grad(loop_aux, has_aux=True)(
        make_params(), batch
    )
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for name, found in aux.items():
        assert found.array.dtype == wanted_aux[name].dtype
        np.testing.assert_allclose(found.array, wanted_aux[name], rtol=1e-5)
    assert 0 < wanted_aux["right"].sum() < ROWS * 4
    if has_gradients:
        assert largest_difference(to_numpy(grads), to_numpy(wanted_grads)) <= 1e-6


def test_a_sum_of_losses_has_aux_too() -> None:
    params, batch = make_params(), make_batch()
    loss, aux = with_aux(4, reduce="sum")(params, batch)
    wanted, wanted_aux = loop_aux(params, batch)
    np.testing.assert_allclose(loss, 4 * wanted, rtol=1e-6)
    np.testing.assert_allclose(aux["losses"], wanted_aux["losses"], rtol=1e-5)


def _only_loss(h: Any, x: Any, rows: Any) -> Any:
    return head(h, x, rows)


def _mean_of_rows(h: Any, x: Any, rows: Any) -> Any:
    return head(h, x, rows), x.mean()


def _keys(h: Any, x: Any, rows: Any) -> Any:
    return head(h, x, rows), jax.random.split(jax.random.key(0), len(x))


def _nothing(h: Any, x: Any, rows: Any) -> Any:
    return head(h, x, rows), {}


REFUSED = [
    ({"head": _only_loss}, ArgumentError, ["has_aux=True", "_only_loss", "Return (loss, aux)"]),
    ({"head": _nothing}, ArgumentError, ["has_aux=True", "_nothing"]),
    ({"head": _mean_of_rows}, ShapeError, ["float32[]", "4 rows of a micro-batch", "before their"]),
    ({"head": _keys}, ShapeError, ["key<", "4 rows of a micro-batch"]),
    ({"has_aux": 1}, ArgumentTypeError, ["has_aux=1", "True or False"]),
    (
        {"head": nn.vocabulary_head(lambda rows: rows["labels"])},
        ArgumentError,
        ["has_aux=True", "nn.vocabulary_head", "a head of your own"],
    ),
]


@pytest.mark.parametrize(("options", "kind", "texts"), REFUSED, ids=range(len(REFUSED)))
@pytest.mark.parametrize("has_stages", [True, False])
def test_another_aux_is_refused(
    options: dict[str, Any], kind: type[Exception], texts: list[str], has_stages: bool
) -> None:
    strategy = strategy_of({"data": 2, "stage": 2}) if has_stages else one_device()
    rules = Rules([("layers/**", Stage())], otherwise=Replicate())
    params = partition.place(strategy, make_params(), rules) if has_stages else make_params()
    rows = jax.device_put(make_batch(), strategy.per_replica_sharding)
    with pytest.raises(kind) as error:
        strategy.run(with_aux(2 if has_stages else 4, **options), (params, rows))
    text = str(error.value)
    assert text.startswith("nn.pipeline_loss was given "), text
    assert all(part in text for part in texts), text


@pytest.mark.parametrize("has_stages", [True, False])
def test_a_gradient_through_aux_is_refused(has_stages: bool) -> None:
    strategy = strategy_of({"data": 2, "stage": 2}) if has_stages else one_device()
    rules = Rules([("layers/**", Stage())], otherwise=Replicate())
    params = partition.place(strategy, make_params(), rules) if has_stages else make_params()
    rows = jax.device_put(make_batch(), strategy.per_replica_sharding)

    def penalty(params: Any, batch: Any) -> Any:
        loss, aux = with_aux(2)(params, batch)
        return loss + aux["losses"].max()

    def only_read(params: Any, batch: Any) -> Any:
        loss, aux = with_aux(2)(params, batch)
        return loss + jax.lax.stop_gradient(aux["losses"].max())

    with pytest.raises(UnsupportedError, match=r"aux of nn\.pipeline_loss was differentiated"):
        strategy.run(lambda p, b: jax.grad(penalty)(p, b), (params, rows))

    def gradient(loss: Any) -> Any:
        def step(params: Any, batch: Any) -> Any:
            grads = jax.grad(loss)(params, batch)["head"]
            return jaxdist.get_replica_context().all_reduce("mean", grads)

        return np.asarray(strategy.run(step, (params, rows)))

    np.testing.assert_array_equal(gradient(only_read), gradient(pipeline(2)))
