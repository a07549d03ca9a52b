"""Compile options that depend on the version of JAX."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import config as _config

# Before 0.11 XLA's CPU compiler drops optimization barriers before it puts all-reduces together.
BARRIERS_HOLD = tuple(int(n) for n in jax.__version__.split(".")[:2]) >= (0, 11)


# What XLA's CPU compiler may not do to a program that has to compute the same bits in other
# surroundings. Only programs for several devices have equal operations put together before the
# algebraic simplifier runs, which decides by how many operations use a value: it writes `x / s` as
# `x * (1 / s)` where nothing else uses a broadcast `s`. So no program has them put together. The
# other two are for JAX 0.10: what drops barriers before everything is fused, and what moves loops
# into nested functions, where it cannot emit a barrier.
_JOINING = ("cse",)
_DISABLED = "xla_disable_hlo_passes"
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
    return {_DISABLED: ",".join(passes)}


@contextlib.contextmanager
def exact_partitioner(options: dict[str, Any] | None) -> Iterator[None]:
    """Lower and compile in this thread with the partitioner that `exact_options` are for.

    Shardy, which JAX chooses by itself, changes programs for several devices only. Its passes of
    MLIR put equal operations together, and no option of XLA reaches them. GSPMD works on HLO, where
    `cse` can be left out. XLA writes to stderr that GSPMD will go. Waits for a Shardy that leaves
    alone what is inside of `shard_map`.
    """
    if not options or _DISABLED not in options:
        yield
        return
    with _config.use_shardy_partitioner(False):
        yield


def as_flags(options: dict[str, Any]) -> str:
    """`exact_options` and their partitioner as a user may set them for a whole process."""
    flags = " ".join(f"--{name}={value}" for name, value in options.items())
    partitioner = " and JAX_USE_SHARDY_PARTITIONER=0" if _DISABLED in options else ""
    return f"XLA_FLAGS={flags!r}{partitioner}"


def are_set_by_flags(options: dict[str, Any]) -> bool:
    """Whether `exact_options` hold for every program of this process, by `XLA_FLAGS`."""
    if _DISABLED in options and _config.use_shardy_partitioner.value:
        return False
    given = os.environ.get("XLA_FLAGS", "").lower().split()
    return all(
        f"--{name}={value}".lower() in given or (value is True and f"--{name}" in given)
        for name, value in options.items()
    )
