"""Prepares calls with static arguments, NNX objects and variables for the C++ call path."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxdist._compat import has_deleted, is_checking_numbers
from jaxdist._devices import CPU_STEPS
from jaxdist._program.arguments.arguments import Flat, GraphNode, Static, flatten
from jaxdist._program.arguments.exact import exact, exact_structure
from jaxdist._program.nnx.graph import CachedGraph
from jaxdist._program.run.call import update_state
from jaxdist._program.run.donation import has_repeats
from jaxdist._program.variables.lift import LiftedVariables
from jaxdist._values import get_arrays, list_arrays


class TakeSlowPath:
    """The result of a dispatcher that cannot handle a call; the caller then runs it slowly."""

    __slots__ = ()


class NotCompiled(TakeSlowPath):
    """The same, where the program of the call is not compiled yet.

    C++ never asks again for a record of a signature that had none. So the caller makes another
    dispatcher when the slow path has compiled the program.
    """

    __slots__ = ()


@dataclasses.dataclass(frozen=True)
class CallTemplate:
    """The positions of static arguments and NNX objects among the top-level arguments."""

    static_numbers: tuple[int, ...]
    static_names: tuple[str, ...]
    node_numbers: tuple[int, ...]

    @classmethod
    def of(
        cls,
        flat: Flat,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        numbers: frozenset[int],
        names: frozenset[str],
    ) -> "CallTemplate | None":
        """Return the template for calls like this one; None if such a value is nested deeper."""
        static = [i for i, a in enumerate(args) if i in numbers or _is_static_leaf(a)]
        named = [k for k, v in kwargs.items() if k in names or _is_static_leaf(v)]
        nodes = [i for i, a in enumerate(args) if isinstance(a, nnx.Pytree)]
        # The counts differ if such a value is nested in an argument, or one object is passed twice.
        taken = len(static) + len(named) + len(nodes)
        special = sum(isinstance(s, (Static, GraphNode)) for s in flat.slots)
        distinct = len({id(args[i]) for i in nodes}) == len(nodes) == len(flat.nodes)
        return (
            cls(tuple(static), tuple(named), tuple(nodes))
            if (taken == special and distinct)
            else None
        )


def _is_static_leaf(x: Any) -> bool:
    flat = flatten((x,), {})
    return len(flat.slots) == 1 and isinstance(flat.slots[0], Static)


_NONE: list[Any] = []


class FastCall:
    """A call path for one template, with the variables of one program.

    Static values choose a C++ dispatcher. The variables of NNX objects and those from the step's
    closure become leaves beside the arguments, in the order of the program's inputs.
    """

    def __init__(self, step: Any, template: CallTemplate, variables: LiftedVariables) -> None:
        self.template = template
        self.variables = variables
        self._step = step
        self._dispatchers: dict[Any, Callable[..., Any]] = {}
        self._taken = frozenset(template.static_numbers) | frozenset(template.node_numbers)
        self._is_plain = not self._taken and not template.static_names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        template, step, variables = self.template, self._step, self.variables
        rest: tuple[Any, ...] = args
        named, cached_graph, leaves, key = kwargs, None, _NONE, None
        known = self._dispatchers
        static: list[Any] = _NONE
        if not self._is_plain:
            try:
                static = [args[i] for i in template.static_numbers]
                static += [kwargs[n] for n in template.static_names]
                nodes = [args[i] for i in template.node_numbers]
                # See Note [Equal constants]
                key = (len(args), *map(exact, static))
                cached_graph = step.find_graph(nodes) if nodes else None
                known = cached_graph.dispatchers.setdefault(self, {}) if cached_graph else known
                hash(key)
            except (IndexError, KeyError, TypeError):
                # Earlier calls had a static argument or an NNX object where this one has none.
                return step.direct(*args, **kwargs) if not variables else step.slow(*args, **kwargs)
            # The NNX objects are new, or their structure changed.
            if nodes and cached_graph is None:
                return step.slow(*args, **kwargs)
            rest = tuple(a for i, a in enumerate(args) if i not in self._taken)
            named = {k: v for k, v in kwargs.items() if k not in template.static_names}
            leaves = cached_graph.read() if cached_graph else leaves
        if step.tells_structures_apart:
            key = (key, exact_structure(jax.tree.structure((rest, named))))
        dispatch = known.get(key)
        is_new = dispatch is None
        if dispatch is None:
            dispatch = self._make_dispatcher(cached_graph, len(args), static)
        written, read_only = _NONE, _NONE
        if variables:
            written, read_only = get_arrays(variables.written), get_arrays(variables.read_only)
        prepared = step.prepare((leaves, rest), named)
        if prepared is None:
            return step.slow(*args, **kwargs)
        (leaves, rest), named = prepared
        whole = leaves, written, rest, named, read_only
        if step.donates and (is_checking_numbers() or has_repeats(whole)):
            return step.slow(*args, **kwargs)
        if step.finds_deleted and has_deleted(jax.tree.leaves(whole)):
            return step.slow(*args, **kwargs)
        if step.mirrors:
            places = [i for i in range(len(args)) if i not in self._taken]
            donated = {n for n, place in enumerate(places) if place in step.donated}
            rest, named = step.mirrored(rest, named, donated)
        if step.counts_steps:
            CPU_STEPS.make_room()
        results = dispatch(leaves, written, rest, named, read_only)
        if isinstance(results, TakeSlowPath):
            if type(results) is NotCompiled:
                known.pop(key, None)
            return step.slow(*args, **kwargs)
        # Only a dispatcher that has worked is kept.
        if is_new:
            known[key] = dispatch
        result = update_state(results, cached_graph, variables)
        if step.counts_steps:
            CPU_STEPS.count_step(results, list_arrays)
        return result

    def _make_dispatcher(
        self, cached_graph: CachedGraph | None, count: int, static: list[Any]
    ) -> Callable[..., Any]:
        template = self.template
        numbers = template.static_numbers
        names = dict(zip(template.static_names, static[len(numbers) :], strict=True))

        def restore(rest: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
            if self._is_plain:
                return rest, named
            # Not strict: `static` also contains the values of keyword arguments.
            held = dict(zip(numbers, static, strict=False))
            if cached_graph is not None:
                held.update(zip(template.node_numbers, cached_graph.nodes, strict=True))
            others = iter(rest)
            whole = tuple(held[i] if i in held else next(others) for i in range(count))
            return whole, {**named, **names}

        return self._step.dispatcher_for(template, self.variables, restore)
