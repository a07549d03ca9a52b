"""What the processes of a job do that trains the language model on devices of all processes."""

import json
import os
import pathlib
import signal
from typing import Any

from rich.console import Console

from jaxdist import jobs
from jaxdist.jobs._run.run import Run

ROOT = pathlib.Path(__file__).parents[3]
_SMALL = (
    "strategy.kind=multi_worker_mirrored",
    "strategy.virtual_devices=8",
    "model.layers=8",
    "model.width=8",
    "model.heads=2",
    "model.hidden=16",
    "model.dropout=0.1",
    "data.sequence_length=8",
    "data.stride=64",
    "data.test_fraction=0.01",
    "data.batch_size=16",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=1",
    "training.steps=6",
    "checkpoint.every=2",
    "generate.bytes=0",
    "output.picture=",
)


def train(
    folder: str, entries: tuple[str, ...], dies_after: int = 0, config: str = "pipeline"
) -> None:
    """Train; SIGKILL ends the last process after a step, if there is one."""
    here = [f"output.directory='{folder}'", f"checkpoint.directory='{folder}/checkpoints'"]
    loaded = jobs.load_job_config(
        ROOT / "configs" / f"topics_lm_{config}.toml", [*_SMALL, *here, *entries]
    )
    strategy = jobs.make_strategy(loaded.values)
    if dies_after and strategy.layout.process.index == strategy.layout.process.count - 1:
        collect = Run._collect

        def collect_or_die(self: Run, step: int, loss: Any) -> None:
            collect(self, step, loss)
            if step == dies_after:
                loss.block_until_ready()
                os.kill(os.getpid(), signal.SIGKILL)

        Run._collect = collect_or_die  # type: ignore[method-assign]
    jobs.train(loaded, strategy, console=Console(quiet=True))


def read_losses(folder: str) -> list[float]:
    """Return the losses of a run whose processes have all ended: process 0 writes them last."""
    losses: list[float] = json.loads((pathlib.Path(folder) / "metrics.json").read_text())["losses"]
    return losses
