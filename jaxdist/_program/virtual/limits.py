"""Checks for the places where virtual replicas cannot keep their bits, with remedies."""

from typing import Any

import jax

from jaxdist import _compat
from jaxdist._called import called, name_call
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.compiler_options import request_options
from jaxdist.errors import ContextError, UnsupportedError


@called("strategy.run")
def check_compiled(layout: ReplicaMesh) -> None:
    """Refuse to run virtual replicas, and replicas of several processes, op by op.

    Raises:
        ContextError: The strategy has such replicas.
    """
    if layout.is_shared:
        raise ContextError(
            f"{name_call()} was called op by op (jaxdist.config.run_eagerly or jax.disable_jit), "
            f"and this process has {len(layout.local_replicas)} of the {layout.num_replicas} "
            "replicas of the strategy.\n\n"
            "Op by op, one process runs all replicas in turn, and shows the values of each.\n\n"
            "Inspect the step in one process: jaxdist.testing.virtual_devices("
            f"{layout.num_replicas}) and MirroredStrategy(), or here with jax.debug.print."
        )
    if layout.num_virtual is None:
        return
    raise ContextError(
        f"{name_call()} of a strategy with deterministic=True was called op by op "
        "(jaxdist.config.run_eagerly or jax.disable_jit).\n\n"
        "Operations that run one by one are rounded differently than in a compiled step, so the "
        "bits would not be those of the strategy.\n\n"
        "Inspect the step with a strategy without deterministic, or compiled, with "
        "jax.debug.print."
    )


@called("strategy.run")
def check_inside_trace(layout: ReplicaMesh) -> None:
    """Request the compile options of virtual replicas from the caller that will compile.

    Raises:
        ContextError: JAX compiles the caller without these options.
    """
    if layout.num_virtual is None:
        return
    options = _compat.get_exact_options(layout.platform)
    if options is None or _compat.are_set_by_flags(options) or request_options(options):
        return
    raise ContextError(
        f"{name_call()} of a strategy with deterministic=True was called inside another function "
        f"that JAX is tracing (jax.jit, scan, grad), on {layout.platform} with JAX "
        f"{jax.__version__}.\n\n"
        f"There XLA keeps the bits only with {_compat.format_flags(options)}, set before JAX "
        "starts, and jaxdist does not compile that function.\n\n"
        "Decorate it with jaxdist.function instead of jax.jit; or call strategy.run outside of it, "
        "with jaxdist.training.multi_step for many steps in one call."
    )


def not_differentiable(call: Any) -> Any:
    """Return the same function of arrays, which raises `UnsupportedError` if differentiated."""

    @jax.custom_jvp
    def call_guarded(*leaves: Any) -> Any:
        return call(*leaves)

    @call_guarded.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise UnsupportedError(
            "jax.grad was taken through strategy.run of a strategy with deterministic=True.\n\n"
            "The step is taken apart to keep the order of its sums, and its derivative would not "
            "keep it.\n\n"
            "Take the gradient inside the step, and all-reduce it there."
        )

    return call_guarded
