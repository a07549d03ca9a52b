"""`summary()`: the layers of a module, with shapes, parameters, shardings and bytes."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from jaxdist._reports import Report, Table, as_fixed_width


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
