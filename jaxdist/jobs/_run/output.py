"""The files that a run writes at its end."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdist.errors import ConfigError
from jaxdist.jobs._config.metrics_file import write_metrics
from jaxdist.jobs._config.schema import OutputConfig
from jaxdist.jobs._run.metrics import History, draw_learning_curve
from jaxdist.jobs._run.report import TrainingReport
from jaxdist.jobs._task import Task


def write_output(
    config: OutputConfig,
    metrics: Mapping[str, Any],
    task: Task,
    report: TrainingReport,
    history: History,
) -> list[Path]:
    """Write the metrics, and draw the picture if one is configured.

    Returns:
        The paths of the files.

    Raises:
        ConfigError: A file cannot be written.
    """
    folder = Path(config.directory)
    try:
        write_metrics(folder / config.metrics, metrics)
        if not config.picture:
            return [folder / config.metrics]
        title = f"{task.title}, {report.num_replicas} replicas, {report.headline}"
        draw_learning_curve(folder / config.picture, history, task.curve, title=title)
    except OSError as error:
        raise ConfigError(
            f"The files of output.directory {config.directory!r} cannot be written: {error}.\n\n"
            f"The checkpoint of step {report.steps} is complete, and no step is trained twice.\n\n"
            "Free space or set another output.directory, and run again."
        ) from error
    return [folder / config.metrics, folder / config.picture]
