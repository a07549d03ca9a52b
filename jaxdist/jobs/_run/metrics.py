"""The history of a run, and the files that a run writes at its end."""

import dataclasses
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist._buckets import Place
from jaxdist._checkpoints import replace_file
from jaxdist.errors import BucketError, ConfigError
from jaxdist.jobs._config.checks import find_output
from jaxdist.jobs._config.schema import OutputConfig
from jaxdist.jobs._run.finished import TrainingReport
from jaxdist.jobs._task import Curve, Task
from jaxdist.training import require_extra


@dataclasses.dataclass
class History:
    """The losses of all steps, and all evaluations. Every checkpoint contains the history.

    Attributes:
        losses: The training losses; index i is step i + 1.
        evaluations: `{"step": ..., "loss": ..., ...}` each, with the measures of the task.
        measures: The other numbers that the train step returns, by name, as `losses`.
        changes: Changed entries of the configuration: after which step, the old value, and the new
            value.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    evaluations: list[dict[str, float]] = dataclasses.field(default_factory=list)
    measures: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    changes: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, outputs: Sequence[Any]) -> None:
        """Append the results of the next steps: for each its loss, or a dict of it and others."""
        for output in outputs:
            numbers, before = as_numbers(output), len(self.losses)
            self.losses.append(numbers.pop("loss"))
            for name in dict.fromkeys((*self.measures, *numbers)):
                measured = self.measures.setdefault(name, [])
                # Steps that did not return it have nan, so that index i stays step i + 1.
                measured += [math.nan] * (before - len(measured))
                measured.append(numbers.get(name, math.nan))

    def after(self, step: int, outputs: Sequence[Any]) -> "History":
        """Return the history up to a step, with the results of steps that it does not have yet.

        Args:
            step: The number of the step.
            outputs: The results of the next steps, as for `add`. Those after `step` are not read:
                they may be of a step that has failed.
        """
        cut = dataclasses.replace(
            self,
            losses=self.losses[:step],
            evaluations=[e for e in self.evaluations if e["step"] <= step],
            measures={name: found[:step] for name, found in self.measures.items()},
        )
        cut.add(outputs[: max(0, step - len(self.losses))])
        return cut


def as_numbers(output: Any) -> dict[str, float]:
    """Return the numbers that a train step has returned, by name."""
    named = output if isinstance(output, Mapping) else {"loss": output}
    return {name: float(x) for name, x in named.items()}


def write_metrics(path: Place, metrics: Mapping[str, Any]) -> None:
    """Write a JSON file. A reader sees the old file or all of the new one, never a part."""
    text = json.dumps(metrics, indent=2, allow_nan=True) + "\n"
    replace_file(path, text.encode())


def draw_learning_curve(path: Place, history: History, curve: Curve, *, title: str) -> None:
    """Draw training loss, held-out loss and a measure over the steps into a PNG file.

    A dashed line marks the evaluation with the smallest loss; the model is from the last step.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require_extra("matplotlib", "draw the learning curve")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # pyplot would change the matplotlib state of the user; a figure with its own canvas does not.
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss, measure = figure.subplots(1, 2)
    steps = [e["step"] for e in history.evaluations]
    trained = range(1, len(history.losses) + 1)
    loss.semilogy(trained, history.losses, linewidth=0.8, label="training")
    loss.semilogy(steps, [e["loss"] for e in history.evaluations], "o-", label="held out")
    loss.set(xlabel="step", ylabel="loss")
    measured = [curve.factor * e[curve.measure] for e in history.evaluations]
    measure.plot(steps, measured, "o-", color="C1")
    measure.set(xlabel="step", ylabel=curve.label)
    known = [(e["loss"], e["step"]) for e in history.evaluations if not math.isnan(e["loss"])]
    if known:
        best = min(known)[1]
        label = f"step {best:,.0f}: best held-out loss"
        for axes in (loss, measure):
            axes.axvline(best, color="0.4", linestyle="--", linewidth=1, label=label)
    loss.legend()
    figure.suptitle(title)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    replace_file(path, drawn.getvalue())


def write_output(
    config: OutputConfig,
    metrics: Mapping[str, Any],
    task: Task[Any],
    report: TrainingReport,
    history: History,
) -> list[Place]:
    """Write the metrics, and draw the picture if one is configured.

    Returns:
        The paths of the files.

    Raises:
        ConfigError: A file cannot be written.
    """
    folder = find_output(config)
    try:
        write_metrics(folder / config.metrics, metrics)
        if not config.picture:
            return [folder / config.metrics]
        title = f"{task.title}, {report.num_replicas} replicas, {report.headline}"
        draw_learning_curve(folder / config.picture, history, task.curve, title=title)
    except OSError as error:
        found, remedy = f"{error}.", "Free space or set another output.directory, and run again."
        if isinstance(error, BucketError):
            found, _, remedy = str(error).partition("\n\n")
        raise ConfigError(
            f"The files of output.directory {config.directory!r} cannot be written: {found}\n\n"
            f"The checkpoint of step {report.steps} is complete, and no step is trained twice.\n\n"
            f"{remedy}"
        ) from error
    return [folder / config.metrics, folder / config.picture]
