"""What a run leaves behind: a metrics file and a picture of its learning curve."""

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
    """Losses of all steps from the first, and evaluations; saved with every checkpoint.

    Attributes:
        losses: Training loss of step i + 1.
        evaluations: `{"step": ..., "loss": ..., ...}` each, with the measures of the task.
        changes: Entries of the configuration that were changed on the way: after which step,
            from which value, to which.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    evaluations: list[dict[str, float]] = dataclasses.field(default_factory=list)
    changes: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def versions() -> dict[str, str]:
    """Python and the packages that decide a result, `"not installed"` where one is missing."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "from source" if name == "jaxdist" else "not installed"
    return found


def draw_learning_curve(path: Path, history: History, curve: Curve, *, title: str) -> None:
    """Draw training loss, held-out loss and a measure of the task over the steps into a PNG file.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require_extra("matplotlib", "draw the learning curve")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure of its own canvas: nothing of the user's matplotlib state is touched.
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
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        figure.savefig(partial, format="png")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
