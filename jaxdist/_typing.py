"""Type aliases that several rooms share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

PyTree: TypeAlias = Any
AxisName: TypeAlias = str
AxisNames: TypeAlias = tuple[str, ...]
StepFn: TypeAlias = Callable[..., Any]
Args: TypeAlias = Sequence[Any]
Kwargs: TypeAlias = Mapping[str, Any]
