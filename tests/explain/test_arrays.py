"""Pictures of shardings: arrays of any rank, pytrees, NNX objects and values of jaxdist."""

import io
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import jaxdist
from jaxdist import partition
from jaxdist.errors import ArgumentError, ArgumentTypeError, ContextError
from tests.tables import examples


def explained(value: object, strategy: jaxdist.Strategy | None = None) -> Any:
    report = jaxdist.explain(value, strategy)
    assert type(report).__name__ == "ArraysReport"
    return report


@settings(max_examples=examples(40))
@given(st.data())
def test_each_device_has_the_part_that_jax_put_there(data: st.DataObject) -> None:
    names = ("a", "b", "c")
    mesh = jax.make_mesh((2, 2, 2), names)
    rank = data.draw(st.integers(0, 4))
    shape = tuple(data.draw(st.sampled_from([2, 4, 8])) for _ in range(rank))
    free, spec = list(names), []
    for size in shape:
        count = data.draw(st.integers(0, min(len(free), int(math.log2(size)))))
        spec.append(tuple(free.pop() for _ in range(count)) or None)
    dtype = data.draw(st.sampled_from(["float32", "int8", "bfloat16"]))
    x = jax.device_put(jnp.zeros(shape, dtype), NamedSharding(mesh, PartitionSpec(*spec)))
    (leaf,) = explained(x).leaves
    theirs = {
        s.device: tuple(i.indices(n)[:2] for i, n in zip(s.index, shape, strict=True))
        for s in x.addressable_shards
    }
    assert {s.device: s.index for s in leaf.shards} == theirs
    assert {s.device: s.num_bytes for s in leaf.shards} == {
        s.device: s.data.nbytes for s in x.addressable_shards
    }
    assert leaf.num_parts * leaf.num_copies == len(jax.devices())
    assert leaf.num_bytes == x.nbytes
    assert [len(c) for c in leaf.cuts] == [2 ** len(s or ()) for s in spec]


def test_the_picture_of_two_cut_dims_is_a_grid_of_devices() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    where = NamedSharding(mesh, PartitionSpec("data", None, "model"))
    text = str(explained(jax.device_put(jnp.zeros((8, 3, 4)), where)))
    assert "dim 0 in 4 parts over data, dim 2 in 2 parts over model" in text
    assert "\n  [2:4, :, 2:4]     48  cpu:3\n" in text
    lines = text.splitlines()
    head = lines.index("Numbers of cpu devices (dim 0 down, dim 2 to the right)")
    grid = [line.split() for line in lines[head + 1 :]]
    assert grid[0] == ["0:2", "2:4"]
    assert grid[1:] == [[f"{2 * i}:{2 * i + 2}", str(2 * i), str(2 * i + 1)] for i in range(4)]


def test_replicated_dims_and_devices_are_told() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    x = jax.device_put(jnp.zeros((8, 4)), NamedSharding(mesh, PartitionSpec(None, "model")))
    report = explained(x)
    assert report.leaves[0].describe() == ("dim 1 in 2 parts over model, each part on 4 devices")
    assert "[:, 0:2]     64  cpu:0, cpu:2, cpu:4, cpu:6" in str(report)
    whole = jax.device_put(jnp.zeros(3), NamedSharding(mesh, PartitionSpec()))
    assert explained(whole).leaves[0].describe() == "whole on 8 devices"


def test_padding_of_a_sharded_value_is_counted() -> None:
    strategy = jaxdist.MirroredStrategy()
    rules = [("*", partition.Shard(0, pad=True, min_bytes=0))]
    placed: dict[str, Any] = partition.place(strategy, {"w": jnp.ones((13, 2))}, rules)
    report = explained(placed, strategy)
    (leaf,) = report.leaves
    held = placed["w"].held
    assert (leaf.shape, leaf.stored) == ((13, 2), held.shape)
    assert leaf.padding_bytes == held.nbytes - 13 * 2 * 4 == 3 * 2 * 4
    assert "24 bytes of padding" in str(report)
    assert "It is stored as [16, 2]" in str(report)
    assert report.bytes_on(jax.devices()[0]) == held.addressable_shards[0].data.nbytes


def test_values_of_replicas_variables_and_keys_are_arrays_too() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        variable = jaxdist.Variable(jnp.ones(4))
    rows = jax.device_put(np.ones((4, 2), np.float32), strategy.per_replica_sharding)
    value = {
        "variable": variable,
        "rows": jaxdist.PerReplica.of_global(rows),
        "apart": jaxdist.PerReplica([jnp.ones(2), jnp.ones(3)]),
        "key": jax.random.key(0),
        "number": 3,
        "text": "x",
    }
    report = explained(value, strategy)
    assert {leaf.name: (leaf.role, leaf.num_bytes) for leaf in report.leaves} == {
        "['variable']": ("other", 16),
        "['rows']": ("batch", 32),
        "['apart'].values[0]": ("batch", 8),
        "['apart'].values[1]": ("batch", 12),
        "['key']": ("other", 8),
    }
    assert [leaf.placed for leaf in report.leaves if leaf.name == "['rows']"] == ["per replica"]
    assert report.bytes_on(jax.devices()[1], "batch") == 16


def test_keys_have_the_bytes_of_their_numbers_on_each_device() -> None:
    strategy = jaxdist.MirroredStrategy()
    keys = jax.device_put(jax.random.split(jax.random.key(0), 16), strategy.per_replica_sharding)
    (leaf,) = explained(keys).leaves
    data = jax.random.key_data(keys)
    assert leaf.num_bytes == data.nbytes
    assert {s.device: s.num_bytes for s in leaf.shards} == {
        s.device: s.data.nbytes for s in data.addressable_shards
    }


def test_an_array_at_two_places_is_counted_once() -> None:
    x = jnp.ones(4)
    assert explained({"a": x, "b": [x, x]}).num_bytes == 16
    shared = nnx.Param(jnp.ones(4))

    class Tied(nnx.Module):
        def __init__(self) -> None:
            self.up, self.down = shared, shared

    assert [leaf.num_bytes for leaf in explained((Tied(), Tied())).leaves] == [16]


def test_roles_are_those_of_the_variables_and_of_optax() -> None:
    model = nnx.Sequential(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    plain = {"w": jnp.ones(3)}
    report = explained((model, optimizer, optax.adam(0.1).init(plain)))
    by_role = {
        role: sum(leaf.num_bytes for leaf in report.leaves if leaf.role == role)
        for role in ("parameters", "optimizer", "other")
    }
    parameters = 4 * (4 * 2 + 2 + 2 + 2)
    # Two moments and a count, once for the module and once for the plain parameters; NNX counts the
    # steps as well. The others are the statistics of the norm.
    assert by_role["parameters"] == parameters
    assert by_role["optimizer"] == (2 * parameters + 4 + 4) + (2 * 12 + 4)
    assert by_role["other"] == 2 * 2 * 4


def test_arrays_of_plain_containers_have_their_names_instead_of_other() -> None:
    strategy = jaxdist.MirroredStrategy()
    tree = {
        "params": {"dense": {"kernel": jnp.ones((4, 2)), "bias": jnp.ones(2)}},
        "opt_state": optax.sgd(0.1, momentum=0.9).init({"w": jnp.ones(5)}),
        "stats": [jnp.ones(3), (jnp.ones(4),)],
        "rows": jaxdist.PerReplica([jnp.ones(1)] * 8),
    }
    report = explained(tree, strategy)
    kernel = next(leaf for leaf in report.leaves if leaf.shape == (4, 2))
    assert (kernel.name, kernel.use) == ("['params']['dense']['kernel']", "params")
    assert {leaf.use for leaf in report.leaves} == {"params", "optimizer", "stats", "batch"}
    text = report.text()
    assert re.search(r"each of +optimizer +batch +params +stats +in all", text)
    assert not re.search(r"\bother\b", text)
    assert {leaf.use for leaf in explained([jnp.ones(2), {"a": jnp.ones(3)}]).leaves} == {
        "[0]",
        "[1]",
    }
    # Nothing is known of an array alone.
    assert explained(jnp.ones(2)).leaves[0].use == "other"


def test_of_many_names_the_largest_are_columns_and_the_rest_is_other() -> None:
    report = explained({f"layer_{n}": jnp.ones(n + 1) for n in range(20)})
    head, row = report.text().splitlines()[2:4]
    assert head.split()[2:] == [*(f"layer_{n}" for n in range(14, 20)), "other", "in", "all"]
    other = 4 * sum(range(1, 15))
    assert re.search(rf" {other} B +{report.num_bytes} B", row)


def test_arguments_of_a_program_have_the_names_of_their_arguments() -> None:
    strategy = jaxdist.MirroredStrategy()
    program = strategy.lower(
        lambda p, n: (p["w"], n["a"]["b"] + 1), ({"w": jnp.ones(8)}, {"a": {"b": 3}})
    )
    report = jaxdist.explain(program)
    assert [(a.leaf.name, a.leaf.use) for a in report.arguments] == [
        ("args[0]['w']", "parameters"),
        ("args[1]['a']['b']", "args[1]"),
    ]
    assert ("arguments: args[1]", 4) in report.rows()


def test_shapes_are_shown_where_a_step_would_place_them() -> None:
    strategy = jaxdist.MirroredStrategy()
    shape = jax.ShapeDtypeStruct((16, 2), jnp.float32)
    assert explained(shape).leaves[0].placed == "abstract"
    assert "on no device" in str(explained(shape))
    (leaf,) = explained(shape, strategy).leaves
    assert leaf.describe() == "whole on 8 devices"
    (batch,) = explained(jaxdist.PerReplica.of_global(shape), strategy).leaves
    assert batch.describe() == "dim 0 in 8 parts over replica"


def test_a_report_is_text_a_table_of_rich_and_html() -> None:
    report = explained({"<w>": jnp.ones((4, 2))})
    console = rich.console.Console(width=200, record=True, file=io.StringIO())
    console.print(report)
    shown = console.export_text()
    for words in ("['<w>']", "float32[4, 2]", "32 B"):
        assert words in str(report)
        assert words in shown
    html = report._repr_html_()
    assert "&lt;w&gt;" in html
    assert "<table>" in html


def test_many_arrays_are_summed_up_and_many_parts_too() -> None:
    report = explained({str(i): jnp.ones(4) for i in range(20)})
    assert "  and 4 smaller arrays, 64 B" in str(report)


@pytest.mark.parametrize("value", [None, 3, "x", [], {"a": 1}, object()])
def test_what_has_no_arrays_is_refused(value: object) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^explain was given value=.*which has no arrays"):
        jaxdist.explain(value)


def test_a_strategy_explains_itself_alone() -> None:
    strategy = jaxdist.OneDeviceStrategy("cpu:0")
    with pytest.raises(ArgumentTypeError, match="Leave strategy out"):
        jaxdist.explain(strategy, strategy)
    wrong: Any = "cpu"
    with pytest.raises(ArgumentTypeError, match="strategy is a strategy of jaxdist"):
        jaxdist.explain(jnp.ones(2), wrong)


def test_donated_arrays_and_texts_need_no_memory() -> None:
    x = jnp.ones(4)
    x.delete()
    key = jax.random.key(0)
    key.delete()
    texts = np.array(["a", "b"])
    report = explained(
        {"gone": x, "key": key, "texts": texts, "objects": np.array([None]), "y": jnp.ones(2)}
    )
    assert [(leaf.name, leaf.placed) for leaf in report.leaves] == [
        ("['gone']", "donated or deleted"),
        ("['key']", "donated or deleted"),
        ("['y']", "on one device"),
    ]
    assert report.bytes_on(jax.devices()[0]) == 8


def test_a_traced_value_is_refused_by_name() -> None:
    with pytest.raises(ContextError, match=r"\['w'\] is a tracer"):
        jax.jit(lambda x: jaxdist.explain({"w": x}))(1.0)


def test_keys_that_cannot_be_sorted_are_refused() -> None:
    with pytest.raises(ArgumentError, match="explain was given"):
        jaxdist.explain({1: jnp.ones(2), "a": jnp.ones(2)})


def test_a_model_of_fit_is_its_module_and_its_optimizer() -> None:
    strategy = jaxdist.MirroredStrategy()
    model = jaxdist.fit.Model(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), strategy)
    names = [leaf.name for leaf in explained(model).leaves]
    assert sorted(names) == ["bias", "kernel"]
    model.compile(optimizer=optax.adam(0.1), loss="mse")
    report = explained({"it": model})
    moments = [f"['it']/optimizer/opt_state/0/{m}/{p}" for m in ("mu", "nu") for p in names]
    roles = {leaf.name: leaf.role for leaf in report.leaves}
    assert {roles[name] for name in moments} == {"optimizer"}
    assert roles["['it']/kernel"] == roles["['it']/bias"] == "parameters"
    assert report.bytes_on(jax.devices()[0], "parameters") == 4 * 9
