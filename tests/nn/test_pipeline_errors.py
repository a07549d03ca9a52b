"""Wrong calls of `nn.pipeline_loss`: each is a named error before anything runs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdist
from jaxdist import PerReplica, nn, partition
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    InvalidArgumentError,
    ShapeError,
)
from jaxdist.partition import Replicate, Rules, Stage
from tests.nn.pipelines import (
    ROWS,
    WIDTH,
    embed,
    head,
    layer,
    make_batch,
    make_params,
    one_device,
    pipeline,
    strategy_of,
)

RULES = Rules([("layers/**", Stage())], otherwise=Replicate())


def run(loss: Any, *, rules: Any = RULES, params: Any = None, batch: Any = None) -> Any:
    """Run a step with this loss on two replicas of four stages."""
    strategy = strategy_of({"data": 2, "stage": 4})
    params = make_params() if params is None else params
    params = params if rules is None else partition.place(strategy, params, rules)
    rows = jax.device_put(make_batch() if batch is None else batch, strategy.per_replica_sharding)
    return strategy.run(loss, (params, rows))


def messages(kind: type[Exception], loss: Any, **options: Any) -> str:
    with pytest.raises(kind) as error:
        run(loss, **options)
    text = str(error.value)
    assert text.startswith("nn.pipeline_loss was given "), text
    assert text.count("\n\n") == 2, text
    return text


def test_rows_that_the_micro_batches_do_not_divide() -> None:
    text = messages(ShapeError, pipeline(3))
    assert "8 rows on this replica, and micro_batches=3" in text
    assert "[1, 2, 4, 8], or 6 or 9 rows" in text


@pytest.mark.parametrize("shape", [{"data": 2, "stage": 4}, {"data": 4}, {"data": 1}])
def test_a_short_last_batch_is_the_same_error_on_every_layout(shape: dict[str, int]) -> None:
    strategy = strategy_of(shape)
    params = partition.place(strategy, make_params(), RULES)
    batch = make_batch(7)
    rows = next(iter(strategy.experimental_distribute_dataset([batch])))
    with pytest.raises(InvalidArgumentError) as error:
        strategy.run(lambda p, b: jax.grad(pipeline(2))(p, b), (params, rows))
    assert "rows" in str(error.value)


def test_replicas_with_other_rows_are_told_to_drop_or_to_pad() -> None:
    strategy = strategy_of({"data": 2})
    params = partition.place(strategy, make_params(), RULES)
    rows = jax.tree.map(lambda *x: PerReplica(x), make_batch(4), make_batch(2))
    with pytest.raises(ShapeError, match=r"batches of \[4, 2\] rows") as error:
        strategy.run(lambda p, b: jax.grad(pipeline(2))(p, b), (params, rows))
    assert "drop_remainder=True" in str(error.value)


def test_an_axis_that_the_mesh_does_not_have() -> None:
    text = messages(ArgumentError, pipeline(4, axis="stages"))
    assert "'stage': 4" in text
    assert text.endswith("Pass axis='stage'.")


def test_an_axis_of_replicas() -> None:
    assert "replicas" in messages(ArgumentError, pipeline(4, axis="data"))


def test_layers_that_are_not_placed_on_the_stages() -> None:
    text = messages(ShapeError, pipeline(4), rules=Rules([], otherwise=Replicate()))
    assert "parts[1]['down'] float32[8, 16, 8], which is not placed on the 4 stages" in text
    assert '("layers/**", partition.Stage())' in text


def test_layers_of_which_some_are_not_placed() -> None:
    rules = Rules([("layers/up", Stage())], otherwise=Replicate())
    assert "parts[1]['down']" in messages(ShapeError, pipeline(4), rules=rules)


def test_layers_that_the_stages_do_not_divide() -> None:
    with pytest.raises(ShapeError, match="4 stages do not divide 6 layers"):
        run(pipeline(4), params=make_params(layers=6))


def test_other_chunks_than_those_of_the_placement() -> None:
    rules = Rules([("layers/**", Stage(chunks=2))], otherwise=Replicate())
    text = messages(ArgumentError, pipeline(4, chunks=4), rules=rules, params=make_params(2))
    assert "parts[1]['up']: chunks=2" in text
    assert text.endswith("Pass chunks=2, or leave it out.")


@pytest.mark.parametrize(
    ("shape", "eagerly"), [({"data": 4}, False), ({"data": 2, "stage": 2}, True)]
)
def test_chunks_of_layers_that_are_whole_are_required(shape: dict[str, int], eagerly: bool) -> None:
    """A layer computes a product with a stack, too: one matrix for each row of a micro-batch."""
    strategy = strategy_of(shape)
    rules = Rules([("layers/**", Stage(chunks=2))], otherwise=Replicate())
    params = partition.place(strategy, make_params(2), rules)
    batch = make_batch(4 * shape["data"])
    rows = jax.device_put(batch, strategy.per_replica_sharding)
    with jaxdist.config.run_eagerly(eagerly):
        with pytest.raises(ArgumentError, match=r"partition.Stage\(chunks=2\)") as error:
            strategy.run(pipeline(1), (params, rows))
        assert "Pass chunks=2" in str(error.value)
        found = strategy.run(pipeline(1, chunks=2), (params, rows))
    losses = [np.asarray(x) for x in found.values]
    np.testing.assert_allclose(np.mean(losses), pipeline(1)(make_params(), batch), rtol=1e-5)


def test_chunks_of_layers_with_the_shapes_of_other_inputs_are_required() -> None:
    strategy = strategy_of({"data": 2, "stage": 2})
    rules = [("own/layers/**", Stage(chunks=2)), ("other/layers/**", Stage())]
    params = {name: make_params(2) for name in ("own", "other")}
    params = partition.place(strategy, params, Rules(rules, otherwise=Replicate()))
    rows = jax.device_put(make_batch(), strategy.per_replica_sharding)

    def run_with(**options: Any) -> Any:
        def step(params: Any, batch: Any) -> Any:
            return pipeline(2, **options)(params["own"], batch)

        return strategy.run(step, (params, rows))

    with pytest.raises(ArgumentError, match="which placement is that of the layers") as error:
        run_with()
    assert "parts[1]['up']: chunks=1 or 2" in str(error.value)
    assert str(error.value).endswith("chunks=1 or 2.")
    losses = [np.asarray(x) for x in run_with(chunks=2).values]
    np.testing.assert_allclose(np.mean(losses), pipeline(2)(make_params(), make_batch()), rtol=1e-6)


@pytest.mark.parametrize("where", ["stages", "one device"])
@pytest.mark.parametrize(
    ("own", "found"),
    [
        (lambda w, x: x @ w["up"], "[4, 16]"),
        (lambda w, x: layer(w, x).astype(jnp.bfloat16), "bfloat16"),
        (lambda w, x: {"x": layer(w, x)}, "{x: "),
    ],
)
def test_a_layer_that_changes_x(own: Any, found: str, where: str) -> None:
    loss = pipeline(4, own)
    if where == "stages":
        text = messages(ShapeError, loss)
    else:
        with pytest.raises(ShapeError) as error:
            loss(make_params(), make_batch())
        text = str(error.value)
    assert found.replace("[4, 16]", "4, 16]") in text


def test_a_layer_that_communicates_over_the_stages() -> None:
    text = messages(ArgumentError, pipeline(4, lambda w, x: jax.lax.pmean(layer(w, x), "stage")))
    assert "psum" in text
    assert "'stage'" in text


def test_a_function_that_gathers_an_array_in_pieces_from_around_it() -> None:
    rules = partition.fsdp(min_bytes=0).on_stages("layers/**")

    def loss(params: Any, batch: Any) -> Any:
        return pipeline(4, lambda w, x: layer(w, x) * params["head"][...].mean())(params, batch)

    text = messages(ArgumentError, loss, rules=rules)
    assert "layer (" in text
    assert "partition.gather(params['table'])" in text

    def as_told(params: Any, batch: Any) -> Any:
        table = partition.gather(params["head"])
        return pipeline(4, lambda w, x: layer(w, x) * table.mean())(params, batch)

    np.testing.assert_allclose(
        np.mean([np.asarray(x) for x in run(as_told, rules=rules).values]),
        as_told(make_params(), make_batch()),
        rtol=1e-5,
    )


def test_a_pipeline_inside_a_layer_of_a_pipeline() -> None:
    def own(w: Any, x: Any) -> Any:
        more = pipeline(1)(make_params(), jax.tree.map(jnp.asarray, make_batch(2)))
        return layer(w, x) + more

    with pytest.raises(ContextError, match="divided over this axis already"):
        run(pipeline(4, own))


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"schedule": "1f2b"}, ArgumentError, "Pass schedule='1f1b'"),
        ({"schedule": 3}, ArgumentError, "schedule is one of"),
        ({"reduce": "max"}, ArgumentError, "reduce is one of"),
        ({"chunks": 0}, ArgumentError, "chunks=0"),
        ({"chunks": 1.5}, ArgumentTypeError, "chunks=1.5"),
        ({"head": None}, ArgumentTypeError, "head"),
        ({"axis": 3}, ArgumentTypeError, "axis=3"),
        ({"key": 3}, ArgumentTypeError, "key=3"),
        ({"key": jax.random.key(0)}, ArgumentTypeError, "layer(w, x, keys), or leave key out"),
        ({"layer": lambda w, x, keys: x}, ArgumentTypeError, "layer(w, x), or pass key="),
        ({"embed": lambda rows: rows}, ArgumentTypeError, "called as embed(parts[0], rows)"),
        ({"head": lambda h, x: x}, ArgumentTypeError, "called as head(parts[2], x, rows)"),
    ],
)
def test_a_wrong_option(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as error:
        pipeline(4, **options)(make_params(), make_batch())
    assert words in str(error.value)


def test_a_wrapper_may_take_other_arguments_than_what_it_wraps() -> None:
    @functools.wraps(layer)
    def own(w: Any, x: Any, keys: Any) -> Any:
        return layer(w, x)

    params, batch = make_params(), make_batch()
    found = pipeline(2, own, key=jax.random.key(0))(params, batch)
    assert float(found) == float(pipeline(2, jax.checkpoint(layer))(params, batch))


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("leaf", ["name", jnp.tanh, np.array(["a"]), object()])
def test_a_leaf_that_is_not_an_array(number: int, leaf: Any) -> None:
    params = make_params()
    parts: list[Any] = [params["embed"], params["layers"], params["head"]]
    parts[number] = {"own": parts[number], "other": leaf}
    with pytest.raises(ArgumentTypeError, match=rf"parts\[{number}\]\['other'\]="):
        nn.pipeline_loss(embed, layer, head, tuple(parts), make_batch(), micro_batches=2)
    with pytest.raises(ArgumentTypeError, match=r"batch\['other'\]="):
        pipeline(2)(params, {**make_batch(), "other": leaf})


@pytest.mark.parametrize("micro_batches", [0, -1, 2.0, None, "4"])
def test_a_wrong_number_of_micro_batches(micro_batches: Any) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match="micro_batches="):
        pipeline(micro_batches)(make_params(), make_batch())


@pytest.mark.parametrize("parts", [None, (), ({}, {}), "abc"])
def test_parts_that_are_not_three(parts: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="Pass a tuple of three"):
        nn.pipeline_loss(embed, layer, head, parts, make_batch(), micro_batches=2)


def test_a_batch_without_arrays() -> None:
    with pytest.raises(ArgumentTypeError, match=r"batch={}, of type dict, without an array"):
        pipeline(2)(make_params(), {})


@pytest.mark.parametrize(
    "batch", [{}, {"tokens": 3}, {"tokens": np.ones((4, 2)), "labels": np.ones((2, 2))}]
)
def test_a_batch_without_equal_rows(batch: Any) -> None:
    params = make_params()
    parts = params["embed"], params["layers"], params["head"]
    with pytest.raises((ShapeError, ArgumentTypeError, ArgumentError), match="batch"):
        nn.pipeline_loss(embed, layer, head, parts, batch, micro_batches=2)


def test_a_batch_without_rows() -> None:
    with pytest.raises(ShapeError, match="0 rows"):
        pipeline(2)(make_params(), make_batch(0))


COUNTS = Rules([("count", Stage())])


class Counting(nnx.Module):
    """A layer that counts its calls."""

    def __init__(self) -> None:
        self.count = nnx.Variable(jnp.zeros((8,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.count[...] += 1
        return x


@pytest.mark.parametrize("strategy", [one_device(), strategy_of({"data": 2, "stage": 4})])
def test_a_layer_that_changes_the_state_of_nnx(strategy: Any) -> None:
    params = make_params()
    layers = partition.place(strategy, {"layers": Counting()}, COUNTS, wrt=nnx.Variable)["layers"]

    def step(layers: Any, batch: Any) -> Any:
        parts = params["embed"], layers, params["head"]
        return nn.pipeline_loss(embed, lambda own, x: own(x), head, parts, batch, micro_batches=2)

    rows = jax.device_put(make_batch(), strategy.per_replica_sharding)
    with pytest.raises(ArgumentError, match="changes NNX state: count"):
        strategy.run(step, (layers, rows))


@pytest.mark.parametrize("shape", [{"data": 2, "stage": 4}, {"data": 2}])
def test_a_function_that_assigns_a_variable(shape: dict[str, int]) -> None:
    strategy = strategy_of(shape)
    with strategy.scope():
        count = jaxdist.Variable(np.float32(0), aggregation=jaxdist.VariableAggregation.MEAN)

    def counting_head(h: Any, x: Any, rows: Any) -> Any:
        count.assign_add(1.0)
        return head(h, x, rows)

    params = partition.place(strategy, make_params(), RULES)
    rows = jax.device_put(make_batch(), strategy.per_replica_sharding)
    with pytest.raises(ArgumentError, match=r"counting_head.* that assigns a variable"):
        strategy.run(pipeline(4, head=counting_head), (params, rows))

    def step(params: Any, batch: Any) -> Any:
        loss = pipeline(4)(params, batch)
        count.assign_add(1.0)
        return loss

    strategy.run(step, (params, rows))
    assert float(count.read_value()) == 1


def test_a_head_of_other_shapes() -> None:
    split = nn.vocabulary_head(lambda rows: rows["labels"][:, :1])
    assert "labels" in str(messages_of_head(split))
    with pytest.raises(ArgumentTypeError, match="labels"):
        nn.vocabulary_head("labels")  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="weights"):
        nn.vocabulary_head(lambda rows: rows, weights=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="norm"):
        nn.vocabulary_head(lambda rows: rows, norm=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "params", "words"),
    [
        ({"labels": lambda rows: None}, {}, "labels=None"),
        ({"labels": lambda rows: [1, 2]}, {}, r"labels=\[1, 2\]"),
        ({"weights": lambda rows: [1.0]}, {}, r"weights=\[1.0\]"),
        ({}, {"head": {"matrix": np.ones((WIDTH, 16))}}, "h={'matrix'"),
        ({"norm": lambda g, x: (x, g)}, {"head": (np.ones(3), np.ones((WIDTH, 16)))}, r"x=\("),
    ],
)
def test_a_head_of_what_is_not_an_array(
    options: dict[str, Any], params: dict[str, Any], words: str
) -> None:
    given: dict[str, Any] = {"labels": lambda rows: rows["labels"], **options}
    split = nn.vocabulary_head(**given)
    with pytest.raises(ArgumentTypeError, match=f"^nn.vocabulary_head was given {words}"):
        pipeline(4, head=split, reduce="sum")({**make_params(), **params}, make_batch())


def messages_of_head(split: Any) -> Any:
    with pytest.raises(ShapeError) as error:
        run(pipeline(4, head=split))
    return error.value


def test_a_vocabulary_that_the_stages_do_not_divide() -> None:
    params = make_params()
    params["head"] = np.ones((WIDTH, 18), "float32")
    with pytest.raises(ShapeError, match="dim 1 is split over 4 stages"):
        run(pipeline(4, head=nn.vocabulary_head(lambda rows: rows["labels"])), params=params)


def test_a_constraint_over_the_stages_inside_of_a_layer_is_refused() -> None:
    def own(w: Any, x: Any) -> Any:
        return partition.constrain(layer(w, x), partition.Split(1, axis="stage"))

    with pytest.raises(ArgumentError, match="axis of the stages"):
        run(pipeline(4, own))


def test_a_constraint_over_all_other_axes_works_inside_of_a_layer() -> None:
    def own(w: Any, x: Any) -> Any:
        return partition.constrain(layer(w, x), 1)

    strategy = strategy_of({"data": 2, "stage": 2, "model": 2})
    params = partition.place(strategy, make_params(), RULES)
    rows = jax.device_put(make_batch(), strategy.per_replica_sharding)
    plain = strategy.run(pipeline(2), (params, rows))
    constrained = strategy.run(pipeline(2, own), (params, rows))
    np.testing.assert_allclose(constrained.array, plain.array, rtol=1e-6)


def test_rows_are_those_of_one_replica() -> None:
    assert ROWS == 16
    with pytest.raises(ShapeError, match="8 rows on this replica"):
        run(pipeline(16))


def test_a_list_of_layers_is_to_be_stacked_on_every_layout() -> None:
    params = make_params()
    params["layers"] = [jax.tree.map(lambda w, i=i: w[i], params["layers"]) for i in range(8)]

    def step(params: Any, batch: Any) -> Any:
        return pipeline(4)(params, batch)

    strategy = strategy_of({"data": 2, "stage": 4})
    placed = partition.place(strategy, params, partition.replicated())
    rows = jax.device_put(make_batch(), strategy.per_replica_sharding)
    for call in (lambda: step(params, make_batch()), lambda: strategy.run(step, (placed, rows))):
        with pytest.raises(ShapeError, match=r"parts\[1\]\[0\]\['down'\]: \[16\]") as caught:
            call()
        assert "Stack the parameters of the layers" in str(caught.value)
        assert len(str(caught.value)) < 500


def test_nothing_is_left_of_a_step_that_failed() -> None:
    with pytest.raises(ShapeError):
        run(pipeline(3))
    assert jaxdist.get_replica_context() is not None
    run(pipeline(4))
