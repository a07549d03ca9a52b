"""The program that the device really runs, read by `jaxdist.hlo`, and the memory that it takes."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import jaxdist
from benchmarks._lines import CountLine, Line, NoteLine, SkipLine
from benchmarks._models import model
from benchmarks._steps import api_step
from jaxdist import hlo
from jaxdist._gpus import cluster_of, describe_gpus

_MIB = 1 << 20


def compiled(is_smoke: bool) -> Iterator[Line]:
    """What the compiler made of a training step: nothing unknown, and the products of the trace."""
    name = "tiny" if is_smoke else "mlp"
    params, batch, loss_fn = model(name)
    strategy = jaxdist.MirroredStrategy(jax.devices()[:1])
    [given] = strategy.experimental_distribute_dataset([batch])
    held = jax.device_put(params, strategy.replicated_sharding)
    step = api_step(loss_fn)
    program = strategy.lower(step, (held, given)).compile()
    text = program.as_text()
    work = hlo.work(text)
    unknown = ", ".join((*hlo.unknown(text), *work.unknown)) or "nothing"
    yield CountLine("compiled", name, "not known to the reader", "", unknown, "nothing")
    if name == "mlp":
        wanted = _products_of_mlp(len(batch[0]))
        yield CountLine("compiled", name, "FLOP", "by hand", f"{work.flops:,}", f"{wanted:,}")
    yield from _against_described(name, loss_fn, params, batch, work)
    yield from _memory(name, strategy, step, (held, given), program.executable)


def _products_of_mlp(rows: int) -> int:
    """Forward, and twice that backward, but for the gradient of the images."""
    layers = [784 * 512, 512 * 512, 512 * 10]
    return 2 * rows * (3 * sum(layers) - layers[0])


def _against_described(
    name: str, loss_fn: Any, params: Any, batch: Any, work: hlo.Work
) -> Iterator[Line]:
    """The same step, compiled by the same compiler for a GPU that is only described."""
    if jax.default_backend() != "gpu":
        yield SkipLine("compiled", "a described GPU: this is no GPU")
        return
    try:
        [device] = describe_gpus(cluster_of("h100:1x1"))
    except Exception as error:
        why = str(error).splitlines()[0]
        yield SkipLine("compiled", f"a described GPU: {type(error).__name__}: {why}")
        return
    there = jax.sharding.SingleDeviceSharding(device)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype, sharding=there),
        (params, batch),
    )
    found = jax.jit(jax.value_and_grad(loss_fn)).lower(*shapes).compile()
    other = hlo.work(found.as_text() or "")
    yield CountLine(
        "compiled", name, "FLOP", "a described H100", f"{work.flops:,}", f"{other.flops:,}"
    )
    yield NoteLine(
        "compiled",
        f"{name}: traffic {work.memory_bytes / _MIB:,.1f} MiB here, and "
        f"{other.memory_bytes / _MIB:,.1f} MiB of its gradient as described for an H100",
    )


def _memory(
    name: str, strategy: jaxdist.Strategy, step: Any, args: tuple[Any, ...], executable: Any
) -> Iterator[Line]:
    """What the compiler says a step needs, and what the device had in use."""
    told = executable.memory_analysis()
    needs = told.argument_size_in_bytes + told.output_size_in_bytes + told.temp_size_in_bytes
    jax.block_until_ready(strategy.run(step, args))
    stats = jax.devices()[0].memory_stats()
    if not stats or "peak_bytes_in_use" not in stats:
        yield SkipLine("compiled", "memory in use: this platform does not tell")
        return
    yield NoteLine(
        "compiled",
        f"{name}: the compiler says {needs / _MIB:,.1f} MiB, the peak in use since the start of "
        f"this process is {stats['peak_bytes_in_use'] / _MIB:,.1f} MiB",
    )
