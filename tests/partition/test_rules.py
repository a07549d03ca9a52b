"""Patterns, rules, and the errors for rules that do not fit."""

import fnmatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, PartitionSpec

import jaxdist
from jaxdist import PerReplica, cost, partition
from jaxdist.errors import ArgumentError, ArgumentTypeError, ShapeError
from jaxdist.partition import ByNames, Replicate, Rules, Shard, Split
from tests.tables import examples

PATH = "layers/0/mlp/up/kernel"


def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    devices = np.asarray(jax.devices("cpu")[: int(np.prod(shape))], dtype=object).reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def grid(replicas: int, logical: int) -> jaxdist.MirroredStrategy:
    layout = mesh((replicas, logical), ("replica", "logical"))
    return jaxdist.MirroredStrategy(mesh=layout, replica_axes=("replica",))


def shapes() -> dict[str, Any]:
    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, "float32")

    return {
        "layers": [{"mlp": {"up": {"kernel": leaf(8, 10), "bias": leaf(10)}}}],
        "norm": {"scale": leaf(8)},
        "temperature": leaf(),
    }


def is_match(pattern: str, path: str) -> bool:
    """Whether a rule with the pattern is about a parameter with the path."""
    tree: Any = jax.ShapeDtypeStruct((2,), "float32")
    for name in reversed(path.split("/")):
        tree = {name: tree}
    rules = Rules([(pattern, Replicate())])
    try:
        partition.place(jaxdist.OneDeviceStrategy("cpu:0"), tree, rules)
    except ArgumentError as error:
        if f"{pattern!r}; the nearest path is {path}" not in str(error):
            raise
        return False
    return True


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (PATH, True),
        ("mlp/up/kernel", True),
        ("kernel", True),
        ("*", True),
        ("*/kernel", True),
        ("layers/*/mlp/*/kernel", True),
        ("layers/**/kernel", True),
        ("{up,down}/kernel", True),
        ("mlp/{u,d}*/{kernel,bias}", True),
        ("/layers/*/mlp/up/kernel", True),
        ("/mlp/up/kernel", False),
        ("p/kernel", False),
        ("up", False),
        ("mlp/kernel", False),
        ("layers/1/**", False),
        ("{down,gate}/kernel", False),
    ],
)
def test_pattern_matches_whole_segments_at_the_end_of_a_path(pattern: str, expected: bool) -> None:
    assert is_match(pattern, PATH) is expected


@settings(deadline=None, max_examples=examples(100))
@given(
    path=st.lists(st.text("ab", min_size=1, max_size=2), min_size=1, max_size=4),
    pattern=st.lists(st.text("ab*?", min_size=1, max_size=2), min_size=1, max_size=4),
)
def test_pattern_without_double_stars_is_file_name_matching_of_the_last_segments(
    path: list[str], pattern: list[str]
) -> None:
    parts = [p.replace("**", "*") for p in pattern]
    end = path[-len(parts) :]
    wanted = len(end) == len(parts) and all(map(fnmatch.fnmatchcase, end, parts))
    assert is_match("/".join(parts), "/".join(path)) is wanted


def test_nearest_path_is_the_one_that_differs_by_a_slip() -> None:
    leaf = jax.ShapeDtypeStruct((2,), "float32")
    layer = {"mlp": {"up": {"kernel": leaf}}, "attention": {"query": {"kernel": leaf}}}
    tree = {"layers": [layer], "norm": {"scale": leaf}}
    for pattern, nearest in {
        "mlp/upp/kernel": "layers/0/mlp/up/kernel",
        "attn/query/kernel": "layers/0/attention/query/kernel",
    }.items():
        with pytest.raises(ArgumentError, match=f"'{pattern}'; the nearest path is {nearest}\n"):
            partition.place(grid(1, 1), tree, Rules([(pattern, Replicate())]))
    assert partition.place(grid(1, 1), {}, Rules([("x", Replicate())])) == {}


@pytest.mark.parametrize(
    ("rules", "error", "says"),
    [
        (
            [("mlp/up/*", Split(-1))],
            ArgumentError,
            ["no rule matches", "norm/scale", "otherwise="],
        ),
        (
            Rules([("up/kernel", Split(0)), ("*/kernel", Split(1))], Replicate()),
            ArgumentError,
            ["more than one", PATH, "'up/kernel' and '*/kernel'"],
        ),
        (
            Rules([("mpl/up/kernel", Split(0))], Replicate()),
            ArgumentError,
            ["match no parameter of tree", f"the nearest path is {PATH}"],
        ),
        (
            Rules([("up/kernel", Split(1))], Replicate()),
            ShapeError,
            [PATH, "4 logical devices", "10", "8 and 12", "2 or 5", "Split dim 0"],
        ),
        (
            Rules([("up/kernel", Shard(1))], Replicate()),
            ShapeError,
            ["2 replicas", "9", "8 and 10"],
        ),
        (
            Rules([("scale", Split(1))], Replicate()),
            ShapeError,
            ["norm/scale, float32[8]", "names dim 1", "[-1, 0]"],
        ),
        (
            Rules([("scale", Shard(axes=("data",)))], Replicate()),
            ArgumentError,
            ["('replica',)", "slice"],
        ),
        (Rules([("scale", ByNames({}))], Replicate()), ArgumentError, ["no names for its dims"]),
    ],
    ids=["none", "two", "unused", "split", "shard", "rank", "axes", "names"],
)
def test_rules_that_do_not_fit_are_told_with_what_would(
    rules: Any, error: type[Exception], says: list[str]
) -> None:
    tree = shapes()
    if "9" in says:
        tree["layers"][0]["mlp"]["up"]["kernel"] = jax.ShapeDtypeStruct((8, 9), "float32")
    with pytest.raises(error) as caught:
        partition.place(grid(2, 4), tree, rules)
    for part in says:
        assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Split("0"), ArgumentTypeError),  # type: ignore[arg-type]
        (lambda: Shard(0, 0), ArgumentError),
        (lambda: Shard(axes=()), ArgumentTypeError),
        (lambda: Shard(min_bytes=-1), ArgumentError),
        (lambda: ByNames({"embed": 3}), ArgumentTypeError),  # type: ignore[dict-item]
        (lambda: ByNames(None), ArgumentTypeError),  # type: ignore[arg-type]
        (lambda: Shard(axes=3), ArgumentTypeError),  # type: ignore[arg-type]
        (lambda: partition.fsdp(min_bytes="1"), ArgumentTypeError),  # type: ignore[arg-type]
        (lambda: partition.fsdp(min_bytes=True), ArgumentTypeError),
        (lambda: Rules(partition.fsdp()), ArgumentTypeError),  # type: ignore[arg-type]
        (lambda: Rules([], activations=[("a", Shard())]), ArgumentTypeError),
        (lambda: Rules([]).placement_of(3), ArgumentTypeError),  # type: ignore[arg-type]
        (lambda: Rules([]).constrain(1, 3), ArgumentTypeError),  # type: ignore[arg-type]
        (lambda: Rules([("a", Split)]), ArgumentTypeError),  # type: ignore[list-item]
        (lambda: Rules(["ab"]), ArgumentTypeError),  # type: ignore[list-item]
        (lambda: Rules([("a", Split(0)), ("a", Split(1))]), ArgumentError),
        (lambda: partition.place(grid(2, 1), {}, "fsdp"), ArgumentTypeError),
        (lambda: partition.place(None, {}, partition.fsdp()), ArgumentTypeError),  # type: ignore[arg-type]
        (lambda: partition.constrain(1, Shard()), ArgumentTypeError),  # type: ignore[arg-type]
        (lambda: Rules([], activations=[("a", Split(0))]).constrain(1, "b"), ArgumentError),
        (lambda: partition.tensor_parallel().placement_of("up/kernel/x") and None, None),
    ],
)
def test_what_is_no_rule_is_refused(make: Any, error: type[Exception] | None) -> None:
    if error is None:
        assert make() is None
        return
    with pytest.raises(error):
        make()


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: PerReplica(np.ones((2, 4))), ArgumentTypeError, "a PerReplica at x"),
        (lambda: np.array(["a"], object), ArgumentError, "cannot put x, object"),
        (lambda: nnx.BatchStat(jnp.ones(4)), ArgumentError, "wrt=.*none of 1 NNX variable"),
        (lambda: optax.adam(0.1).init({"up": jnp.ones(4)}), ArgumentError, "path is x/0/mu/up"),
    ],
    ids=["per_replica", "no_numbers", "filter", "optimizer"],
)
def test_what_rules_cannot_place_is_told_by_its_path(make: Any, error: Any, says: str) -> None:
    rules = [("uppp", Shard(0))] if says.endswith("up") else partition.fsdp(min_bytes=0)
    with pytest.raises(error, match=says):
        partition.place(grid(2, 1), {"x": make()}, rules, wrt=nnx.LoRAParam)


def test_ready_rules_that_find_nothing_to_split_say_so() -> None:
    tree = {"dense": {"weights": jax.ShapeDtypeStruct((8, 8), "float32")}}
    with pytest.raises(ArgumentError, match="none of the 9 rules matches one of the 1 parameters"):
        partition.place(grid(2, 4), tree, partition.tensor_parallel())


def specs(strategy: Any, rules: Any, **leaves: tuple[int, ...]) -> dict[str, Any]:
    tree = {k: jax.ShapeDtypeStruct(shape, "float32") for k, shape in leaves.items()}
    placed = partition.place(strategy, tree, rules)
    return {k: (getattr(v, "held", v).sharding.spec, v.shape) for k, v in placed.items()}


def test_largest_dim_that_the_replicas_divide_is_cut_and_else_the_least_padding() -> None:
    P = PartitionSpec
    found = specs(
        grid(4, 1),
        partition.fsdp(min_bytes=0),
        largest=(8, 16),
        divided=(8, 15),
        padded=(3, 7),
        short=(2, 2),
        scalar=(),
    )
    assert found == {
        "largest": (P(None, "replica"), (8, 16)),
        "divided": (P("replica"), (8, 15)),
        "padded": (P(None, "replica"), (3, 7)),
        "short": (P(), (2, 2)),
        "scalar": (P(), ()),
    }


def test_small_leaves_stay_whole_as_for_the_sharded_update() -> None:
    strategy = grid(4, 1)
    least = cost.pack_below(cost.links_of(strategy.layout).inner)
    size = 4 * (int(least / 4 / 4) + 4)
    found = specs(strategy, partition.fsdp(), large=(size,), small=(size - 8 * 4,))
    assert found["large"][0] == PartitionSpec("replica")
    assert found["small"][0] == PartitionSpec()


def test_split_and_shard_take_two_dims_and_axes_keep_the_order_of_the_mesh() -> None:
    P = PartitionSpec
    both = jaxdist.MirroredStrategy(
        mesh=mesh((2, 2, 2), ("slice", "data", "model")), replica_axes=("slice", "data")
    )
    rules = Rules(
        {
            "a": Shard(split=1),
            "b": Shard(axes=("data",), split=0),
            "c": Shard(1, axes=("data", "slice")),
            "d": Split(-1),
            "e": Shard(0, pad=True),
        }
    )
    found = specs(both, rules, a=(4, 8), b=(4, 8), c=(4, 8), d=(4, 8), e=(5, 2))
    assert {k: v[0] for k, v in found.items()} == {
        "a": P(("slice", "data"), "model"),
        "b": P("model", "data"),
        "c": P(None, ("slice", "data")),
        "d": P(None, "model"),
        "e": P(("slice", "data")),
    }


def test_names_of_dims_say_where_they_go() -> None:
    P = PartitionSpec

    def model() -> nnx.Linear:
        with nnx.use_eager_sharding(False):
            return nnx.Linear(
                8,
                4,
                kernel_metadata={"out_sharding": ("embed", "mlp")},
                bias_metadata={"out_sharding": ("mlp",)},
                rngs=nnx.Rngs(0),
            )

    linear: Any = nnx.eval_shape(model)
    partition.place(grid(2, 4), linear, ByNames({"embed": "replica", "mlp": "logical"}))
    assert linear.kernel.get_raw_value().held.sharding.spec == P("replica", "logical")
    assert linear.bias.get_raw_value().sharding.spec == P("logical")
    for axes, says in (
        ({"embed": None}, "is named 'mlp'"),
        ({"embed": "rows", "mlp": None}, "axis 'rows'"),
        ({"embed": "logical", "mlp": "logical"}, "on the logical axis"),
    ):
        with pytest.raises(ArgumentError, match=says):
            partition.place(grid(2, 4), nnx.eval_shape(model), ByNames(axes))


def test_activation_is_laid_out_by_its_name_and_left_alone_outside_a_step() -> None:
    rules = Rules([], activations={"mlp/hidden": Split(-1), "residual": Replicate()})
    strategy = grid(2, 4)

    def step(x: jax.Array) -> Any:
        hidden = rules.constrain(x @ jnp.ones((8, 16)), "layers/0/mlp/hidden")
        return hidden, rules.constrain(hidden.T + 1, "residual")

    hidden, residual = strategy.run(step, (jnp.ones((4, 8)),))
    assert {s.data.shape for s in hidden.addressable_shards} == {(4, 4)}
    assert {s.data.shape for s in residual.addressable_shards} == {(16, 4)}
    np.testing.assert_array_equal(residual, np.full((16, 4), 9))
    np.testing.assert_array_equal(rules.constrain(np.ones(3), "residual"), np.ones(3))
    with pytest.raises(ShapeError, match="Split names a dim"):
        strategy.run(lambda x: partition.constrain(x, 2), (jnp.ones((4, 8)),))
