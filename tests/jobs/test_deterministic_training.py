"""The main job with `deterministic = true`: the number of devices changes no bit."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from jaxdist.errors import ArgumentError
from jaxdist.jobs import DigitsConfig, load_config, make_strategy, train
from jaxdist.jobs.digits import DigitsTask
from jaxdist.training import Checkpoints

SHIPPED = Path(__file__).parents[2] / "configs" / "digits_mirrored.toml"


def _train(folder: Path, devices: int, steps: int) -> tuple[list[float], list[Any], list[bytes]]:
    """Losses, evaluations and the bits of the last state of a run."""
    overrides = [
        f"output.directory='{folder}'",
        f"checkpoint.directory='{folder / 'checkpoints'}'",
        "output.picture=",
        f"strategy.virtual_devices={devices}",
        "strategy.deterministic=true",
        "model.channels=[4, 8]",
        "model.hidden=16",
        "data.batch_size=32",
        "optimizer.schedule=constant",
        f"training.steps={steps}",
        "checkpoint.every=100",
    ]
    loaded = load_config(DigitsConfig, SHIPPED, overrides)
    strategy = make_strategy(loaded.values)
    assert len(strategy.extended.worker_devices) == devices
    train(loaded, strategy, console=Console(file=io.StringIO()))
    metrics = json.loads((folder / "metrics.json").read_text())

    config = loaded.values
    net, optimizer = DigitsTask(config).build(strategy)
    modules = {"model": net, "optimizer": optimizer}
    like = {name: nnx.to_pure_dict(nnx.state(module)) for name, module in modules.items()}
    with Checkpoints(config.checkpoint.directory) as checkpoints:
        state = checkpoints.restore(steps, like=like).state
    return (
        metrics["losses"],
        metrics["evaluations"],
        [np.asarray(x).tobytes() for x in jax.tree.leaves(state)],
    )


@pytest.mark.slow
@pytest.mark.optimized
def test_the_digits_job_has_the_same_bits_on_1_2_4_and_8_devices_after_200_steps(
    tmp_path: Path,
) -> None:
    first = _train(tmp_path / "1", 1, 200)
    assert len(first[0]) == 200
    assert first[0][-1] < first[0][0] / 4
    for devices in 2, 4, 8:
        assert _train(tmp_path / str(devices), devices, 200) == first
    # The first half is that of eight devices, and the second runs on two.
    checkpoints = tmp_path / "resumed" / "checkpoints"
    shutil.copytree(tmp_path / "8" / "checkpoints", checkpoints)
    shutil.rmtree(checkpoints / "200")
    (checkpoints / "manifests" / "200.json").unlink()
    assert _train(tmp_path / "resumed", 2, 200) == first
    assert (
        json.loads((tmp_path / "resumed" / "metrics.json").read_text())["resumed_from_step"] == 100
    )


def test_a_number_of_virtual_replicas_that_does_not_fit_is_refused() -> None:
    overrides = ["strategy.virtual_devices=8", "strategy.deterministic=4"]
    loaded = load_config(DigitsConfig, SHIPPED, overrides)
    with pytest.raises(ArgumentError, match="8 devices cannot share 4 virtual replicas"):
        make_strategy(loaded.values)
