"""What `attention`, `split_positions` and `positions` refuse, before anything is computed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import nn
from jaxdist.errors import ArgumentError, ArgumentTypeError, ContextError, ShapeError
from tests.nn.attention import on_mesh

X = np.zeros((2, 16, 8, 4), "f4")
KV = np.zeros((2, 16, 2, 4), "f4")

# The arguments, the class, and what the error says: found, and the remedy.
ANYWHERE: dict[str, tuple[Any, type[Exception], str, str]] = {
    "q without rows": ({"q": X[0]}, ShapeError, "q of shape [16, 8, 4]", "Pass q[None]"),
    "k of a vector": ({"k": X[0, 0, 0]}, ShapeError, "k of shape [4]", "Reshape k to 4 dims."),
    "fewer keys": ({"k": KV[:, :8]}, ShapeError, "[2, 8, 2, 4]", "k of shape [2, 16, 2, 4]"),
    "v of other heads": ({"v": X}, ShapeError, "[2, 16, 8, 4]", "v of shape [2, 16, 2, 4]"),
    "other d": ({"k": KV[..., :3]}, ShapeError, "[2, 16, 2, 3]", "k of shape [2, 16, 2, 4]"),
    "3 heads of keys": (
        {"k": X[:, :, :3], "v": X[:, :, :3]},
        ShapeError,
        "8 heads, and 3 of k and v",
        "divides 8: [1, 2, 4, 8]",
    ),
    "no heads of keys": (
        {"k": X[:, :, :0], "v": X[:, :, :0]},
        ShapeError,
        "8 heads, and 0 of k and v",
        "divides 8: [1, 2, 4, 8]",
    ),
    "integers": ({"q": X.astype(int)}, ArgumentTypeError, "q of dtype int32", "q.astype("),
    "two dtypes": (
        {"v": KV.astype("float16")},
        ArgumentTypeError,
        "v of dtype float16, and q of float32",
        "v.astype('float32')",
    ),
    "an unknown kind": ({"kind": "rings"}, ArgumentError, "kind='rings'", "Pass kind='ring'."),
    "a kind that is a number": ({"kind": 1}, ArgumentTypeError, "kind=1", "kind='ulysses'"),
    "an unknown order": ({"order": "zig"}, ArgumentError, "order='zig'", "order='zigzag'"),
    "an order that is a flag": ({"order": True}, ArgumentTypeError, "order=True", "order='cont"),
    "causal by a word": ({"causal": "yes"}, ArgumentTypeError, "causal='yes'", "causal=True or"),
    "scale by a word": ({"scale": "1"}, ArgumentTypeError, "scale='1'", "scale=0.125"),
    "scale of nan": ({"scale": float("nan")}, ArgumentError, "scale=nan", "scale=0.125"),
    "no block": ({"block": 0}, ArgumentError, "block=0", "block=512"),
    "half a block": ({"block": 0.5}, ArgumentTypeError, "block=0.5", "block=512"),
    "segments of floats": (
        {"segment_ids": X[..., 0, 0]},
        ArgumentTypeError,
        "segment_ids of dtype float32",
        "segment_ids.astype('int32')",
    ),
    "segments of one row": (
        {"segment_ids": np.zeros(16, int)},
        ShapeError,
        "segment_ids of shape [16], and q of shape [2, 16, 8, 4]",
        "of shape [2, 16]",
    ),
    "an axis that is a number": ({"axis": 3}, ArgumentTypeError, "axis=3", "'positions'"),
}


def _check(error: pytest.ExceptionInfo[Any], call: str, found: str, remedy: str) -> None:
    paragraphs = str(error.value).split("\n\n")
    assert len(paragraphs) == 3, str(error.value)
    assert paragraphs[0].startswith(f"{call} was given ")
    assert found in paragraphs[0]
    assert remedy in paragraphs[2]


@pytest.mark.parametrize("name", ANYWHERE)
def test_a_wrong_argument_is_refused_on_one_device_and_in_a_step(name: str) -> None:
    wrong, kind, found, remedy = ANYWHERE[name]
    given: Any = {"q": X, "k": KV, "v": KV, **wrong}
    with pytest.raises(kind) as error:
        nn.attention(**given)
    _check(error, "nn.attention", found, remedy)
    with pytest.raises(kind) as error:
        on_mesh((1, 8)).run(lambda: nn.attention(**given))
    _check(error, "nn.attention", found, remedy)


# What one device computes, and these meshes cannot divide.
ON_AXIS: dict[str, tuple[Any, type[Exception], str, str]] = {
    "6 heads": (
        lambda: nn.attention(X[:, :, :6], KV, KV),
        ShapeError,
        "kind='ulysses' with 6 heads, on an axis of 4 devices",
        "kind='gather', or 'ring' if all keys do not fit; or use 4 or 8 heads",
    ),
    "2 heads": (
        lambda: nn.attention(KV, KV, KV),
        ShapeError,
        "with 2 heads",
        "or use 4 heads",
    ),
    "14 positions": (
        lambda: nn.attention(X[:, :14], KV[:, :14], KV[:, :14], kind="ring"),
        ShapeError,
        "q of shape [2, 14, 8, 4]: 14 positions for 4 devices of axis='positions'",
        "to 12 or 16.",
    ),
    "12 positions in zigzag": (
        lambda: nn.attention(X[:, :12], KV[:, :12], KV[:, :12], order="zigzag"),
        ShapeError,
        "12 positions for 4 devices of axis='positions', with order='zigzag'",
        "to 8 or 16, or order='contiguous'.",
    ),
    "12 positions to split": (
        lambda: nn.split_positions({"a": X[:, :12]}),
        ShapeError,
        "x['a'] of shape [2, 12, 8, 4]",
        "to 8 or 16, or order='contiguous'.",
    ),
    "3 positions to number": (
        lambda: nn.positions(3),
        ShapeError,
        "n=3: 3 positions for 4 devices",
        "to 4.",
    ),
    "an axis that the mesh does not have": (
        lambda: nn.attention(X, KV, KV, axis="position"),
        ArgumentError,
        "axis='position'",
        "axis='positions'",
    ),
    "the axis of replicas": (
        lambda: nn.attention(X, KV, KV, axis="data"),
        ArgumentError,
        "axis='data', over which the replicas are",
        "['positions']",
    ),
    "positions over replicas": (
        lambda: nn.positions(8, axis="data"),
        ArgumentError,
        "axis='data'",
        "['positions']",
    ),
    "an axis that is manual": (
        lambda: jax.shard_map(
            lambda x: nn.split_positions(x),
            in_specs=jax.P(None, "positions"),
            out_specs=jax.P(None, "positions"),
            axis_names={"positions"},
            check_vma=False,
        )(jnp.zeros((2, 16))),
        ContextError,
        "axis='positions', inside a function whose work is divided over this axis",
        "Use another axis",
    ),
}


@pytest.mark.parametrize("name", ON_AXIS)
def test_what_an_axis_cannot_divide_is_refused_in_a_step(name: str) -> None:
    call, kind, found, remedy = ON_AXIS[name]
    with pytest.raises(kind) as error:
        on_mesh((2, 4)).run(lambda: call())
    text = str(error.value)
    public = text.partition(" was given ")[0]
    assert public in ("nn.attention", "nn.split_positions", "nn.positions")
    _check(error, public, found, remedy)


def test_the_default_axis_on_a_mesh_without_it_is_one_device() -> None:
    strategy = on_mesh((2, 4), ("data", "model"))
    out = strategy.run(lambda: nn.attention(X[:, :13, :6], KV[:, :13], KV[:, :13], kind="ring"))
    assert out.shape == (2, 13, 6, 4)


@pytest.mark.parametrize(
    ("given", "kind", "found", "remedy"),
    [
        ({"x": np.zeros(4)}, ShapeError, "x of shape [4]", "Pass x[None]"),
        ({"x": [X, 1.0]}, ShapeError, "x[1] of shape []", "keep scalars beside them"),
        ({"x": "tokens"}, ArgumentTypeError, "x='tokens'", "Pass for instance x="),
        ({"x": [X, "words"]}, ArgumentTypeError, "x[1]='words'", "Pass an array"),
        ({"x": X, "order": "ring"}, ArgumentError, "order='ring'", "Pass order='zigzag'."),
        ({"x": X, "order": None}, ArgumentTypeError, "order=None", "Pass order="),
    ],
)
def test_split_positions_takes_arrays_of_two_dims_and_more(
    given: Any, kind: type[Exception], found: str, remedy: str
) -> None:
    for call in (
        lambda: nn.split_positions(**given),
        lambda: on_mesh((2, 4)).run(lambda: nn.split_positions(**given)),
    ):
        with pytest.raises(kind) as error:
            call()
        _check(error, "nn.split_positions", found, remedy)


@pytest.mark.parametrize(
    ("n", "kind", "found"), [(-1, ArgumentError, "n=-1"), (2.0, ArgumentTypeError, "n=2.0")]
)
def test_positions_takes_a_number_of_positions(n: Any, kind: type[Exception], found: str) -> None:
    with pytest.raises(kind) as error:
        nn.positions(n)
    _check(error, "nn.positions", found, "Pass x.shape[1].")


def test_a_per_replica_value_is_refused() -> None:
    value = jaxdist.PerReplica([X, X])
    with pytest.raises(ArgumentTypeError, match=r"nn\.attention was given k="):
        nn.attention(X, value, value)


def test_explicit_axes_that_jax_cannot_leave_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("no auto_axes here")

    kind = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((8,), ("model",), axis_types=(kind,))
    monkeypatch.setattr(jax.sharding, "auto_axes", refuse)
    with jax.set_mesh(mesh), pytest.raises(ContextError) as error:
        nn.attention(*(jnp.asarray(x) for x in (X, KV, KV)))
    _check(error, "nn.attention", "no auto_axes here", "axis_types=")
