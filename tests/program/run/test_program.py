"""A program as a value to look at."""

import inspect
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jaxdist
from jaxdist import PerReplica, get_replica_context, hlo
from jaxdist.errors import ShapeError

W = np.ones((4, 2), np.float32)


def _batch(strategy: jaxdist.Strategy, rows: int = 16) -> jax.Array:
    return jax.device_put(np.ones((rows, 4), np.float32), strategy.per_replica_sharding)


def _step(params: Any, x: Any) -> Any:
    def loss_of(p: Any) -> Any:
        return jnp.mean((x @ p["w"] + p["b"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    grads = get_replica_context().all_reduce("mean", grads)  # the user's line
    return jax.tree.map(lambda p, g: p - g, params, grads), loss


def _line_of(text: str, fn: Any) -> int:
    lines, first = inspect.getsourcelines(fn)
    return first + next(i for i, line in enumerate(lines) if text in line)


def test_a_program_shows_inputs_results_and_collectives() -> None:
    strategy = jaxdist.MirroredStrategy()
    params = {"w": W, "b": np.zeros((1, 2), np.float32)}
    program = strategy.lower(_step, (params, _batch(strategy)))
    assert program.inputs == {
        "args[0]['b']": "mirrored float32[1, 2]",
        "args[0]['w']": "mirrored float32[4, 2]",
        "args[1]": "per-replica float32[16, 4]",
    }
    assert program.results == {
        "result[0]['b']": "mirrored float32[1, 2]",
        "result[0]['w']": "mirrored float32[4, 2]",
        "result[1]": "per-replica float32[]",
    }
    found = program.traced_collectives
    assert {(c.kind, c.axes, c.grouped, c.times) for c in found} == {
        ("psum", ("replica",), False, 1)
    }
    assert sum(c.operands for c in found) == 1
    assert sum(c.bytes_per_device for c in found) == 4 * (8 + 2)
    (source,) = {c.source for c in found}
    assert source.startswith(f"{__file__}:{_line_of('the user', _step)} (_step")
    text = repr(program)
    for part in (
        "Program _step for 8 replica(s) x 1 logical",
        *program.inputs,
        *program.results,
        "psum over replica: ",
        f"{found[0].bytes_per_device} bytes of a replica",
        source,
    ):
        assert part in text


def test_collectives_in_loops_are_counted_and_groups_are_told() -> None:
    strategy = jaxdist.MirroredStrategy()
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def step(w: Any, x: Any) -> Any:
        def inner(c: Any, _: Any) -> Any:
            return jax.lax.psum(c, "replica", axis_index_groups=groups), None

        def outer(c: Any, _: Any) -> Any:
            c, _ = jax.lax.scan(inner, c, length=5)
            return jax.lax.pmax(c, "replica"), None

        out, _ = jax.lax.scan(outer, x, length=3)
        n = jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: jax.lax.psum(c, "replica"), w)
        return out, n, jax.lax.all_gather(x, "replica")

    x = PerReplica([np.ones(4, np.float16)] * 8)
    found = strategy.lower(step, (np.ones(2, np.float32), x)).traced_collectives
    seen = [(c.kind, c.times, c.grouped, c.bytes_per_device) for c in found]
    assert seen == [
        ("psum", 15, True, 8),
        ("pmax", 3, False, 8),
        ("psum", None, False, 8),
        ("all_gather", 1, False, 8),
    ]
    assert all(c.source.startswith(__file__) for c in found)
    assert re.search(r"in groups.* x 15,", repr(found[0]))
    assert "x (a while loop)" in repr(found[2])


def test_one_jitted_function_called_twice_is_two_collectives() -> None:
    strategy = jaxdist.MirroredStrategy()
    total = jax.jit(lambda v: jax.lax.psum(v, "replica"))
    program = strategy.lower(lambda x: total(x) + total(2 * x), (PerReplica(range(8)),))
    assert [c.kind for c in program.traced_collectives] == ["psum", "psum"]


def test_nnx_variables_come_first_and_have_names() -> None:
    strategy = jaxdist.MirroredStrategy()
    model: Any = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    x = jax.device_put(np.ones((16, 2), np.float32), strategy.per_replica_sharding)
    program = strategy.lower(lambda m, x: m(x), (model, x))
    assert list(program.inputs)[-1] == "args[1]"
    assert [n for n in program.inputs if "mean" in n] == ["args[0].mean"]
    assert [n for n in program.results if "mean" in n] == ["args[0].mean"]
    assert [(c.kind, c.source) for c in program.traced_collectives] == [
        ("psum", "jaxdist, for args[0].mean"),
        ("psum", "jaxdist, for args[0].var"),
    ]
    np.testing.assert_array_equal(model.mean[...], [0, 0])


def test_shapes_may_stand_for_arrays() -> None:
    strategy = jaxdist.MirroredStrategy()
    abstract = jax.ShapeDtypeStruct((3,), jnp.bfloat16)
    program = strategy.lower(lambda x: x + 1, (abstract,))
    assert program.inputs == {"args[0]": "mirrored bfloat16[3]"}
    laid_out = jax.ShapeDtypeStruct((16,), "float32", sharding=strategy.per_replica_sharding)
    program = strategy.lower(lambda x: x + 1, (laid_out,))
    assert program.inputs == {"args[0]": "per-replica float32[16]"}


def test_lowering_runs_nothing_and_compiling_gives_the_hlo() -> None:
    strategy = jaxdist.MirroredStrategy()
    program = strategy.lower(_step, ({"w": W, "b": np.zeros((1, 2), np.float32)}, _batch(strategy)))
    compiled = program.compile()
    assert "HloModule" in compiled.as_text()
    assert sum(c.operands for c in compiled.collectives if c.kind == "all-reduce") == 1
    assert sum(c.bytes_per_device for c in compiled.collectives) == 40
    # Of the program too: what XLA made of the three sums that were asked for.
    assert [(c.kind, c.count, c.num_bytes) for c in program.collectives] == [("all-reduce", 1, 40)]
    assert program.collectives == program.explain().compiled


def test_an_mlp_step_has_the_collectives_of_the_hand_written_one() -> None:
    strategy = jaxdist.MirroredStrategy()
    rng = np.random.default_rng(0)
    sizes = [4, 8, 8, 2]
    params = [
        {"w": rng.normal(size=(a, b)).astype(np.float32), "b": np.zeros((1, b), np.float32)}
        for a, b in itertools.pairwise(sizes)
    ]
    x = rng.normal(size=(32, 4)).astype(np.float32)
    y = rng.normal(size=(32, 2)).astype(np.float32)

    def loss_of(params: Any, x: Any, y: Any) -> Any:
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean((x - y) ** 2)

    def step(params: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        grads = get_replica_context().all_reduce("mean", grads)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    def by_hand(params: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        grads = jax.lax.pmean(grads, "replica")
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss[None]

    rows = PartitionSpec("replica")
    mapped = jax.jit(
        jax.shard_map(
            by_hand,
            mesh=strategy.mesh,
            in_specs=(PartitionSpec(), rows, rows),
            out_specs=(PartitionSpec(), rows),
            check_vma=False,
        )
    )
    given = (
        jax.device_put(params, strategy.replicated_sharding),
        jax.device_put(x, strategy.per_replica_sharding),
        jax.device_put(y, strategy.per_replica_sharding),
    )
    theirs = hlo.collectives(mapped.lower(*given).compile().as_text() or "")
    ours = strategy.lower(step, given).compile().collectives
    assert len(ours) > 0
    assert [(c.kind, c.bytes_per_device) for c in ours] == [
        (c.kind, c.bytes_per_device) for c in theirs
    ]
    # All of these are small, and go as one operand.
    assert ([c.operands for c in ours], [c.operands for c in theirs]) == ([1], [6])
    new, loss = strategy.run(step, given)
    expected, expected_loss = mapped(*given)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    np.testing.assert_allclose(loss.array, expected_loss, rtol=1e-6)


@pytest.mark.parametrize("empty", [None, (), {}, {"a": "text"}], ids=repr)
def test_a_step_may_return_no_arrays(empty: Any) -> None:
    strategy = jaxdist.MirroredStrategy()
    assert strategy.run(lambda: empty) == empty
    assert strategy.run(lambda x: empty, (np.float32(1),)) == empty


def test_a_per_replica_of_shapes_stands_for_one_of_arrays() -> None:
    strategy = jaxdist.MirroredStrategy()

    def step(x: Any) -> Any:
        return jaxdist.get_replica_context().all_reduce("sum", x)

    rows = jax.ShapeDtypeStruct((16, 3), np.float32)
    program = strategy.lower(step, (PerReplica.of_global(rows),))
    arrays = strategy.lower(step, (PerReplica([np.zeros((2, 3), np.float32)] * 8),))
    assert program.inputs == arrays.inputs
    assert [c.kind for c in program.compile().collectives] == ["all-reduce"]
    with pytest.raises(ShapeError, match="Dim 0 must be a multiple of 8"):
        strategy.lower(step, (PerReplica.of_global(jax.ShapeDtypeStruct((9,), np.float32)),))


def test_all_arguments_whose_values_do_not_fit_are_named() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    ones = np.ones(2, np.float32)
    mixed = PerReplica([ones, ones.astype(np.int32)])
    ranks = PerReplica([ones, ones[None]])
    with pytest.raises(ShapeError) as error:
        strategy.run(lambda a, b, c: a, (mixed, PerReplica([ones, ones]), {"x": ranks}))
    found = str(error.value)
    assert "args[0] is a PerReplica" in found
    assert "args[2]['x'] is a PerReplica" in found
    assert "args[1]" not in found
    assert found.count("astype") == 1
