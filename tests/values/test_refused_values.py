"""Per-replica values, sharded arrays and variables refuse what they cannot hold, by name."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import IndexedSlices, PerReplica, Variable
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    JaxdistError,
    MissingNameError,
    ReplicaValueError,
    ShapeError,
    UnsupportedError,
)
from tests.strategies.oracle import refused


def two() -> jaxdist.MirroredStrategy:
    """Two replicas."""
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])


def shapes(*rows: int) -> PerReplica:
    """Shapes without arrays, with so many rows on each replica."""
    return PerReplica([jax.ShapeDtypeStruct((n, 3), "float32") for n in rows])


def variable(value: Any = (1.0, 2.0), **options: Any) -> Variable:
    """A variable that two replicas share."""
    with two().scope():
        return Variable(jnp.asarray(value), name="w", **options)


def cut(x: Any, axes: tuple[str, ...] | None = None) -> Any:
    """`x` in pieces along dim 0."""
    return jaxdist.Sharded(x, 0, 4, axes=axes)


Row = tuple[Callable[[], Any], type[JaxdistError], tuple[str, ...]]
ROWS: dict[str, Row] = {
    "slices whose rows do not fit the whole": (
        lambda: IndexedSlices(jnp.ones((2, 3)), jnp.array([0, 1]), dense_shape=(5, 4)),
        ShapeError,
        ("dense_shape=[5, 4]", "Pass dense_shape=[5, 3]"),
    ),
    "slices of a whole without dims": (
        lambda: IndexedSlices(jnp.ones((2, 3)), jnp.array([0, 1]), dense_shape=()),
        ShapeError,
        ("dense_shape=[]", "Pass dense_shape=[1, 3]"),
    ),
    "a global value that is no array": (
        lambda: PerReplica.of_global([1.0, 2.0]),  # type: ignore[arg-type]
        ArgumentTypeError,
        ("PerReplica.of_global was given array=", "strategy.per_replica_sharding"),
    ),
    "rows that shards cannot share": (
        lambda: PerReplica.of_global(jnp.arange(8.0), replicas_per_shard=3),
        ReplicaValueError,
        ("replicas_per_shard=3", "8 rows, float32[8]", "Pass 1 or 2 or 4 or 8"),
    ),
    "shapes that differ": (
        lambda: two().lower(lambda x: x, (shapes(2, 3),)),
        ReplicaValueError,
        ("2 jax.ShapeDtypeStruct(s)", "2 replicas", "the same for all"),
    ),
    "too few shapes": (
        lambda: two().lower(lambda x: x, (shapes(2),)),
        ReplicaValueError,
        ("1 jax.ShapeDtypeStruct(s)", "2 replicas", "Pass 2 equal ones"),
    ),
    "a piece that is no array": (
        lambda: jaxdist.Sharded("piece", 0, 4),
        ArgumentTypeError,
        ("Sharded was given array='piece'", "Pass an array"),
    ),
    "replica axes that are no tuple": (
        lambda: cut(jnp.ones(4), axes="replica"),  # type: ignore[arg-type]
        ArgumentTypeError,
        ("Sharded was given axes='replica'", "Pass for instance axes=('replica',)"),
    ),
    "replica axes that are none": (
        lambda: cut(jnp.ones(4), axes=()),
        ArgumentTypeError,
        ("Sharded was given axes=()", "leave it out for all of them"),
    ),
    "a piece that a map replaced": (
        lambda: two().run(lambda x: x, (jax.tree.map(lambda _: 3, cut(jnp.ones(4))),)),
        ReplicaValueError,
        ("args[0]", "holds a int, 3", "is_leaf=", "tx = jaxdist.sharded_update(tx)"),
    ),
    "a sum of random keys in pieces": (
        lambda: two().run(
            lambda keys: jaxdist.get_replica_context().all_reduce("sum", {"k": keys}),
            (cut(jax.random.split(jax.random.key(0), 4)),),
        ),
        ArgumentTypeError,
        ("cannot reduce value['k']", "dtype key<fry>", "gather it instead"),
    ),
    "a piece over the axes of another strategy": (
        lambda: two().run(lambda x: x, (cut(jnp.ones(4), axes=("other",)),)),
        ReplicaValueError,
        ("cut over the axes ('other',)", "('replica',)", "partition.place("),
    ),
    "a type that is no dtype": (
        lambda: Variable(1.0, name="w", dtype="no such type"),
        ArgumentTypeError,
        ("Variable 'w' was given dtype='no such type'", "jnp.float32"),
    ),
    "a dtype of texts": (
        lambda: Variable(1.0, name="w", dtype="S3"),
        ArgumentTypeError,
        ("Variable 'w' was given dtype='S3'", "numbers or of bool"),
    ),
    "texts as the new value": (
        lambda: variable().assign(np.array(["a", "b"])),
        ArgumentTypeError,
        ("w",),
    ),
    "another shape": (
        lambda: variable().set_shape([3]),
        ShapeError,
        ("Variable 'w'.set_shape was given shape=[3]", "has the shape [2]"),
    ),
    "indices of each replica outside of a step": (
        lambda: variable().scatter_nd_add(PerReplica([[[0]], [[1]]]), [1.0]),
        ArgumentTypeError,
        ("Variable 'w'.scatter_nd_add was given indices=", "the same for all replicas"),
    ),
    "an index with too many dims": (
        lambda: variable()[0, 0],
        ArgumentError,
        ("float32[2]", "Pass an index for 1 dim(s)"),
    ),
    "a choice between the rows of replicas that are summed": (
        lambda: in_step(
            variable(aggregation=jaxdist.VariableAggregation.SUM),
            lambda w: w.scatter_update(IndexedSlices(jnp.ones(1), jnp.array([0]))),
        ),
        UnsupportedError,
        ("Variable 'w'.scatter_update", "VariableAggregation.SUM", "ONLY_FIRST_REPLICA"),
    ),
    "traced rows outside of a step": (
        lambda: scatter_in_vmap(variable()),
        ContextError,
        ("Variable 'w'.scatter_add was given a traced value", "outside strategy.run"),
    ),
    "a Jacobian of a variable": (
        lambda: jax.jacrev(lambda x: x * x)(variable()),
        ArgumentTypeError,
        ("jax.jacrev was called with Variable 'w' float32[2]", "w.value()"),
    ),
    "a name of another library": (
        lambda: getattr(jaxdist.errors, "Aborted" + "Error"),
        MissingNameError,
        ("jaxdist.errors.AbortedError",),
    ),
}


def scatter_in_vmap(held: Variable) -> Any:
    """Add rows that exist only while `jax.vmap` traces."""
    one = jnp.array([0])
    return jax.vmap(lambda x: held.scatter_add(IndexedSlices(x, one)))(jnp.ones((3, 1)))


def in_step(held: Variable, fn: Callable[[Variable], Any]) -> Any:
    """Call `fn` with a variable of two replicas in a step."""
    return two().run(lambda: fn(held))


@pytest.mark.parametrize("name", ROWS)
def test_what_cannot_be_held_is_refused_by_name(name: str) -> None:
    call, error, parts = ROWS[name]
    with refused(error, *parts) as caught:
        call()
    assert str(caught.value).count("\n\n") >= 1


class Grows(list[Any]):
    """A list that has one more entry than it was made of."""

    def __init__(self, values: Any) -> None:
        super().__init__([*values, None])


def test_a_container_that_is_rebuilt_with_other_entries_names_both_counts() -> None:
    parts = "args[0]", "a Grows", "3 entries, not 2"
    with refused(ArgumentTypeError, *parts):
        two().run(lambda x: x, (Grows([cut(jnp.ones(4))]),))


def test_a_traced_mask_keeps_the_error_of_jax() -> None:
    held = variable([1.0, 2.0, 3.0])
    with pytest.raises(jax.errors.NonConcreteBooleanIndexError):
        two().run(lambda mask: held[mask], (jnp.array([True, False, True]),))


def test_a_scan_over_an_array_in_pieces_names_the_dim() -> None:
    def scan(held: Any) -> Any:
        # The scan takes rows away, and the node still says that dim 0 has 4.
        return jax.lax.scan(lambda c, row: (c, row + 1), 0, held)

    with refused(ReplicaValueError, "cut along dim 0", "Dim 0 of the array has 4 elements"):
        two().run(scan, (cut(jnp.ones((4, 3))),))


@pytest.mark.parametrize("name", ["no_such_name", "ndims"])
def test_an_attribute_that_a_value_lacks_is_named_with_its_class(name: str) -> None:
    for held in (variable(), variable()[0]):
        kind = type(held).__name__
        with pytest.raises(AttributeError, match=f"'{kind}' object has no attribute '{name}'"):
            getattr(held, name)
