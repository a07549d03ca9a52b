"""Measures all-reduces on the devices of this machine."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdist._mesh import ReplicaMesh
from jaxdist._values import put
from jaxdist.cost import Medium, Sample

# Numbers of arrays in one program. With more arrays, compilation would take most of the time.
COUNTS = (1, 16)
MAX_BYTES = 512 << 20  # on all devices together
_BURST_SECONDS = 0.01
# Bytes on a device. For a smaller copy, the call takes longer than the memory.
_MIN_COPY_BYTES = 4 << 20


class Measurements(NamedTuple):
    """Results of `measure`: medians over interleaved rounds.

    Attributes:
        samples: The time of an all-reduce for each number and size of arrays.
        memory_bytes_per_second: The bandwidth of a copy.
        scatter_gather: The time of a reduce-scatter plus an all-gather, divided by that of an
            all-reduce of the same size.
    """

    samples: tuple[Sample, ...]
    memory_bytes_per_second: float
    scatter_gather: float


@dataclasses.dataclass
class _Case:
    call: Callable[[], Any]
    repeats: int = 1
    seconds: list[float] = dataclasses.field(default_factory=list)

    def burst(self) -> None:
        start = time.perf_counter()
        for _ in range(self.repeats):
            # One call at a time: with many pending, collectives of CPU devices can deadlock.
            jax.block_until_ready(self.call())
        self.seconds.append((time.perf_counter() - start) / self.repeats)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def measure(
    layout: ReplicaMesh,
    sizes: Sequence[int],
    rounds: int,
    medium: Medium,
    advance: Callable[[str, int], None] = lambda what, total: None,
) -> Measurements:
    """Measure all-reduces of several sizes and numbers of arrays, a copy, and a reduce-scatter.

    Args:
        layout: The devices.
        sizes: Bytes on each device.
        rounds: The number of rounds. Each case runs once in each round, so that other load on the
            machine affects all cases equally.
        medium: Whether several arrays are reduced by one operation, or one after another.
        advance: Called with a description of the next work, and the total number of calls.
    """
    fits = [(c, b) for b in sizes for c in COUNTS if c * b * layout.num_replicas <= MAX_BYTES]
    largest = max(sizes)
    cases: dict[Any, _Case] = {}
    total = len(fits) + 2 + rounds
    for count, size in fits:
        advance(f"compiling {count} x {size:,} bytes", total)
        cases[count, size] = _make_all_reduce(layout, count, size, medium.is_shared)
    advance("compiling a copy", total)
    copied = max(largest, _MIN_COPY_BYTES)
    cases["copy"] = _make_copy(layout, copied)
    advance("compiling a reduce-scatter", total)
    cases["halves"] = _make_reduce_scatter(layout, largest)
    for case in cases.values():
        # The first burst warms up, and shows how many repeats fill `_BURST_SECONDS`.
        case.burst()
        repeats = max(1, min(50, math.ceil(_BURST_SECONDS / max(case.seconds[-1], 1e-6))))
        if not layout.is_local:
            # If one process ran a collective less often than the others, these would wait forever.
            repeats = int(multihost_utils.broadcast_one_to_all(np.asarray(repeats)))
        case.repeats = repeats
        case.seconds.clear()
    for number in range(rounds):
        advance(f"round {number + 1} of {rounds}", total)
        for case in cases.values():
            case.burst()
    # On a shared medium all devices copy at the same time, through the same memory.
    together = layout.num_replicas if medium.is_shared else 1
    return Measurements(
        tuple(Sample(count, size, cases[count, size].median) for count, size in fits),
        together * copied / cases["copy"].median,
        max(0.5, cases["halves"].median / cases[1, largest].median),
    )


def _compile_case(layout: ReplicaMesh, fn: Callable[..., Any], sizes: Sequence[int]) -> _Case:
    """Compile a case: `fn` on one float32 array for each size in bytes on a device."""
    rows = layout.replica_spec
    mapped = jax.shard_map(
        fn, mesh=layout.auto_mesh, in_specs=rows, out_specs=rows, check_vma=False
    )
    n = layout.num_replicas
    shapes = [((max(size // 4 // n, 1)) * n * n,) for size in sizes]
    arrays = [put(np.ones(s, np.float32), layout.per_replica) for s in shapes]
    program = jax.jit(mapped).lower(*arrays).compile()
    jax.block_until_ready(program(*arrays))
    return _Case(lambda: program(*arrays))


def _make_all_reduce(layout: ReplicaMesh, count: int, size: int, at_once: bool) -> _Case:
    axes = layout.replica_axes

    def fn(*arrays: Any) -> Any:
        if at_once:
            return jax.lax.psum(list(arrays), axes)
        (array,) = arrays
        # Each all-reduce needs the result of the one before; otherwise XLA would combine them.
        for _ in range(count):
            array = jax.lax.psum(array, axes) / layout.num_replicas
        return array

    return _compile_case(layout, fn, [size] * (count if at_once else 1))


def _make_copy(layout: ReplicaMesh, size: int) -> _Case:
    return _compile_case(layout, lambda x: x + 1, [size])


def _make_reduce_scatter(layout: ReplicaMesh, size: int) -> _Case:
    axes = layout.replica_axes

    def fn(x: Any) -> Any:
        part = jax.lax.psum_scatter(x, axes, tiled=True)
        return jax.lax.all_gather(part, axes, tiled=True)

    return _compile_case(layout, fn, [size])
