"""A row for each function that people train with: a function of parameters and of one batch.

The lists are read from the libraries, so a function that they add is missed by
`test_deterministic_table.py` until it has a row, or a reason why it has none.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

from jaxdist import PerReplica, get_replica_context

ROWS, FEATURES = 4, 24


@dataclasses.dataclass(frozen=True)
class Row:
    """`fn(params, x)` for `x` of `[4, 24]` (or what `batch` makes of it) on each replica."""

    name: str
    fn: Callable[[Any, Any], Any]
    make_params: Callable[[], Any] = lambda: None
    has_gradient: bool = True
    batch: Callable[[np.ndarray], np.ndarray] = np.asarray

    def __str__(self) -> str:
        return self.name


def _of(room: str, name: str, fn: Callable[..., Any], **kwargs: Any) -> Row:
    return Row(f"{room}.{name}", lambda _, x: fn(x), **kwargs)


def _positive(x: Any) -> Any:
    return jax.nn.softplus(x) + 0.1


def _labels(x: Any) -> Any:
    """Return labels of classes, `[rows]`, without a gradient."""
    return jnp.argmax(lax.stop_gradient(x), axis=-1)


def _shares(x: Any) -> Any:
    """Return a distribution for each row, without a gradient."""
    return lax.stop_gradient(jax.nn.softmax(jnp.flip(x, -1)))


# jax.nn

NO_ROW_OF_NN = {
    "get_scaled_dot_general_config": "makes a configuration",
    "scaled_dot_general": "needs block formats of GPUs",
    "scaled_matmul": "needs block formats of GPUs",
}
_NN: dict[str, Callable[[Any], Any]] = {
    "dot_product_attention": lambda x: jax.nn.dot_product_attention(
        *(x.reshape(2, 2, 4, 6) * s for s in (1.0, 0.5, 2.0))
    ),
    "one_hot": lambda x: jax.nn.one_hot(_labels(x), 24) * x,
    "log1mexp": lambda x: jax.nn.log1mexp(_positive(x)),
    "glu": lambda x: jax.nn.glu(x, axis=-1),
}


def _nn_rows() -> list[Row]:
    names = [n for n in dir(jax.nn) if not n.startswith("_") and callable(getattr(jax.nn, n))]
    rows = [_of("nn", n, _NN.get(n, getattr(jax.nn, n))) for n in names if n not in NO_ROW_OF_NN]
    return [
        *rows,
        _of("nn", "gelu_exact", functools.partial(jax.nn.gelu, approximate=False)),
        _of("nn", "softmax_of_columns", functools.partial(jax.nn.softmax, axis=0)),
        _of("nn", "causal_attention", _causal),
        _of("nn", "softmax_where", lambda x: jax.nn.softmax(x, where=x > -1)),
        _of("nn", "softmax_bf16", lambda x: jax.nn.softmax(x.astype(jnp.bfloat16))),
        _of("nn", "softmax_squared", lambda x: jax.nn.softmax(x) ** 2),
        Row("nn.softmax_of_product", lambda w, x: jax.nn.softmax(x @ w) ** 2, _matrix),
        _of("nn", "two_softmaxes", lambda x: jax.nn.softmax(jax.nn.softmax(x) * 3 + x)),
    ]


def _causal(x: Any) -> Any:
    q, k, v = (x.reshape(2, 2, 4, 6) * s for s in (1.0, 0.5, 2.0))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def _matrix() -> np.ndarray:
    return (0.3 * np.random.default_rng(5).normal(size=(FEATURES, 12))).astype(np.float32)


# Reductions, cumulative operations and sorts

_REDUCTIONS = """
    sum mean max min prod var std median ptp nansum nanmean nanmax nanmin nanvar nanstd nanprod
    nanmedian logaddexp.reduce
""".split()
_CUMULATIVE = "cumsum cumprod nancumsum nancumprod".split()
_VALUES_ONLY = """
    argmax argmin nanargmax nanargmin any all count_nonzero argsort
""".split()


def _jnp_rows() -> list[Row]:
    rows = []
    for name in _REDUCTIONS:
        fn: Any = jnp.logaddexp.reduce if "." in name else getattr(jnp, name)
        for axis in (None, 0, -1):
            if "." in name and axis is None:
                continue
            rows.append(_of("jnp", f"{name}({axis})", functools.partial(fn, axis=axis)))
    rows += [
        _of("jnp", f"{n}({a})", functools.partial(getattr(jnp, n), axis=a))
        for n in _CUMULATIVE
        for a in (0, -1)
    ]
    rows += [
        _of("jnp", n, functools.partial(getattr(jnp, n), axis=-1), has_gradient=False)
        for n in _VALUES_ONLY
    ]
    more: dict[str, Callable[[Any], Any]] = {
        "average": lambda x: jnp.average(x, axis=0, weights=_positive(x)),
        "quantile": lambda x: jnp.quantile(x, 0.3, axis=-1),
        "percentile": lambda x: jnp.percentile(x, 30.0),
        "nanquantile": lambda x: jnp.nanquantile(x, 0.3, axis=-1),
        "linalg.norm": lambda x: jnp.linalg.norm(x, axis=-1),
        "linalg.norm_1": lambda x: jnp.linalg.norm(x, ord=1),
        "trace": lambda x: jnp.trace(x),
        "dot": lambda x: jnp.dot(x, x.T),
        "matmul": lambda x: jnp.matmul(x.T, x),
        "einsum": lambda x: jnp.einsum("bi,bj->ij", x, jnp.sin(x)),
        "inner": lambda x: jnp.inner(x, x),
        "outer": lambda x: jnp.outer(x[0], x[1]),
        "tensordot": lambda x: jnp.tensordot(x, x, 2),
        "cov": lambda x: jnp.cov(x),
        "corrcoef": lambda x: jnp.corrcoef(x),
        "convolve": lambda x: jnp.convolve(x[0], x[1, :5]),
        "sort": lambda x: jnp.sort(x, axis=-1),
        "sort_columns": lambda x: jnp.sort(x, axis=0),
        "partition": lambda x: jnp.partition(x, 5, axis=-1),
        "take_along_axis": lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=-1), -1),
        "trapezoid": lambda x: jnp.trapezoid(x, axis=-1),
        "diff": lambda x: jnp.diff(x),
        "segment_sum": lambda x: jax.ops.segment_sum(x.T, jnp.arange(24) % 5, 5),
        "scatter_add": lambda x: jnp.zeros((4, 5)).at[:, jnp.arange(24) % 5].add(x),
        "norm_of_rows": lambda x: x / jnp.sqrt(jnp.sum(x**2, -1, keepdims=True) + 1e-6),
        "layer_norm_by_hand": _normalised,
    }
    return [*rows, *(_of("jnp", n, fn) for n, fn in more.items())]


def _normalised(x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)


def _lax_rows() -> list[Row]:
    window = {"window_dimensions": (1, 3), "window_strides": (1, 2), "padding": "SAME"}
    fns: dict[str, Callable[[Any], Any]] = {
        "cumsum": lambda x: lax.cumsum(x, 1),
        "cumsum_reverse": lambda x: lax.cumsum(x, 1, reverse=True),
        "cumprod": lambda x: lax.cumprod(x, 1),
        "cummax": lambda x: lax.cummax(x, 1),
        "cummin": lambda x: lax.cummin(x, 1),
        "cumlogsumexp": lambda x: lax.cumlogsumexp(x, 1),
        "associative_scan": lambda x: lax.associative_scan(lambda a, b: a * b + a, x, axis=1),
        "reduce_window_sum": lambda x: lax.reduce_window(x, 0.0, lax.add, **window),
        "reduce_window_max": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, **window),
        "reduce_precision": lambda x: lax.reduce_precision(x, 8, 7),
        "sort": lambda x: lax.sort(x, dimension=1),
        "top_k": lambda x: lax.top_k(x, 5)[0],
        "approx_max_k": lambda x: lax.approx_max_k(x, 5)[0],
        "approx_min_k": lambda x: lax.approx_min_k(x, 5)[0],
        "logistic": lax.logistic,
        "erf": lax.erf,
        "erf_inv": lambda x: lax.erf_inv(jnp.tanh(x)),
        "lgamma": lambda x: lax.lgamma(_positive(x)),
        "digamma": lambda x: lax.digamma(_positive(x)),
        "pow": lambda x: lax.pow(_positive(x), jnp.sin(x)),
        "rsqrt": lambda x: lax.rsqrt(_positive(x)),
        "div": lambda x: x / _positive(x.sum(-1, keepdims=True)),
        "batch_matmul": lambda x: lax.batch_matmul(x.reshape(2, 2, 24), x.reshape(2, 24, 2)),
        "conv": lambda x: lax.conv(
            x.reshape(4, 2, 12)[..., None], x[:, :6].reshape(4, 2, 3, 1), (1, 1), "SAME"
        ),
        "scan": lambda x: lax.scan(lambda c, r: (jnp.tanh(c + r), c * r), x[0], x)[1],
        "fori": lambda x: lax.fori_loop(0, 3, lambda _, v: jax.nn.softmax(v) + v, x),
        "cond": lambda x: lax.cond(x.sum() > 0, jax.nn.softmax, jnp.sin, x),
        "map": lambda x: lax.map(jax.nn.softmax, x),
        "checkpoint": lambda x: jax.checkpoint(lambda v: jax.nn.softmax(jnp.sin(v)))(x),
        "cholesky": lambda x: jnp.linalg.cholesky(x @ x.T + 4 * jnp.eye(4)),
        "solve": lambda x: jnp.linalg.solve(x @ x.T + 4 * jnp.eye(4), x),
        "fft": lambda x: jnp.abs(jnp.fft.rfft(x)),
    }
    values: dict[str, Callable[[Any], Any]] = {
        "argmax": lambda x: lax.argmax(x, 1, jnp.int32),
        "argmin": lambda x: lax.argmin(x, 1, jnp.int32),
        "population_count": lambda x: lax.population_count(x.astype(jnp.int32)),
        "reduce_xor": lambda x: lax.reduce(x.astype(jnp.int32), 0, lax.bitwise_xor, (1,)),
        "random": lambda x: x + jax.random.normal(jax.random.key(3), x.shape),
    }
    rows = [_of("lax", n, fn) for n, fn in fns.items()]
    return [*rows, *(_of("lax", n, fn, has_gradient=False) for n, fn in values.items())]


# Layers of NNX

NO_ROW_OF_NNX = {
    "Dict": "holds modules",
    "List": "holds modules",
    "Module": "is the base class",
    "RNNCellBase": "is the base class",
}


def _in_sequences(x: np.ndarray) -> np.ndarray:
    """`[rows, 24]` as `[rows, 3, 8]`: batch, time, features."""
    return x.reshape(len(x), 3, 8)


_Maker = Callable[[nnx.Rngs], Any]


def _layers() -> dict[str, tuple[_Maker, bool]]:
    """What makes each layer, and whether it takes sequences."""
    layers: dict[str, tuple[_Maker, bool]] = {
        "BatchNorm": (lambda r: nnx.BatchNorm(24, rngs=r), False),
        "Bidirectional": (
            lambda r: nnx.Bidirectional(
                nnx.RNN(nnx.SimpleCell(8, 6, rngs=r)), nnx.RNN(nnx.GRUCell(8, 6, rngs=r))
            ),
            True,
        ),
        "Conv": (lambda r: nnx.Conv(8, 5, (2,), rngs=r), True),
        "ConvTranspose": (lambda r: nnx.ConvTranspose(8, 5, (2,), rngs=r), True),
        "Dropout": (lambda r: nnx.Dropout(0.3, rngs=r), False),
        "Einsum": (lambda r: nnx.Einsum("bi,io->bo", (24, 5), (5,), rngs=r), False),
        "Embed": (lambda r: _Embedded(nnx.Embed(7, 5, rngs=r)), False),
        "GroupNorm": (lambda r: nnx.GroupNorm(24, 4, rngs=r), False),
        "InstanceNorm": (lambda r: nnx.InstanceNorm(8, rngs=r), True),
        "LayerNorm": (lambda r: nnx.LayerNorm(24, rngs=r), False),
        "Linear": (lambda r: nnx.Linear(24, 5, rngs=r), False),
        "LinearGeneral": (lambda r: nnx.LinearGeneral((3, 8), 5, axis=(-2, -1), rngs=r), True),
        "LoRA": (lambda r: nnx.LoRA(24, 2, 5, rngs=r), False),
        "LoRALinear": (lambda r: nnx.LoRALinear(24, 5, lora_rank=2, rngs=r), False),
        "MultiHeadAttention": (
            lambda r: nnx.MultiHeadAttention(2, 8, 8, decode=False, rngs=r),
            True,
        ),
        "PReLU": (lambda _: nnx.PReLU(), False),
        "RMSNorm": (lambda r: nnx.RMSNorm(24, rngs=r), False),
        "RNN": (
            lambda r: nnx.RNN(nnx.LSTMCell(8, 6, rngs=r), time_major=False, reverse=True),
            True,
        ),
        "Sequential": (lambda r: nnx.Sequential(nnx.Linear(24, 9, rngs=r), jnp.tanh), False),
        "SpectralNorm": (
            lambda r: _Updated(nnx.SpectralNorm(nnx.Linear(24, 5, rngs=r), n_steps=2, rngs=r)),
            False,
        ),
        "WeightNorm": (lambda r: nnx.WeightNorm(nnx.Linear(24, 5, rngs=r), rngs=r), False),
    }
    for name in ("GRUCell", "LSTMCell", "OptimizedLSTMCell", "SimpleCell"):
        cell = getattr(nnx, name)
        layers[name] = (lambda r, cell=cell: nnx.RNN(cell(8, 6, rngs=r)), True)
    if hasattr(nnx, "RoPE"):
        layers["RoPE"] = (lambda _: _Rotated(), True)
    return layers


class _Embedded(nnx.Module):
    def __init__(self, table: nnx.Embed) -> None:
        self.table = table

    def __call__(self, x: Any) -> Any:
        return self.table(_labels(x) % 7) * x[:, :5]


class _Updated(nnx.Module):
    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, x: Any) -> Any:
        return self.layer(x, update_stats=True)


class _Rotated(nnx.Module):
    def __init__(self) -> None:
        self.rotation: Any = getattr(nnx, "RoPE")()  # noqa: B009

    def __call__(self, x: Any) -> Any:
        return self.rotation(x[:, :, None, :])


def _nnx_row(name: str, make: _Maker, takes_sequences: bool) -> Row:
    # At the first use: every worker of the tests makes the table, and few rows of it run.
    @functools.cache
    def parts() -> tuple[Any, Any, Any]:
        with jax.ensure_compile_time_eval():
            graph, params, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)
        return graph, params, rest

    def fn(params: Any, x: Any) -> Any:
        graph, _, rest = parts()
        # Each trace creates the state that the layer writes.
        return nnx.merge(graph, params, jax.tree.map(jnp.asarray, rest))(x)

    batch = _in_sequences if takes_sequences else np.asarray
    return Row(f"nnx.{name}", fn, lambda: parts()[1], batch=batch)


def _nnx_rows() -> list[Row]:
    return [_nnx_row(name, *rest) for name, rest in _layers().items()]


# Losses of optax

NO_ROW_OF_LOSSES = {
    "make_fenchel_young_loss": "makes a loss from a function",
    "convex_kl_divergence": "is the older name of generalized_kl_divergence",
}
_SPECIAL_LOSSES: dict[str, Callable[[Any], Any]] = {
    "ctc_loss": lambda x: optax.ctc_loss(*_for_ctc(x)),
    "ctc_loss_with_forward_probs": lambda x: optax.ctc_loss_with_forward_probs(*_for_ctc(x))[0],
    "ntxent": lambda x: optax.ntxent(x, jnp.arange(ROWS) // 2),
    "triplet_margin_loss": lambda x: optax.losses.triplet_margin_loss(
        x, jnp.roll(x, 1, 0), jnp.cos(x)
    ),
    "smooth_labels": lambda x: optax.smooth_labels(x, 0.1),
    "sparsemax_loss": lambda x: optax.losses.sparsemax_loss(x, (x > 0).astype(jnp.float32)),
}
_OF_CLASSES = frozenset(
    """
    softmax_cross_entropy_with_integer_labels multiclass_hinge_loss multiclass_perceptron_loss
    multiclass_sparsemax_loss
    """.split()
)
_OF_LOGS = frozenset(
    """
    kl_divergence kl_divergence_with_log_targets generalized_kl_divergence
    """.split()
)
_OF_SIGNS = frozenset({"hinge_loss", "perceptron_loss"})


def _for_ctc(x: Any) -> tuple[Any, Any, Any, Any]:
    logits = x.reshape(4, 6, 4)
    labels = jnp.array([[1, 2], [2, 1], [3, 3], [1, 1]])
    return logits, jnp.zeros((4, 6)), labels, jnp.zeros((4, 2))


def _loss(name: str) -> Callable[[Any], Any]:
    fn = getattr(optax.losses, name)
    if name == "multiclass_generalized_dice_loss":
        return lambda x: _with_ranks(fn, x, _shares(x))
    if name in _SPECIAL_LOSSES:
        return _SPECIAL_LOSSES[name]
    if name in _OF_CLASSES:
        return lambda x: fn(x, _labels(jnp.flip(x, -1)))
    if name in _OF_LOGS:
        log = "log_targets" in name
        return lambda x: fn(
            jax.nn.log_softmax(x), jnp.log(_shares(x) + 1e-3) if log else _shares(x)
        )
    if name in _OF_SIGNS:
        return lambda x: fn(x, jnp.sign(jnp.flip(x, -1)))
    return lambda x: fn(x, _shares(x))


def _with_ranks(fn: Callable[..., Any], *args: Any) -> Any:
    with jax.numpy_rank_promotion("allow"):
        return fn(*args)


def _loss_rows() -> list[Row]:
    names = [n for n in dir(optax.losses) if not n.startswith("_")]
    return [
        _of("optax", n, _loss(n))
        for n in names
        if callable(getattr(optax.losses, n)) and n not in NO_ROW_OF_LOSSES
    ]


@functools.cache
def rows() -> tuple[Row, ...]:
    """The whole table."""
    return (*_nn_rows(), *_jnp_rows(), *_lax_rows(), *_nnx_rows(), *_loss_rows())


# One program has several rows, since compiling takes most of the time.
_ROWS_IN_A_PROGRAM = 10


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows of the table that are one program; each has its own results."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return f"{self.rows[0]} to {self.rows[-1]}"

    def arguments(self) -> tuple[Any, Any]:
        """The parameters, and a batch of each replica."""
        x = np.random.default_rng(2).normal(size=(8, ROWS, FEATURES)).astype(np.float32)
        given = {row.name: PerReplica([row.batch(v) for v in x]) for row in self.rows}
        return {row.name: row.make_params() for row in self.rows}, given

    def step(self) -> Callable[[Any, Any], Any]:
        """A step of the values and gradients of each row; it holds no parameters."""

        def step(params: Any, given: Any) -> Any:
            return {
                row.name: _value_and_gradients(row, params[row.name], given[row.name])
                for row in self.rows
            }

        return step


def groups() -> list[Group]:
    """The whole table, in programs."""
    starts = range(0, len(rows()), _ROWS_IN_A_PROGRAM)
    return [Group(rows()[start : start + _ROWS_IN_A_PROGRAM]) for start in starts]


def _value_and_gradients(row: Row, params: Any, x: Any) -> Any:
    """The value, the gradient of the rows, and that of the parameters, summed over replicas."""
    if not row.has_gradient:
        return row.fn(params, x)
    value, pull_back = jax.vjp(row.fn, params, x)
    of_params, of_rows = pull_back(jax.tree.map(_cotangent, value))
    return value, of_rows, get_replica_context().all_reduce("mean", of_params)


def _cotangent(value: jax.Array) -> jax.Array:
    return jnp.cos(jnp.arange(value.size)).reshape(value.shape).astype(value.dtype)


def layer_names() -> set[str]:
    """The layers that NNX has."""
    found = {n: getattr(nnx, n) for n in dir(nnx) if isinstance(getattr(nnx, n), type)}
    return {n for n, cls in found.items() if issubclass(cls, nnx.Module)}
