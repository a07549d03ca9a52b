"""Compile options that depend on the version of JAX."""

import os
from typing import Any

import jax

# Before 0.11 XLA's CPU compiler drops optimization barriers before it puts all-reduces together.
BARRIERS_HOLD = tuple(int(n) for n in jax.__version__.split(".")[:2]) >= (0, 11)


# What XLA's CPU compiler may not do to a program that has to compute the same bits in other
# surroundings. Only programs for several devices have equal operations put together before the
# algebraic simplifier runs, which decides by how many operations use a value: it writes `x / s` as
# `x * (1 / s)` where nothing else uses a broadcast `s`. So no program has them put together. The
# other two are for JAX 0.10: what drops barriers before everything is fused, and what moves loops
# into nested functions, where it cannot emit a barrier.
_JOINING = ("cse",)
_BARRIERS_ON_OLD_CPU = ("cse_barrier_expander", "small-while-loop-hoisting")


def exact_options(platform: str) -> dict[str, bool | str]:
    """Compile options of programs that have to compute the same bits in other surroundings.

    XLA's passes on CPU depend on the number of devices, and those of JAX 0.10 drop optimization
    barriers before they fuse; GPUs may choose algorithms that add in any order. Waits for the end
    of JAX 0.10, and for a way to ask for determinism.
    """
    if platform == "gpu":
        return {"xla_gpu_deterministic_ops": True}
    if platform != "cpu":
        return {}
    passes = _JOINING if BARRIERS_HOLD else (*_BARRIERS_ON_OLD_CPU, *_JOINING)
    return {"xla_disable_hlo_passes": ",".join(passes)}


def are_set_by_flags(options: dict[str, Any]) -> bool:
    """Whether compile options hold for every program of this process, by `XLA_FLAGS`."""
    given = os.environ.get("XLA_FLAGS", "").lower().split()
    return all(
        f"--{name}={value}".lower() in given or (value is True and f"--{name}" in given)
        for name, value in options.items()
    )
