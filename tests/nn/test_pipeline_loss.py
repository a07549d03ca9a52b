"""The loss, the gradients and the training of a pipeline are those of one device."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxdist
from jaxdist import nn, partition
from jaxdist.partition import Replicate, Rules, Shard, Split, Stage
from tests.nn.pipelines import (
    LAYERS,
    LENGTH,
    ROWS,
    WIDTH,
    WORDS,
    embed,
    head,
    largest_difference,
    layer,
    loop_loss,
    make_batch,
    make_params,
    one_device,
    pipeline,
    strategy_of,
    to_numpy,
    train,
)
from tests.tables import sampled

WHOLE = Replicate()


def tensor_rules(chunks: int, shard: bool) -> Rules:
    up, down = (Shard(split=1), Shard(split=0)) if shard else (Split(1), Split(0))
    return Rules(
        [
            ("layers/up", Stage(up, chunks=chunks)),
            ("layers/down", Stage(down, chunks=chunks)),
        ],
        otherwise=Shard() if shard else WHOLE,
    )


def rules_of(placement: str, chunks: int = 1) -> Any:
    if placement == "whole":
        return Rules([("layers/**", Stage(chunks=chunks))], otherwise=WHOLE)
    if placement == "fsdp":
        return partition.fsdp(min_bytes=0).on_stages("layers/**", chunks=chunks)
    return tensor_rules(chunks, placement == "fsdp-tensor")


LAYOUTS = {
    "whole": [{"data": 2, "stage": 4}, {"data": 1, "stage": 2}, {"stage": 4, "data": 2}],
    "fsdp": [{"data": 2, "stage": 4}, {"data": 4, "stage": 2}],
    "tensor": [{"data": 2, "stage": 2, "model": 2}],
    "fsdp-tensor": [{"data": 2, "stage": 2, "model": 2}],
}
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("1f1b", 2), ("zero_bubble", 2)]
TABLE = [
    (schedule, chunks, placement, tuple(layout.items()), remat)
    for (schedule, chunks), placement, remat in itertools.product(SCHEDULES, LAYOUTS, (False, True))
    for layout in LAYOUTS[placement]
]


@functools.cache
def of_one_device() -> tuple[list[float], Any, Any]:
    return train(one_device(), make_params(), loop_loss, steps=50)


@pytest.mark.parametrize("row", sampled(TABLE, 12))
def test_gradients_and_losses_are_those_of_one_device(row: Any) -> None:
    schedule, chunks, placement, layout, remat = row
    shape = dict(layout)
    own = jax.checkpoint(layer) if remat else layer
    loss = pipeline(ROWS // 2 // shape["data"], own, schedule=schedule)
    rules = rules_of(placement, chunks)
    losses, grads, _ = train(strategy_of(shape), make_params(chunks), loss, rules, steps=50)
    expected, first, _ = of_one_device()
    assert largest_difference(grads, first) <= 1e-6
    assert np.abs(np.subtract(losses, expected)).max() <= 1e-4


@pytest.mark.parametrize("shape", [{"data": 8}, {"data": 2, "model": 4}, {"data": 4, "stage": 1}])
def test_without_the_axis_it_is_gradient_accumulation(shape: dict[str, int]) -> None:
    rules = partition.fsdp(min_bytes=0).on_stages("layers/**")
    loss = pipeline(2, schedule="zero_bubble")
    losses, grads, _ = train(strategy_of(shape), make_params(), loss, rules)
    expected, first, _ = of_one_device()
    assert largest_difference(grads, first) <= 1e-6
    np.testing.assert_allclose(losses, expected[:5], atol=1e-5)


def test_it_is_the_same_outside_of_steps() -> None:
    params, batch = make_params(), make_batch()
    value, grads = jax.value_and_grad(pipeline(4))(params, batch)
    expected, first = jax.value_and_grad(loop_loss)(params, batch)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert largest_difference(grads, to_numpy(first)) <= 1e-6


def test_it_is_the_same_op_by_op() -> None:
    params, batch = make_params(layers=2), make_batch(4)
    strategy = strategy_of({"data": 2, "stage": 2})
    _, expected, _ = train(one_device(), params, loop_loss, steps=1, batch=batch)
    rules = rules_of("fsdp")
    jaxdist.config.run_eagerly(True)
    try:
        _, grads, _ = train(strategy, params, pipeline(1), rules, steps=1, batch=batch)
    finally:
        jaxdist.config.run_eagerly(False)
    assert largest_difference(grads, expected) <= 1e-6


@pytest.mark.parametrize("placement", ["whole", "fsdp"])
def test_a_mesh_with_explicit_axes_works(placement: str) -> None:
    strategy = strategy_of({"data": 2, "stage": 4}, AxisType.Explicit)
    _, grads, _ = train(strategy, make_params(), pipeline(4), rules_of(placement), steps=1)
    assert largest_difference(grads, of_one_device()[1]) <= 1e-6


def test_chunks_without_stages_are_told() -> None:
    loss = pipeline(4, chunks=2)
    _, grads, _ = train(one_device(), make_params(2), loss, steps=1)
    assert largest_difference(grads, of_one_device()[1]) <= 1e-6
    stages = strategy_of({"data": 2, "stage": 2})
    _, grads, _ = train(stages, make_params(2), loss, rules_of("whole", 2), steps=1)
    assert largest_difference(grads, of_one_device()[1]) <= 1e-6


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 6])
def test_any_number_of_micro_batches_gives_the_same_numbers(micro_batches: int) -> None:
    batch = make_batch(12)
    params = make_params(2)
    stages = strategy_of({"data": 2, "stage": 4})
    _, expected, _ = train(one_device(), make_params(), loop_loss, steps=1, batch=batch)
    loss = pipeline(micro_batches, schedule="1f1b")
    _, grads, _ = train(stages, params, loss, rules_of("whole", 2), steps=1, batch=batch)
    assert largest_difference(grads, expected) <= 1e-6


def test_the_sum_of_weighted_losses_is_that_of_one_device() -> None:
    weights = np.asarray([1.0] * 13 + [0.0] * 3, dtype="float32")
    batch = {**make_batch(), "weights": weights}

    def weighted(h: Any, x: Any, rows: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ h, rows["labels"])
        return jnp.sum(losses * rows["weights"][:, None]) / (13 * LENGTH)

    def run(strategy: Any, loss: Any, rules: Any = None) -> Any:
        params = make_params() if rules is None else partition.place(strategy, make_params(), rules)

        def step(params: Any, batch: Any) -> Any:
            found = jax.value_and_grad(loss)(params, batch)
            return jaxdist.get_replica_context().all_reduce("sum", found)

        rows = jax.device_put(batch, strategy.per_replica_sharding)
        return to_numpy(strategy.run(step, (params, rows)))

    loss = pipeline(4, head=weighted, reduce="sum")
    stages = strategy_of({"data": 2, "stage": 4})
    value, grads = run(stages, loss, rules_of("whole"))

    def whole(params: Any) -> Any:
        x, _ = jax.lax.scan(
            lambda x, w: (layer(w, x), None), embed(params["embed"], batch), params["layers"]
        )
        return weighted(params["head"], x, batch)

    expected, first = jax.value_and_grad(whole)(make_params())
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert largest_difference(grads, to_numpy(first)) <= 1e-6


def drop_out(w: Any, x: jax.Array, keys: jax.Array) -> jax.Array:
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, x.shape[1:]))(keys)
    return jnp.where(kept, layer(w, x), x)


DROPOUT_LAYOUTS = [
    ({"data": 2, "stage": 4}, "whole", 1),
    ({"data": 1, "stage": 8}, "whole", 1),
    ({"data": 2, "stage": 2}, "fsdp", 2),
    ({"data": 8}, "whole", 1),
]


@pytest.mark.parametrize(("shape", "placement", "chunks"), DROPOUT_LAYOUTS)
def test_dropout_masks_do_not_depend_on_the_layout(
    shape: dict[str, int], placement: str, chunks: int
) -> None:
    key = jax.random.key(3)
    rows = ROWS // shape["data"]
    loss = pipeline(rows // 2, drop_out, key=key)
    _, grads, _ = train(
        strategy_of(shape), make_params(chunks), loss, rules_of(placement, chunks), steps=1
    )

    def on_one_device(params: Any, batch: Any) -> jax.Array:
        keys = nn.example_keys(key, ROWS)

        def run(x: Any, given: Any) -> Any:
            number, w = given
            return drop_out(w, x, jax.vmap(jax.random.fold_in, (0, None))(keys, number)), None

        x = embed(params["embed"], batch)
        x, _ = jax.lax.scan(run, x, (jnp.arange(LAYERS), params["layers"]))
        return head(params["head"], x, batch)

    _, expected, _ = train(one_device(), make_params(), on_one_device, steps=1)
    assert largest_difference(grads, expected) <= 1e-6


def test_losses_of_layers_are_added_up() -> None:
    def with_loss(w: Any, x: jax.Array) -> Any:
        return layer(w, x), 0.1 * jnp.mean(x**2)

    def on_one_device(params: Any, batch: Any) -> jax.Array:
        def run(carry: Any, w: Any) -> Any:
            x, total = carry
            y, loss = with_loss(w, x)
            return (y, total + loss), None

        start = embed(params["embed"], batch), jnp.zeros(())
        (x, total), _ = jax.lax.scan(run, start, params["layers"])
        return head(params["head"], x, batch) + total

    _, expected, _ = train(one_device(), make_params(), on_one_device, steps=1)
    for shape in ({"data": 2, "stage": 4}, {"data": 4}):
        _, grads, _ = train(
            strategy_of(shape), make_params(), pipeline(4, with_loss), rules_of("whole"), steps=1
        )
        assert largest_difference(grads, expected) <= 1e-6


@pytest.mark.parametrize("head_is_placed", [False, True])
def test_a_head_that_is_split_over_the_stages_has_the_numbers_of_one_device(
    head_is_placed: bool,
) -> None:
    split = nn.vocabulary_head(lambda rows: rows["labels"], norm=lambda g, x: x * g[None, None])
    rules = Rules(
        [("layers/**", Stage()), ("head/1", Split(1, axis="stage") if head_is_placed else WHOLE)],
        otherwise=WHOLE,
    )
    params = make_params()
    params["head"] = (np.full(WIDTH, 1.5, "float32"), params["head"])

    def with_norm(h: Any, x: Any, rows: Any) -> Any:
        return head(h[1], x * h[0][None, None], rows)

    _, expected, _ = train(one_device(), params, pipeline(4, head=with_norm), steps=1)
    _, plain, _ = train(one_device(), params, pipeline(4, head=split), steps=1)
    assert largest_difference(plain, expected) <= 1e-6
    for schedule in ("1f1b", "zero_bubble", "gpipe"):
        _, grads, _ = train(
            strategy_of({"data": 2, "stage": 4}),
            params,
            pipeline(4, head=split, schedule=schedule),
            rules,
            steps=1,
        )
        assert largest_difference(grads, expected) <= 1e-6


@pytest.mark.parametrize(
    ("schedule", "wrap"),
    [("1f1b", lambda fn: fn), ("1f1b", jax.jit), ("zero_bubble", jax.checkpoint)],
)
def test_arrays_of_the_step_around_the_functions_have_their_gradients(
    schedule: str, wrap: Any
) -> None:
    def functions(params: Any) -> Any:
        table = jnp.tanh(params["head"][...])
        scale = jnp.mean(table) + 1.5

        def own_layer(w: Any, x: Any) -> Any:
            x, _ = jax.lax.scan(lambda x, _: (x * scale, None), x, None, length=2)
            return layer(w, x) + (x @ table) @ table.T / WORDS

        return (
            wrap(lambda e, rows: embed(e, rows) * table.T[None, :1]),
            wrap(own_layer),
            wrap(lambda h, x, rows: head(h, x * scale, rows)),
        )

    def on_stages(params: Any, batch: Any) -> Any:
        first, own, last = functions(params)
        return pipeline(4, own, embed=first, head=last, schedule=schedule)(params, batch)

    def on_one_device(params: Any, batch: Any) -> Any:
        first, own, last = functions(params)
        x, _ = jax.lax.scan(
            lambda x, w: (own(w, x), None), first(params["embed"], batch), params["layers"]
        )
        return last(params["head"], x, batch)

    _, expected, _ = train(one_device(), make_params(), on_one_device, steps=1)
    for shape, placement in (({"data": 2, "stage": 4}, "whole"), ({"data": 2, "stage": 2}, "fsdp")):
        _, grads, _ = train(
            strategy_of(shape), make_params(), on_stages, rules_of(placement), steps=1
        )
        assert largest_difference(grads, expected) <= 1e-6


class Layer(nnx.Module):
    """A residual layer of an MLP."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 16, rngs=rngs)
        self.down = nnx.Linear(16, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class Net(nnx.Module):
    """An embedding, stacked layers, and a head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap
        def make(rngs: nnx.Rngs) -> Layer:
            return Layer(rngs)

        self.layers = make(rngs)
        self.head = nnx.Linear(WIDTH, WORDS, rngs=rngs)


def train_module(strategy: Any, rules: Any, micro_batches: int) -> list[float]:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    if rules is not None:
        partition.place(strategy, (model, optimizer), rules)

    def step(model: Net, optimizer: Any, batch: Any) -> jax.Array:
        def loss(model: Net) -> jax.Array:
            parts = model.embed, model.layers, model.head
            return nn.pipeline_loss(
                lambda e, rows: e(rows["tokens"]),
                lambda own, x: own(x),
                lambda h, x, rows: jnp.mean(
                    optax.softmax_cross_entropy_with_integer_labels(h(x), rows["labels"])
                ),
                parts,
                batch,
                micro_batches=micro_batches,
            )

        found = nnx.value_and_grad(loss)(model)
        value, grads = jaxdist.get_replica_context().all_reduce("mean", found)
        optimizer.update(model, grads)
        return value

    rows = jax.device_put(make_batch(), strategy.per_replica_sharding)
    return [float(strategy.run(step, (model, optimizer, rows))) for _ in range(5)]


def test_modules_of_nnx_are_parts() -> None:
    expected = train_module(one_device(), None, 8)
    rules = partition.fsdp(min_bytes=0).on_stages("layers/**")
    for shape in ({"data": 2, "stage": 4}, {"data": 2, "stage": 2, "model": 2}, {"data": 8}):
        found = train_module(strategy_of(shape), rules, 2)
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_parameters_have_narrow_gradients_of_wide_sums(dtype: str) -> None:
    params = jax.tree.map(lambda a: jnp.asarray(a, dtype), make_params())
    _, expected, _ = train(one_device(), params, pipeline(8), steps=1)
    _, grads, _ = train(
        strategy_of({"data": 1, "stage": 4}), params, pipeline(8), rules_of("whole"), steps=1
    )
    assert {a.dtype for a in jax.tree.leaves(grads)} == {jnp.dtype(dtype)}
    wide = jax.tree.map(lambda a: np.asarray(a, "float32"), (grads, expected))
    assert largest_difference(*wide) <= 2e-2
