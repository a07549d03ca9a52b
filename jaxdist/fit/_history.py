"""`History`, the values of all epochs, and `Summary`, a table of a model's variables."""

import dataclasses
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxdist._called import called
from jaxdist._checkpoints import replace_file
from jaxdist._reports import Report, Table, as_fixed_width, plural
from jaxdist._validate import as_path
from jaxdist.errors import ContextError
from jaxdist.training import require_extra


@dataclasses.dataclass
class History:
    """The loss and metrics of all epochs of a `fit`.

    Attributes:
        history: A list of values for each name; names of validation values begin with `val_`.
        epoch: The numbers of the epochs, from `initial_epoch`.
        params: `epochs`, `steps` of an epoch, and `verbose`.
        monitor: The value that `EarlyStopping` watched; None without it.
        best_epoch: The epoch with the best value of `monitor`.
        restored_epoch: The epoch whose weights were restored; None if the model has the last ones.

    Example:
        >>> fit.History({"loss": [2.0, 1.0]}, [0, 1])
        History of 2 epochs: loss 2 to 1

    Source:
        `keras.callbacks.History`; `plot` is new.
    """

    history: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    epoch: list[int] = dataclasses.field(default_factory=list)
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    monitor: str | None = None
    best_epoch: int | None = None
    restored_epoch: int | None = None
    # Validation may run every few epochs only.
    _epochs_of: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    def add(self, epoch: int, logs: dict[str, float]) -> None:
        """Add the logs of an epoch."""
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)
            self._epochs_of.setdefault(name, []).append(epoch)

    def __repr__(self) -> str:
        ends = [
            f"{name} {values[0]:.4g} to {values[-1]:.4g}" for name, values in self.history.items()
        ]
        number = plural(len(self.epoch), "epoch")
        return f"History of {number}" + (": " if ends else "") + ", ".join(ends)

    @called("fit.History.plot")
    def plot(self, path: str | Path | None = None) -> Any:
        """Draw each value over the epochs; training and validation share a plot.

        A dashed line marks the best epoch: by the value that `EarlyStopping` watched, or else by
        the validation loss or, without one, the loss. A label says if its weights were restored.

        Args:
            path: Where to write a PNG; None writes none.

        Returns:
            A `matplotlib.figure.Figure`, which a notebook shows.

        Raises:
            MissingExtraError: matplotlib is not installed.
            ContextError: No epoch is complete yet.
        """
        if not self.epoch:
            raise ContextError(
                "fit.History.plot was called, and no epoch is complete.\n\n"
                "It draws values over epochs; a fit that resumes a finished training has none.\n\n"
                "Call fit first, or pass a higher epochs to it."
            )
        if path is not None:
            path = as_path("path", path, "history.png")
        require_extra("matplotlib", "draw the history")
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        names = [name for name in self.history if not name.startswith("val_")]
        # pyplot would change the matplotlib state of the user; a figure with its own canvas does
        # not.
        figure = Figure(figsize=(4.5 * len(names), 3.5), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            for kind, label in ((name, "training"), (f"val_{name}", "validation")):
                values = self.history.get(kind, [])
                if values:
                    epochs = self._epochs_of.get(kind, self.epoch)
                    axes.plot([e + 1 for e in epochs], values, "o-", markersize=3, label=label)
            if (best := self._find_best()) is not None:
                epoch, label = best
                axes.axvline(epoch + 1, color="0.4", linestyle="--", linewidth=1, label=label)
            axes.set(xlabel="epoch", ylabel=name)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.legend()
        if path is not None:
            replace_file(Path(path), _as_png(figure))
        # IPython shows figures by itself only after pyplot has made one.
        vars(figure)["_repr_png_"] = lambda: _as_png(figure)
        return figure

    def _find_best(self) -> tuple[int, str] | None:
        """Return the best epoch and its label."""
        monitor, best = self.monitor, self.best_epoch
        if monitor is None:
            monitor = "val_loss" if "val_loss" in self.history else "loss"
            values = self.history.get(monitor, [])
            epochs = self._epochs_of.get(monitor, self.epoch)
            known = [
                (value, e) for value, e in zip(values, epochs, strict=True) if not math.isnan(value)
            ]
            best = min(known)[1] if known else None
        if best is None:
            return None
        restored = ", restored" if self.restored_epoch == best else ""
        return best, f"epoch {best + 1}: best {monitor}{restored}"


def _as_png(figure: Any) -> bytes:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    return drawn.getvalue()


@dataclasses.dataclass(frozen=True)
class Row:
    """A variable of the model.

    Attributes:
        path: Its path in the module, such as `layers[0].kernel`.
        layer: The class of the layer.
        shape: Its global shape.
        dtype: Its dtype.
        sharding: The mesh axes over which each dim is split.
        elements: The number of its elements.
        bytes_per_device: The bytes that the fullest device holds.
        is_parameter: Whether it is a parameter, and so trained.
    """

    path: str
    layer: str
    shape: tuple[int, ...]
    dtype: str
    sharding: str
    elements: int
    bytes_per_device: int
    is_parameter: bool


@dataclasses.dataclass(frozen=True, repr=False)
class Summary(Report):
    """The result of `Model.summary`: print it, or show it in a notebook.

    Attributes:
        title: The class of the module.
        rows: The variables.
        optimizer_bytes: The bytes of the optimizer's state on the fullest device.

    Example:
        >>> model = fit.Model(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> model.summary().parameters
        9

    Source:
        `keras.Model.summary`.
    """

    title: str
    rows: tuple[Row, ...]
    optimizer_bytes: int

    @property
    def parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(row.elements for row in self.rows if row.is_parameter)

    @property
    def bytes_per_device(self) -> int:
        """The bytes of all variables and the optimizer on the fullest device."""
        return sum(row.bytes_per_device for row in self.rows) + self.optimizer_bytes

    def parts(self) -> Iterator[Table | str]:
        """Return the table of variables, and the totals."""
        of_sizes = ("elements", "bytes of a device")
        columns = ("variable", "layer", "shape", "dtype", "sharding", *of_sizes)
        rows = tuple(
            (
                row.path,
                row.layer,
                str(list(row.shape)),
                row.dtype,
                row.sharding,
                f"{row.elements:,}",
                f"{row.bytes_per_device:,}",
            )
            for row in self.rows
        )
        whole = frozenset({"shape", "sharding"})
        yield Table(self.title, columns, rows, frozenset(of_sizes), whole)
        yield (
            f"{self.parameters:,} parameters; on each device {self.bytes_per_device:,} bytes, of "
            f"which the optimizer has {self.optimizer_bytes:,}"
        )

    def _repr_html_(self) -> str:
        return as_fixed_width(self.text())


def summarize(module: nnx.Module, compiled: Any) -> Summary:
    """Return the summary of a module and its optimizer."""
    layers = {path: type(layer).__name__ for path, layer in nnx.iter_modules(module)}
    rows = []
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        array = variable[...] if hasattr(variable, "__getitem__") else variable
        if not hasattr(array, "sharding"):
            continue
        rows.append(
            Row(
                path=_join_path(path),
                layer=layers.get(tuple(path[:-1]), ""),
                shape=tuple(array.shape),
                dtype=str(array.dtype),
                sharding=_describe_sharding(array),
                elements=math.prod(array.shape),
                bytes_per_device=_count_bytes(array),
                is_parameter=isinstance(variable, nnx.Param),
            )
        )
    state = [] if compiled is None else jax.tree.leaves(nnx.state(compiled.optimizer))
    return Summary(type(module).__name__, tuple(rows), sum(map(_count_bytes, state)))


def _join_path(path: Any) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _describe_sharding(array: Any) -> str:
    spec = getattr(array.sharding, "spec", None)
    if spec is None or not any(spec):
        return "whole"
    parts = [*spec, *(None,) * (array.ndim - len(spec))]
    return "[" + ", ".join("-" if p is None else str(p) for p in parts) + "]"


def _count_bytes(array: Any) -> int:
    if not hasattr(array, "sharding"):
        return 0
    shard = array.sharding.shard_shape(array.shape)
    return math.prod(shard) * array.dtype.itemsize
