"""The plan of a training step for this kind of chip, beside what the device measures."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax

import jaxdist
from benchmarks._lines import CountLine, Line, NoteLine, SkipLine
from benchmarks._models import model
from benchmarks._steps import DONATE, api_step
from jaxdist import cost
from jaxdist.errors import JaxdistError
from jaxdist.tpu._slice import CORES_PER_CHIP

_MIB = 1 << 20
_STEPS, _ROUNDS = 50, 9


def plan(is_smoke: bool) -> Iterator[Line]:
    """Memory and time of a step: planned for one chip of this kind, and measured on this one."""
    device = jax.devices()[0]
    try:
        chip = cost.chip_of(device)
    except JaxdistError:
        yield SkipLine("plan", f"the table of chips has no {device.device_kind}")
        return
    for name in ("tiny",) if is_smoke else ("mlp", "transformer"):
        yield from _compare(name, _name_one(chip), is_smoke)


def _name_one(chip: cost.Chip) -> str:
    """Return the name of one chip, as plans take it."""
    if chip.platform == "gpu":
        # The NVLink domain of some GPUs has several hosts, which their names count.
        return f"{chip.name}:1x1x1" if chip.pod[0] > 1 else f"{chip.name}:1x1"
    generation = next(name for name in CORES_PER_CHIP if name.removeprefix("tpu") == chip.name)
    return f"{generation}:1x1"


def _compare(name: str, topology: str, is_smoke: bool) -> Iterator[Line]:
    params, batch, loss_fn = model(name)
    strategy = jaxdist.MirroredStrategy(jax.devices()[:1])
    [given] = strategy.experimental_distribute_dataset([batch])
    held = jax.device_put(params, strategy.replicated_sharding)
    step = api_step(loss_fn)
    program = strategy.lower(step, (held, given), options=DONATE)
    try:
        planned = program.compile_for(topology, quick=True)
    except JaxdistError as error:
        yield SkipLine("plan", f"{topology}: {str(error).splitlines()[0]}")
        return
    text = program.compile().as_text()
    here = f"{jaxdist.hlo.work(text).flops:,}"
    yield CountLine("plan", name, "FLOP", topology, here, f"{planned.flops or 0:,}")
    seconds = _measure(strategy, step, held, given, 2 if is_smoke else _STEPS)
    stats = jax.devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    in_use = "not told by this platform" if peak is None else f"{peak / _MIB:,.1f} MiB"
    expected, times = planned.expected, planned.times
    if expected is None or times is None:
        yield SkipLine("plan", f"{topology}: no times")
        return
    yield NoteLine(
        "plan",
        f"{name} on {topology}: measured {seconds * 1e6:,.1f} us a step; expected "
        f"{expected.seconds * 1e6:,.1f} us, at least {times.bound * 1e6:,.1f} us by "
        f"{times.bound_by}; expected / measured {expected.seconds / seconds:.2f}",
    )
    yield NoteLine(
        "plan",
        f"{name} on {topology}: planned peak {(planned.memory.peak or 0) / _MIB:,.1f} MiB of "
        f"{planned.memory.capacity / _MIB:,.0f}; peak in use since the start of this process "
        f"{in_use}, of {stats.get('bytes_limit', 0) / _MIB:,.0f} that JAX may use",
    )


def _measure(strategy: jaxdist.Strategy, step: Any, held: Any, given: Any, steps: int) -> float:
    """Return the seconds of a step: the median of several bursts, each waited for at its end."""
    found = []
    for number in range(1 + _ROUNDS):
        begin = time.perf_counter()
        for _ in range(steps):
            held, _ = strategy.run(step, (held, given), options=DONATE)
        jax.block_until_ready(held)
        if number:
            found.append((time.perf_counter() - begin) / steps)
    return statistics.median(found)
