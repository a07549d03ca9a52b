"""The history of a run, and the picture of its learning curve."""

import dataclasses
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from jaxdist.jobs._task import Curve
from jaxdist.training import require_extra

VERSIONED = ("jaxdist", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass
class History:
    """The losses of all steps, and all evaluations. Every checkpoint contains the history.

    Attributes:
        losses: The training losses; index i is step i + 1.
        evaluations: `{"step": ..., "loss": ..., ...}` each, with the measures of the task.
        changes: Changed entries of the configuration: after which step, the old value, and the new
            value.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    evaluations: list[dict[str, float]] = dataclasses.field(default_factory=list)
    changes: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect a result.

    The version of a missing package is `"not installed"`.
    """
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "from source" if name == "jaxdist" else "not installed"
    return found


def draw_learning_curve(path: Path, history: History, curve: Curve, *, title: str) -> None:
    """Draw training loss, held-out loss and a measure over the steps, into a PNG file.

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
    loss.legend()
    measured = [curve.factor * e[curve.measure] for e in history.evaluations]
    measure.plot(steps, measured, "o-", color="C1")
    measure.set(xlabel="step", ylabel=curve.label)
    figure.suptitle(title)
    # A reader sees the old picture or all of the new one.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        figure.savefig(partial, format="png")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
