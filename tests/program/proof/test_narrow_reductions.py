"""bf16 reductions where a replica is several logical devices, which abort XLA's CPU backend.

Everything is run in a process of its own first: what goes wrong ends the process.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

import jaxdist
from jaxdist import PerReplica

LOCAL = [np.linspace(r, r + 1, 4, dtype=np.float32).astype(jnp.bfloat16) for r in range(4)]
STACKED = np.stack([np.asarray(x, np.float32) for x in LOCAL])
SUM, MAX, MIN = STACKED.sum(0), STACKED.max(0), STACKED.min(0)


def _strategy() -> jaxdist.MirroredStrategy:
    devices = np.asarray(jax.devices()[:8], dtype=object).reshape(4, 2)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))


def _psum(x: Any) -> Any:
    return lax.psum(x, "data")


@jax.custom_jvp
def _with_jvp(x: Any) -> Any:
    return _psum(x) * 1


_with_jvp.defjvps(lambda t, _, x: t)

MATRIX = jnp.eye(4, dtype=jnp.bfloat16)


@jax.custom_jvp
def _with_constant(x: Any) -> Any:
    return _psum(MATRIX @ x)


_with_constant.defjvps(lambda t, _, x: t)

STEPS: dict[str, tuple[Callable[[Any], Any], np.ndarray]] = {
    "psum": (_psum, SUM),
    "pmean": (lambda x: lax.pmean(x, "data"), SUM / 4),
    "pmax": (lambda x: lax.pmax(x, "data"), MAX),
    "pmin": (lambda x: lax.pmin(x, "data"), MIN),
    "psum_scatter": (
        lambda x: lax.all_gather(lax.psum_scatter(x, "data", tiled=True), "data", tiled=True),
        SUM,
    ),
    "grouped": (
        lambda x: lax.psum(lax.psum(x, "data", axis_index_groups=[[0, 1], [2, 3]]) / 2, "data"),
        SUM,
    ),
    "mixed": (lambda x: lax.psum((x, x.astype(jnp.float32)), "data")[0], SUM),
    "all_reduce": (lambda x: jaxdist.get_replica_context().all_reduce("sum", x), SUM),
    "scan": (lambda x: lax.scan(lambda c, _: (_psum(c) / 4, None), x, length=2)[0] * 4, SUM),
    "while": (
        lambda x: (
            lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, _psum(c[1]) / 4), (0, x))[1] * 4
        ),
        SUM,
    ),
    "cond": (lambda x: lax.cond(lax.pmax(x[0], "data") > 0, _psum, lambda v: v, x), SUM),
    "jit": (lambda x: jax.jit(_psum)(x), SUM),
    "remat": (lambda x: jax.checkpoint(_psum)(x), SUM),
    "remat_of_a_constant": (lambda x: jax.checkpoint(_with_constant)(x), SUM),
    "custom_jvp": (_with_jvp, SUM),
    "vmap": (lambda x: jax.vmap(_psum)(jnp.stack([x, x]))[0], SUM),
    "grad": (lambda x: jax.grad(lambda v: jnp.sum(_psum(v) * v))(x), 2 * SUM),
    "grad_of_remat": (
        lambda x: jax.grad(lambda v: jnp.sum(jax.checkpoint(lambda u: jnp.sin(_psum(u)))(v)))(x),
        4 * np.cos(SUM),
    ),
    "constrained": (lambda x: _psum(lax.with_sharding_constraint(x, PartitionSpec("model"))), SUM),
    "loop_in_branch": (
        lambda x: lax.cond(
            lax.pmax(x[0], "data") > 0,
            lambda v: lax.fori_loop(0, 2, lambda _, c: jax.checkpoint(_psum)(c) / 4, v) * 4,
            lambda v: v,
            x,
        ),
        SUM,
    ),
}


def _value(result: Any) -> np.ndarray:
    array = result.array if isinstance(result, PerReplica) else result
    return np.asarray(array, np.float32)


def _check(name: str) -> None:
    fn, expected = STEPS[name]
    strategy = _strategy()
    x = PerReplica(LOCAL)
    out = strategy.run(fn, (x,))
    whole = _value(out)
    for row in whole.reshape(-1, 4):
        np.testing.assert_allclose(row, expected, rtol=3e-2, err_msg=name)
    array = jax.device_put(
        np.concatenate([np.asarray(v) for v in LOCAL]), strategy.per_replica_sharding
    )
    inside = jax.jit(lambda a: strategy.run(fn, (PerReplica.of_global(a),)))(array)
    np.testing.assert_allclose(_value(inside), whole, rtol=1e-2, err_msg=f"{name} inside jit")


class _Statistic(nnx.Module):
    def __init__(self) -> None:
        self.mean = nnx.BatchStat(jnp.zeros(4, jnp.bfloat16))
        self.total = nnx.metrics.MetricState(jnp.zeros(4, jnp.bfloat16))


def _check_variables() -> None:
    model = _Statistic()

    def step(model: _Statistic, x: Any) -> None:
        model.mean[...] = x
        model.total[...] = model.total[...] + x

    for _ in range(2):
        _strategy().run(step, (model, PerReplica(LOCAL)))
    np.testing.assert_allclose(_value(model.mean[...]), SUM / 4, rtol=3e-2)
    np.testing.assert_allclose(_value(model.total[...]), 2 * SUM, rtol=3e-2)


def _check_merge_and_drift() -> None:
    strategy = _strategy()

    def step(x: Any) -> Any:
        return jaxdist.get_replica_context().merge_call(
            lambda s, v: s.reduce("MEAN", v, axis=None), args=(x,)
        )

    out = strategy.run(step, (PerReplica(LOCAL),))
    np.testing.assert_allclose(_value(out), SUM / 4, rtol=3e-2)
    reduced = strategy.reduce("SUM", PerReplica(LOCAL), axis=None)
    np.testing.assert_allclose(_value(reduced), SUM, rtol=3e-2)


def _in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[3]
    start = (
        "import jax; jax.config.update('jax_num_cpu_devices', 8)\n"
        "from tests.program.proof import test_narrow_reductions as tests\n"
    )
    return subprocess.run(
        [sys.executable, "-c", start + code],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_no_bf16_reduction_aborts_the_process() -> None:
    code = """
import traceback
for name in tests.STEPS:
    print("at", name, flush=True)
    try:
        tests._check(name)
    except Exception:
        print("failed", name, traceback.format_exc()[-600:], flush=True)
print("all done")
"""
    done = _in_a_process(code)
    shown = done.stdout[-3000:] + done.stderr[-1500:]
    assert done.returncode == 0, shown
    assert "failed" not in done.stdout, shown
    assert "all done" in done.stdout


@pytest.mark.parametrize("check", ["_check_variables", "_check_merge_and_drift"])
def test_what_jaxdist_reduces_itself_does_not_abort_either(check: str) -> None:
    # BatchNorm statistics in bf16 were reduced after the rewrite.
    done = _in_a_process(f"tests.{check}(); print('all done')")
    assert done.returncode == 0, done.stderr[-1500:]
    assert "all done" in done.stdout


def test_a_custom_derivative_is_kept_when_run_is_differentiated() -> None:
    # The rewrite inlined the function, and its own derivative with it.
    strategy = _strategy()

    @jax.custom_vjp
    def seven(x: Any) -> Any:
        return _psum(x.astype(jnp.bfloat16)).astype(jnp.float32)

    seven.defvjp(lambda x: (seven(x), None), lambda _, ct: (0 * ct + 7,))

    @jax.custom_jvp
    def five(x: Any) -> Any:
        return _psum(x.astype(jnp.bfloat16)).astype(jnp.float32)

    five.defjvps(lambda t, _, x: 5 * t)

    for fun, expected in ((seven, 7.0 * 4), (five, 5.0)):
        grad = jax.jit(jax.grad(lambda w, f=fun: strategy.run(lambda w: f(w).sum(), (w,))))
        # For `seven` each of four replicas adds 7; the cotangent of `five` is shared by them.
        np.testing.assert_allclose(grad(jnp.ones(4)), np.full(4, expected))
