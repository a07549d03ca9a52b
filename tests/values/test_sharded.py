"""`Sharded`: one array of which each replica holds a piece."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist
from jaxdist import PerReplica, Sharded
from jaxdist._values import Cut, cut_and_place, from_state
from tests.tables import examples


@pytest.fixture(scope="module")
def strategy() -> jaxdist.MirroredStrategy:
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])


@settings(deadline=None, max_examples=examples(50))
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    num_replicas=st.integers(1, 8),
    data=st.data(),
)
def test_cut_and_put_together_is_the_same_array(
    shape: list[int], num_replicas: int, data: st.DataObject
) -> None:
    layout = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)]).layout
    dim = data.draw(st.integers(0, len(shape) - 1))
    array = np.arange(np.prod(shape), dtype="float32").reshape(shape)
    held = cut_and_place(array, Cut(dim, shape[dim]), layout)
    rows = -(-shape[dim] // num_replicas)
    assert {s.data.shape[dim] for s in held.array.addressable_shards} == {rows}
    assert held.shape == array.shape
    np.testing.assert_array_equal(held.whole(), array)


@pytest.mark.parametrize("eagerly", [False, True])
def test_step_sees_the_piece_and_gives_one_array_back(
    strategy: jaxdist.MirroredStrategy, eagerly: bool
) -> None:
    array = np.arange(14.0, dtype="float32").reshape(2, 7)
    held = cut_and_place(array, Cut(1, 7), strategy.layout)

    def step(x: Sharded, y: Any) -> Any:
        assert x.array.shape == (2, 3)
        return {"x": Sharded(x.array * y, x.dim, x.size)}

    jaxdist.config.run_eagerly(eagerly)
    try:
        found = strategy.run(step, (held, 2.0))["x"]
    finally:
        jaxdist.config.run_eagerly(False)
    np.testing.assert_array_equal(found.whole(), 2 * array)
    assert found.array.sharding == held.array.sharding


def test_program_says_that_it_is_sharded(strategy: jaxdist.MirroredStrategy) -> None:
    held = Sharded(np.zeros((2, 9), "float32"), dim=1, size=7)
    program = strategy.lower(lambda x: (x, x.array.sum()), (held,))
    assert program.inputs == {"args[0]": "sharded float32[2, 9]"}
    assert program.results == {
        "result[0]": "sharded float32[2, 3]",
        "result[1]": "per-replica float32[]",
    }


def test_reduce_gather_and_local_results_take_it_for_one_array(
    strategy: jaxdist.MirroredStrategy,
) -> None:
    array = np.arange(14.0, dtype="float32").reshape(2, 7)
    held = cut_and_place(array, Cut(1, 7), strategy.layout)
    np.testing.assert_array_equal(strategy.reduce("SUM", held, axis=None), array)
    np.testing.assert_array_equal(strategy.reduce("SUM", {"a": held}, axis=1)["a"], array.sum(1))
    np.testing.assert_array_equal(strategy.reduce("MEAN", held, axis=0), array.mean(0))
    np.testing.assert_array_equal(strategy.gather(held, axis=0), array)
    [alone] = strategy.experimental_local_results(held)
    np.testing.assert_array_equal(alone, array)
    both = strategy.experimental_local_results((held, PerReplica([1, 2, 3])))
    assert [int(x) for _, x in both] == [1, 2, 3]
    np.testing.assert_array_equal(both[1][0], array)


def test_it_goes_in_from_inside_jit_and_scan(strategy: jaxdist.MirroredStrategy) -> None:
    held = cut_and_place(np.arange(7.0, dtype="float32"), Cut(0, 7), strategy.layout)

    @jax.jit
    def thrice(x: Sharded) -> Sharded:
        def body(x: Sharded, _: None) -> tuple[Sharded, None]:
            return strategy.run(lambda x: Sharded(x.array + 1, *x.cut), (x,)), None

        return jax.lax.scan(body, x, None, length=3)[0]

    np.testing.assert_array_equal(thrice(held).whole(), np.arange(7.0) + 3)


def test_nnx_mapping_is_read_back() -> None:
    held = Sharded(jnp.ones(4), 0, 3)
    [(path, leaf)] = jax.tree_util.tree_flatten_with_path(held)[0]
    back = from_state({path[0].name: leaf})
    assert (back.dim, back.size, back.whole().tolist()) == (0, 3, held.whole().tolist())
    assert from_state({"array": leaf}) == {"array": leaf}


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: Sharded(np.zeros(3), 1, 3), jaxdist.errors.ArgumentError, "rank 1"),
        (lambda: Sharded(np.zeros(3), 0, 0), jaxdist.errors.ArgumentError, "from 1 up"),
    ],
)
def test_bad_declaration_is_refused(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def test_it_is_iterated_and_has_a_truth_value_as_an_array(
    strategy: jaxdist.MirroredStrategy,
) -> None:
    held = cut_and_place(np.arange(10.0, dtype="float32").reshape(5, 2), Cut(0, 5), strategy.layout)

    def rows(x: Sharded) -> Any:
        return [row for row, _ in zip(x, range(9), strict=False)]

    np.testing.assert_array_equal(strategy.run(rows, (held,)), held.whole())
    np.testing.assert_array_equal(rows(held), held.whole())
    with pytest.raises(ValueError, match="truth value"):
        bool(held)


def test_piece_has_no_whole(strategy: jaxdist.MirroredStrategy) -> None:
    held = cut_and_place(np.zeros(7), Cut(0, 7), strategy.layout)
    with pytest.raises(jaxdist.errors.ReplicaValueError, match="a piece of 3 of the 7"):
        strategy.run(lambda x: x.whole(), (held,))


def test_result_of_another_length_is_refused(strategy: jaxdist.MirroredStrategy) -> None:
    with pytest.raises(jaxdist.errors.ShapeError, match="are 3 on each"):
        strategy.run(lambda: Sharded(jnp.zeros(2), 0, 8))


def test_array_cut_for_other_replicas_is_refused_by_name(
    strategy: jaxdist.MirroredStrategy,
) -> None:
    other = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    held = cut_and_place(np.zeros(7), Cut(0, 7), other.layout)
    with pytest.raises(jaxdist.errors.ReplicaValueError, match=r"args\[0\]\['m'\].*8 rows, not 9"):
        strategy.run(lambda x: x, ({"m": held},))
    same_length = cut_and_place(np.zeros(6), Cut(0, 6), other.layout)
    with pytest.raises(jaxdist.errors.ReplicaValueError, match="on devices"):
        strategy.run(lambda x: x, (same_length,))


def test_virtual_replicas_refuse_pieces_by_name() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"], deterministic=4)
    with pytest.raises(
        jaxdist.errors.ReplicaValueError, match=r"deterministic=True[\s\S]*value\.whole\(\)"
    ):
        strategy.run(lambda x: x, (Sharded(np.arange(8.0, dtype="float32"), 0, 8),))


@settings(deadline=None, max_examples=examples(30))
@given(
    split=st.none()
    | st.integers(0, 5)
    | st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["stage", "a_over_b", "model", "x@y"])),
        min_size=1,
        max_size=3,
    ).map(tuple),
    axes=st.none() | st.lists(st.sampled_from(["data", "slice_over"]), min_size=1).map(tuple),
)
def test_a_key_of_nnx_has_the_whole_cut(split: Any, axes: Any) -> None:
    value = Sharded(np.ones((4, 4)), 1, 4, axes, split)
    [(path, child)], _ = jax.tree_util.tree_flatten_with_path(value)
    assert from_state({path[0].name: child}).cut == value.cut
