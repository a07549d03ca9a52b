"""Type aliases that several rooms share."""

from typing import Any, TypeAlias

PyTree: TypeAlias = Any
AxisNames: TypeAlias = tuple[str, ...]
