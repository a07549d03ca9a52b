"""The report of a run, and whether the files show that it is finished, before JAX starts."""

import dataclasses
from pathlib import Path
from typing import Any

from jaxdist._buckets import Place, as_place, shorten_place
from jaxdist._checkpoints import find_damage, list_steps, read_dict, read_saved_notes
from jaxdist.jobs._config.changes import check_same_run
from jaxdist.jobs._config.checks import find_output
from jaxdist.jobs._config.load import LoadedConfig
from jaxdist.jobs._config.schema import JobConfig, OutputConfig


@dataclasses.dataclass(frozen=True)
class TrainingReport:
    """The report of a run.

    Attributes:
        steps: The completed steps of all runs together.
        num_replicas: The replicas of this run.
        unit: The unit of throughput, such as images or bytes.
        evaluation: The measures of the last evaluation; None if the run was interrupted.
        headline: A sentence about the evaluation; None if the run was interrupted.
        units_per_s: Units of training data per second, without the first step (it compiles),
            evaluation and checkpoints; None if the run had fewer than two steps.
        was_interrupted: Whether Ctrl-C ended the run.
        next_step: The step of the checkpoint from which the next run resumes; None if there is no
            checkpoint.
        was_finished: Whether an earlier run was finished, so that this one did nothing.
    """

    steps: int
    num_replicas: int
    unit: str
    evaluation: dict[str, float] | None
    headline: str | None
    units_per_s: float | None
    was_interrupted: bool
    next_step: int | None
    was_finished: bool = False


def finished_run(
    loaded: LoadedConfig[Any], *, accept_changes: bool = False
) -> TrainingReport | None:
    """Return the report of a run that has finished its training and written its files.

    Cost:
        Reads two small files, writes nothing, and uses no device.

    Args:
        loaded: As for `train`.
        accept_changes: As for `train`.

    Returns:
        The report; None if the run is not finished.

    Raises:
        CheckpointError: The run was trained with other values than those of the configuration.

    Example:
        >>> from jaxdist.jobs import load_job_config
        >>> sets = ["checkpoint.directory=/no/such/folder"]
        >>> finished_run(load_job_config("configs/digits_mirrored.toml", sets)) is None
        True
    """
    config: JobConfig = loaded.values
    folder = as_place("directory", config.checkpoint.directory, "runs/job")
    total = config.training.steps
    steps = list_steps(folder)
    if not config.checkpoint.resume or not steps or steps[-1] != total:
        return None
    # A damaged checkpoint or other metrics are not an error here: the run then starts, and its
    # checks report them.
    notes = read_saved_notes(folder, total)
    if notes is None or find_damage(folder, total, read_contents=False):
        return None
    metrics = _read_metrics(config.output)
    # The losses show whether the files belong to this checkpoint or to another run.
    if metrics is None or metrics.get("losses") != notes.get("history", {}).get("losses"):
        return None
    # See Note [What a resumed run checks].
    check_same_run(folder, total, notes.get("config"), loaded, accept_changes=accept_changes)
    return TrainingReport(
        steps=total,
        num_replicas=metrics["replicas"],
        unit=metrics["unit"],
        evaluation=metrics["evaluations"][-1],
        headline=metrics["headline"],
        units_per_s=None,
        was_interrupted=False,
        next_step=total,
        was_finished=True,
    )


def finished_line(report: TrainingReport, loaded: LoadedConfig[Any]) -> str:
    """Return a line that says that the run was finished before, and how to train more."""
    output = loaded.values.output
    return (
        f"finished before, at step {report.steps}: nothing was trained or written. The metrics are "
        f"in {shorten_place(find_output(output) / output.metrics)}; "
        "--set training.steps=... continues from there"
    )


_NEEDED = {"losses", "replicas", "unit", "evaluations", "headline"}


def _read_metrics(output: OutputConfig) -> dict[str, Any] | None:
    """Read the metrics file. Return None if it or the configured picture is missing."""
    folder = find_output(output)
    if output.picture and not _is_file(folder / output.picture):
        return None
    found = read_dict(folder / output.metrics)
    return found if found is not None and found.keys() >= _NEEDED else None


def _is_file(path: Place) -> bool:
    return path.is_file() if isinstance(path, Path) else path.exists()
