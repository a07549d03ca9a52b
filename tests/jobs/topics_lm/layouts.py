"""Trains the language model a few steps on a layout, for comparisons with one device."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from jaxdist import jobs
from jaxdist.data import batches
from jaxdist.jobs.topics_lm import TopicsTask, generate
from jaxdist.training import evaluate

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = (
    "model.width=16",
    "model.heads=4",
    "model.hidden=32",
    "data.sequence_length=16",
    "data.stride=64",
    "data.test_fraction=0.01",
    "data.batch_size=16",
    "model.dropout=0.1",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=3",
)
ONE = ("strategy.virtual_devices=v5e:1x1", "strategy.positions=1", "strategy.experts=1")
FSDP = ("strategy.partition=fsdp", "strategy.whole_below=0")
STAGES = ("strategy.stages=2", "model.scan_layers=true")


class Trained(NamedTuple):
    """What training has given: the results of steps, the loss of an evaluation, and a text."""

    outputs: list[Any]
    loss: float
    text: bytes

    def of(self, name: str) -> np.ndarray:
        """A number of each step."""
        return np.array([x[name] if isinstance(x, dict) else x for x in self.outputs], float)


def load(config: str, *overrides: str) -> Any:
    """The configuration of a small model."""
    return jobs.load_job_config(CONFIGS / f"topics_lm_{config}.toml", [*TINY, *overrides])


def train(config: str, *overrides: str, steps: int = 5) -> Trained:
    """Train some steps, evaluate and generate."""
    values = load(config, *overrides).values
    strategy, task = jobs.make_strategy(values), TopicsTask(values)
    model, optimizer = task.build(strategy)
    source = batches(task.data.train, 16, shuffle=True, drop_remainder=True, repeat=None)
    with iter(strategy.experimental_distribute_dataset(source)) as data:
        args = ((model, optimizer, next(data)) for _ in range(steps))
        outputs = [strategy.run(task.train_step, a) for a in args]
    # The last batch has 5 of 16 rows.
    held_out = {name: x[:21] for name, x in task.data.held_out.items()}
    means = evaluate(strategy, task.evaluation_step, model, batches(held_out, 16))
    assert means["weight"] == held_out["length"].sum()
    text = generate(strategy, model, "The ", 4, context_length=16, temperature=0.0)
    return Trained(outputs, means["loss"], text)


def run_job(folder: Path, config: str, *entries: str) -> dict[str, Any]:
    """Run the job in a folder, and return its metrics."""
    here = [f"output.directory='{folder}'", f"checkpoint.directory='{folder / 'checkpoints'}'"]
    more = ("output.picture=", "generate.bytes=4", "optimizer.warmup_steps=1", *entries)
    loaded = load(config, *here, *more)
    jobs.train(loaded, jobs.make_strategy(loaded.values), console=Console(quiet=True))
    metrics: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return metrics
