"""`jaxdist train` in one process of a job."""

import json
import os
import pathlib

from jaxdist.cli import main


def make_settings(output: pathlib.Path, checkpoints: pathlib.Path) -> list[str]:
    """Return options of `jaxdist train` for 20 steps with one device in each process."""
    values = {
        "strategy.virtual_devices": 1,
        "training.steps": 20,
        "training.evaluate_every": 20,
        "checkpoint.every": 20,
        "output.directory": str(output),
        "output.picture": "",
        "checkpoint.directory": str(checkpoints),
    }
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def train(config: str, folder: str) -> tuple[int, list[float]]:
    """Train a configuration for some steps; return the exit code and the losses."""
    index = json.loads(os.environ.get("TF_CONFIG") or '{"task": {"index": 0}}')["task"]["index"]
    output = pathlib.Path(folder) / str(index)
    code = main(["train", config, *make_settings(output, pathlib.Path(folder) / "checkpoints")])
    # Process 0 writes for all.
    metrics = output / "metrics.json"
    return code, json.loads(metrics.read_text())["losses"] if metrics.exists() else []
