"""Compile options that depend on the version of JAX."""

import os
from typing import Any

import jax

# Before 0.11 XLA's CPU compiler drops optimization barriers before it puts all-reduces together.
BARRIERS_HOLD = tuple(int(n) for n in jax.__version__.split(".")[:2]) >= (0, 11)


# What keeps barriers until everything is fused, and loops out of nested functions, where JAX 0.10
# cannot emit a barrier.
_BARRIERS_ON_OLD_CPU = {
    "xla_disable_hlo_passes": "cse_barrier_expander,small-while-loop-hoisting",
}


def exact_options(platform: str) -> dict[str, bool | str]:
    """Compile options of programs that have to compute the same bits in other surroundings.

    JAX 0.10 on CPU drops optimization barriers before it fuses; GPUs may choose algorithms that
    add in any order. Waits for the end of JAX 0.10, and for a way to ask for determinism.
    """
    if platform == "gpu":
        return {"xla_gpu_deterministic_ops": True}
    return {} if BARRIERS_HOLD or platform != "cpu" else dict(_BARRIERS_ON_OLD_CPU)


def are_set_by_flags(options: dict[str, Any]) -> bool:
    """Whether compile options hold for every program of this process, by `XLA_FLAGS`."""
    given = os.environ.get("XLA_FLAGS", "").lower().split()
    return all(
        f"--{name}={value}".lower() in given or (value is True and f"--{name}" in given)
        for name, value in options.items()
    )
