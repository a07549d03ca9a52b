"""What the replication analysis must prove, and what it must reject."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh

import jaxdist
from jaxdist import PerReplica, get_replica_context
from jaxdist.errors import DivergentCollectiveError
from tests.program.oracle.random_programs import UNHEARD_OF

W = np.linspace(0.1, 1, 4, dtype=np.float32)
X = [np.full(4, r, np.float32) for r in range(8)]


def _strategy() -> jaxdist.MirroredStrategy:
    return jaxdist.MirroredStrategy()


def _two_axes() -> jaxdist.MirroredStrategy:
    devices = np.asarray(jax.devices()[:8], dtype=object).reshape(2, 4)
    mesh = Mesh(devices, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("a", "b"))


def _kinds(fn: Callable[..., Any], strategy: jaxdist.Strategy | None = None) -> list[str]:
    program = (strategy or _strategy()).lower(fn, (W, PerReplica(X)))
    return [what.split()[0] for what in program.results.values()]


def _mean(tree: Any) -> Any:
    return get_replica_context().all_reduce("mean", tree)


def _gradient(w: Any, x: Any) -> Any:
    return _mean(jax.grad(lambda v: jnp.mean((v * x - 1) ** 2))(w))


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        optax.sgd(0.1, momentum=0.9, nesterov=True),
        optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)),
        optax.adamw(1e-3),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
        optax.lamb(1e-3),
        optax.adafactor(1e-3),
        optax.apply_if_finite(optax.sgd(0.1), 3),
        optax.MultiSteps(optax.adam(1e-3), 2),
        optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)),
    ],
    ids=[
        "sgd",
        "momentum",
        "adam_schedule",
        "adamw",
        "clip",
        "lamb",
        "adafactor",
        "if_finite",
        "multi_steps",
        "noise",
    ],
)
def test_an_optax_update_from_reduced_gradients_is_proved(tx: Any) -> None:
    state = tx.init({"w": W})

    def step(w: Any, state: Any, x: Any) -> Any:
        grads = {"w": _gradient(w, x)}
        updates, state = tx.update(grads, state, {"w": w})
        return optax.apply_updates({"w": w}, updates), state, optax.tree.norm(grads)

    program = _strategy().lower(step, (W, state, PerReplica(X)))
    assert {what.split()[0] for what in program.results.values()} == {"mirrored"}


PROVED: dict[str, Callable[[Any, Any], Any]] = {
    "all_gather": lambda w, x: get_replica_context().all_gather(x, axis=0),
    "pmax": lambda w, x: lax.pmax(x, "replica"),
    "pmin of a sum": lambda w, x: lax.pmin(x.sum(), "replica") * w,
    "random bits": lambda w, x: jax.random.normal(jax.random.key(3), (4,)) * w,
    "key from a value": lambda w, x: jax.random.uniform(
        jax.random.fold_in(jax.random.key(0), w[0].astype(jnp.int32))
    ),
    "scan": lambda w, x: lax.scan(lambda c, r: (jnp.sin(c) + r, c), w, jnp.ones((3, 4))),
    "scan that reduces": lambda w, x: lax.scan(
        lambda c, _: (c - 0.1 * _gradient(c, x), None), w, length=3
    )[0],
    "fori_loop": lambda w, x: lax.fori_loop(0, 3, lambda i, c: c + lax.psum(x, "replica"), w),
    "while": lambda w, x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, w),
    "cond": lambda w, x: lax.cond(w[0] > 0, lambda: lax.psum(x, "replica"), lambda: jnp.zeros(4)),
    "cond on a reduced value": lambda w, x: lax.cond(
        lax.psum(x.sum(), "replica") > 0, lambda: w, lambda: -w
    ),
    "switch": lambda w, x: lax.switch(w.astype(jnp.int32)[0], [jnp.sin, jnp.cos], w),
    "jit": lambda w, x: jax.jit(lambda a, b: a + lax.psum(b, "replica"))(w, x),
    "remat": lambda w, x: _mean(jax.grad(jax.checkpoint(lambda a: jnp.sin(a * x).sum()))(w)),
    "vmap": lambda w, x: jax.vmap(lambda a: lax.psum(a * x, "replica"))(jnp.stack([w, w])),
    "custom_jvp": lambda w, x: jax.nn.relu(w) + jax.nn.silu(w) + jax.nn.gelu(w),
    "custom_vjp": lambda w, x: optax.losses.softmax_cross_entropy_with_integer_labels(
        w[None], jnp.array([1])
    ),
    "sort": lambda w, x: jnp.sort(w)[jnp.argsort(w)],
    "linalg": lambda w, x: jnp.linalg.cholesky(jnp.outer(w, w) + jnp.eye(4)) @ w,
    # Since JAX 0.12 some of these are one operation in a trace.
    "searchsorted": lambda w, x: jnp.searchsorted(w, w) + jnp.digitize(w, w),
    "gradient of interp": lambda w, x: jax.grad(lambda v: jnp.interp(v, w, w * 2).sum())(w),
    "nonzero": lambda w, x: (*jnp.nonzero(w > 0.5, size=4), jnp.argwhere(w > 0.5, size=2)),
    "unique": lambda w, x: (jnp.unique(w, size=4), jnp.histogram(w, 3)[0]),
    "choice": lambda w, x: jax.random.choice(jax.random.key(0), w, (3,), p=w / w.sum()),
    "custom_root": lambda w, x: lax.custom_root(lambda v: v - w, w, lambda f, g: g, lambda g, y: y),
    "checkpoint_name": lambda w, x: checkpoint_name(w, "w") * 2,
    "barrier": lambda w, x: lax.optimization_barrier((w, x))[0],
    "ignoring": lambda w, x: jnp.where(False, w, w) + 0 * w,
    "axis size": lambda w, x: lax.psum(1, "replica") * w,
    "assumed": lambda w, x: jaxdist.assume_replicated(
        lax.psum(x, "replica", axis_index_groups=[list(range(8))])
    ),
    "merge_call": lambda w, x: get_replica_context().merge_call(
        lambda s, v: s.reduce("SUM", v, axis=None), args=(x,)
    ),
}


@pytest.mark.parametrize("name", list(PROVED))
def test_what_is_the_same_by_construction_is_proved(name: str) -> None:
    assert set(_kinds(PROVED[name])) == {"mirrored"}


NOT_PROVED: dict[str, Callable[[Any, Any], Any]] = {
    "input": lambda w, x: x,
    "sum with input": lambda w, x: w + x,
    "replica id": lambda w, x: w + get_replica_context().replica_id_in_sync_group,
    "ppermute": lambda w, x: lax.ppermute(w, "replica", [(0, 1)]),
    "psum_scatter": lambda w, x: lax.psum_scatter(jnp.tile(w, 8), "replica", tiled=True),
    "all_to_all": lambda w, x: lax.all_to_all(jnp.tile(w, 8), "replica", 0, 0, tiled=True),
    "groups": lambda w, x: lax.psum(x, "replica", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]),
    "groups of equal": lambda w, x: lax.all_gather(
        w + lax.axis_index("replica"),
        "replica",
        axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]],
    ),
    "unknown primitive": lambda w, x: UNHEARD_OF.bind(w),
    "pure_callback": lambda w, x: jax.pure_callback(
        lambda v: np.asarray(v), jax.ShapeDtypeStruct((4,), "float32"), w
    ),
    "io_callback": lambda w, x: jax.experimental.io_callback(
        lambda v: np.asarray(v), jax.ShapeDtypeStruct((4,), "float32"), w
    ),
    "ref": lambda w, x: _through_a_ref(w, x),
    "predicate": lambda w, x: lax.cond(x[0] > 3, lambda: w, lambda: -w),
    "predicate with equal branches": lambda w, x: lax.cond(x[0] > 3, lambda: w, lambda: jnp.sin(w)),
    "assumed under a predicate": lambda w, x: lax.cond(
        x[0] > 3, lambda: jaxdist.assume_replicated(w), lambda: -w
    ),
    "trip count": lambda w, x: lax.while_loop(
        lambda c: c[0] < x[0], lambda c: (c[0] + 1, c[1] * 2), (0.0, w)
    )[1],
    "late in a loop": lambda w, x: lax.fori_loop(0, 3, lambda i, c: (c[1], c[2], x), (w, w, w))[0],
    "predicate made in the loop": lambda w, x: lax.scan(
        lambda c, _: ((jnp.where(c[1] > 0, c[0], -c[0]), c[1] + x[0]), None), (w, -1.0), length=3
    )[0][0],
    # The body never ran, so the results equal the operands.
    "no trips": lambda w, x: lax.scan(lambda c, _: (w, None), x, length=0)[0],
}


@pytest.mark.parametrize("name", list(NOT_PROVED))
def test_what_may_differ_is_not_called_equal(name: str) -> None:
    assert set(_kinds(NOT_PROVED[name])) == {"per-replica"}


def _through_a_ref(w: Any, x: Any) -> Any:
    ref = jax.new_ref(w)
    ref[...] = x
    return ref[...]


TWO_AXES: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "both": ("mirrored", lambda w, x: lax.psum(x, ("a", "b"))),
    "one after the other": ("mirrored", lambda w, x: lax.pmean(lax.pmax(x, "a"), "b")),
    "only one": ("per-replica", lambda w, x: lax.psum(x, "a")),
    "the same twice": ("per-replica", lambda w, x: lax.psum(lax.psum(x, "b"), "b")),
    "index of the other": ("mirrored", lambda w, x: lax.psum(lax.axis_index("a"), "a") * w),
    "grouped, then the other": (
        "per-replica",
        lambda w, x: lax.psum(lax.psum(x, "b", axis_index_groups=[[0, 1], [2, 3]]), "a"),
    ),
    # All replicas along b take the same branch, so all of them reach the sum.
    "branch over the other axis": (
        "per-replica",
        lambda w, x: lax.cond(
            lax.axis_index("a") == 0, lambda: lax.psum(x, "b"), lambda: lax.psum(-x, "b")
        ),
    ),
}


@pytest.mark.parametrize("name", list(TWO_AXES))
def test_axes_are_told_apart(name: str) -> None:
    expected, fn = TWO_AXES[name]
    assert _kinds(fn, _two_axes()) == [expected]


def _solve_with_a_sum(x: Any) -> Any:
    return lax.custom_linear_solve(
        lambda v: 2 * v + 0 * lax.psum(v, "replica"), x, lambda matvec, b: matvec(b) / 4
    )


DIVERGENT: dict[str, Callable[[Any, Any], Any]] = {
    "branch": lambda w, x: lax.cond(x[0] > 3, lambda: lax.psum(w, "replica"), lambda: w),
    "switch": lambda w, x: lax.switch(
        x.astype(jnp.int32)[0], [lambda: w, lambda: lax.all_gather(w, "replica")[0]]
    ),
    "loop body": lambda w, x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: c + 1 + 0 * lax.psum(w[0], "replica"), x
    ),
    # A replica that has left the loop does not compute the condition, and the others wait for it.
    "loop condition": lambda w, x: lax.while_loop(
        lambda c: c[0] + 0 * lax.psum(c[0], "replica") < 3, lambda c: c + 1, x
    ),
    "loop condition, equal at first": lambda w, x: lax.while_loop(
        lambda c: c[0] + 0 * lax.psum(c[0], "replica") < 3, lambda c: c + x, w
    ),
    "under jit": lambda w, x: lax.cond(
        x[0] > 3, lambda: jax.jit(lambda v: lax.psum(v, "replica"))(w), lambda: w
    ),
    "in a scan in a branch": lambda w, x: lax.cond(
        x[0] > 3,
        lambda: lax.scan(lambda c, _: (lax.psum(c, "replica"), None), w, length=2)[0],
        lambda: w,
    ),
    "gradient of a branch": lambda w, x: jax.grad(
        lambda v: lax.cond(x[0] > 3, lambda: lax.psum(v, "replica").sum(), lambda: 0.0)
    )(w),
    "permutation": lambda w, x: lax.cond(
        x[0] > 3, lambda: lax.ppermute(w, "replica", [(0, 1)]), lambda: w
    ),
    "broadcast": lambda w, x: lax.cond(
        x[0] > 3, lambda: lax.pbroadcast(w, ("replica",), 0), lambda: w
    ),
    "inside a linear solver": lambda w, x: lax.cond(
        x[0] > 3, lambda: _solve_with_a_sum(w), lambda: w
    ),
}


@pytest.mark.parametrize("name", list(DIVERGENT))
def test_a_collective_that_some_replicas_may_not_reach_is_refused(name: str) -> None:
    with pytest.raises(DivergentCollectiveError) as error:
        _strategy().lower(DIVERGENT[name], (W, PerReplica(X)))
    assert "assume_replicated" in str(error.value)
    assert __file__ in str(error.value)


def test_a_collective_hidden_in_an_operation_is_listed() -> None:
    program = _strategy().lower(_solve_with_a_sum, (PerReplica(X),))
    assert "psum" in [c.kind for c in program.traced_collectives]


def test_a_promise_about_the_condition_is_taken() -> None:
    def step(w: Any, x: Any) -> Any:
        same = jaxdist.assume_replicated(x[0] * 0 > 3)
        return lax.cond(same, lambda: lax.psum(w, "replica"), lambda: w)

    assert _kinds(step) == ["mirrored"]


def test_one_replica_has_nothing_to_differ_from() -> None:
    one = jaxdist.MirroredStrategy(["cpu:0"])
    program = one.lower(
        lambda x: lax.cond(x[0] > 3, lambda: lax.psum(x, "replica"), lambda: UNHEARD_OF.bind(x)),
        (PerReplica(X[:1]),),
    )
    assert program.results == {"result": "mirrored float32[4]"}
