"""The rules of `jaxdist lint`, one in each file."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from jaxdist._lint.finding import Finding, Program, Rule
from jaxdist._lint.rules import (
    divided_metric,
    double_reduction,
    first_replica,
    pmap,
    process_zero,
    side_effect,
    square_under_fsdp,
    tf_names,
    uneven_mean,
    value_in_if,
)

_MODULES = (
    double_reduction,
    uneven_mean,
    first_replica,
    pmap,
    process_zero,
    tf_names,
    value_in_if,
    side_effect,
    square_under_fsdp,
    divided_metric,
)
RULES: Mapping[Rule, Callable[[Program], Iterator[Finding]]] = MappingProxyType(
    {module.RULE: module.find for module in _MODULES}
)
