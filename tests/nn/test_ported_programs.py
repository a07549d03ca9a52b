"""Programs of others, ported by a few statements, have the losses that they have on one device."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from jaxdist import partition
from tests.nn import ported_experts, ported_flax, ported_maxtext
from tests.nn.pipelines import strategy_of
from tests.nn.statements import Changes, count_changes
from tests.test_documentation import ROOT

STEPS = 10
WHOLE = partition.replicated()
Program = Callable[[], tuple[Any, Any]]
PAGE = ROOT / "docs" / "axes" / "which-axis.md"


def test_statements_are_counted_where_they_are_new() -> None:
    def before(x: Any) -> Any:
        y = x + 1
        for _ in range(3):
            y = y * 2
        z = y
        return z

    def after(x: Any) -> Any:
        """Moves and long calls do not count."""

        def inner(x: Any) -> Any:
            y = x + 1
            return y

        y = max(
            inner(x),
            inner(x),
        )
        return y

    # New: the def, its return and that at the end, which are equal, and the call.
    assert count_changes(before, after) == Changes(new=4, gone=0)
    assert count_changes(after, before) == Changes(new=4, gone=0)
    assert count_changes(before, before) == Changes(new=0, gone=0)


def place(strategy: Any, model: Any, rules: Any) -> Any:
    return model if strategy is None else partition.place(strategy, model, rules)


def run(strategy: Any, step: Any, batch: Any, *state: Any) -> Any:
    """Run a step of the original, or one of a port on the devices of a strategy."""
    if strategy is None:
        return step(*state, *batch)
    rows = jax.device_put(batch, strategy.per_replica_sharding)
    return strategy.run(step, (*state, *rows))


def train_flax(program: Program, strategy: Any = None, rules: Any = WHOLE) -> list[float]:
    # The model says where its parameters lie on another mesh, for which it asks Flax when made.
    with nnx.use_eager_sharding(False):
        model, step = program()
        step = nnx.jit(step) if strategy is None else step
        if program is ported_flax.on_stages:
            model.stack()
        model = place(strategy, model, rules)
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), right=nnx.metrics.Accuracy())
    losses = []
    for batch in ported_flax.make_batches(STEPS):
        if strategy is None:
            batch = jax.device_put(batch, PartitionSpec("batch", None))
        run(strategy, step, (batch,), model, optimizer, metrics)
        found = metrics.compute()
        losses += [float(found["loss"]), float(found["right"])]
        metrics.reset()
    return losses


@functools.cache
def of_flax() -> list[float]:
    mesh = jax.make_mesh(
        (1, 1), ("batch", "model"), (AxisType.Explicit,) * 2, devices=jax.devices()[:1]
    )
    with jax.set_mesh(mesh):
        return train_flax(ported_flax.original)


def train_experts(program: Program, strategy: Any = None, otherwise: Any = None) -> list[float]:
    model, step = program()
    if strategy is not None:
        model.stack()
    rules = partition.Rules([("experts/**", partition.Split(0))], otherwise=otherwise)
    model = place(strategy, model, rules)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    batches = ported_experts.make_batches(STEPS)
    return [float(run(strategy, step, batch, model, optimizer)[0]) for batch in batches]


@functools.cache
def of_maxtext() -> list[float]:
    return train_maxtext(ported_maxtext.original)


def train_maxtext(program: Program, strategy: Any = None) -> list[float]:
    model, step = program()
    step = nnx.jit(step) if strategy is None else step
    model = place(strategy, model, WHOLE.on_stages("decoder/layers/**"))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    losses = []
    for data in ported_maxtext.make_batches(STEPS):
        loss, weights = run(strategy, step, (data,), model, optimizer)
        losses += [float(loss), float(weights)]
    return losses


def difference(found: list[float], wanted: list[float]) -> float:
    return float(np.max(np.abs(np.subtract(found, wanted)) / np.abs(wanted)))


def read_counts(program: str) -> Changes:
    """The statements that the page names for a program."""
    [row] = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {program}")]
    new, gone = row.split(" | ")[2:4]
    return Changes(int(new), int(gone))


@pytest.mark.parametrize("shape", [{"data": 2, "stage": 4}, {"data": 4, "stage": 2}, {"data": 4}])
def test_the_transformer_of_flax_on_stages(shape: dict[str, int]) -> None:
    counts = count_changes(ported_flax.original, ported_flax.on_stages)
    assert counts.new <= 5
    assert counts == read_counts("miniGPT of Flax's examples: stages")
    rules = WHOLE.on_stages("transformer_blocks/**") if "stage" in shape else WHOLE
    losses = train_flax(ported_flax.on_stages, strategy_of(shape), rules)
    assert difference(losses, of_flax()) <= 1e-5


def test_the_transformer_of_flax_over_positions() -> None:
    counts = count_changes(ported_flax.original, ported_flax.over_positions)
    assert counts.new <= 5
    assert counts == read_counts("miniGPT of Flax's examples: positions")
    losses = train_flax(ported_flax.over_positions, strategy_of({"data": 2, "positions": 4}))
    assert difference(losses, of_flax()) <= 1e-5


@pytest.mark.parametrize("otherwise", [partition.Replicate(), partition.Shard(min_bytes=0)])
@pytest.mark.parametrize("shape", [{"data": 2, "experts": 4}, {"data": 4, "experts": 2}])
def test_the_mixture_of_a_notebook_over_devices(shape: dict[str, int], otherwise: Any) -> None:
    counts = count_changes(ported_experts.original, ported_experts.over_devices)
    assert counts.new <= 5
    assert counts == read_counts("Mixture of experts of a notebook")
    losses = train_experts(ported_experts.over_devices, strategy_of(shape), otherwise)
    wanted = train_experts(ported_experts.original, None, partition.Replicate())
    assert difference(losses, wanted) <= 1e-5


@pytest.mark.parametrize("shape", [{"data": 2, "stage": 4}, {"data": 4, "stage": 2}])
def test_the_scanned_layers_of_maxtext_on_stages(shape: dict[str, int]) -> None:
    counts = count_changes(ported_maxtext.original, ported_maxtext.on_stages)
    assert counts.new <= 5
    assert counts == read_counts("Scanned layers of MaxText")
    losses = train_maxtext(ported_maxtext.on_stages, strategy_of(shape))
    assert difference(losses, of_maxtext()) <= 1e-5
