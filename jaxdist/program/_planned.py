"""Calls with static arguments and NNX objects, taken out before the C++ call path."""

import dataclasses
from collections.abc import Callable
from typing import Any

from flax import nnx

from jaxdist.program._arguments import Flat, GraphNode, Static, flatten
from jaxdist.program._donation import has_repeats
from jaxdist.program._graph import KeptGraph
from jaxdist.runtime import CPU_STEPS


class Slow:
    """A dispatcher's way to say: this call has to go the slow way."""

    __slots__ = ("call",)

    def __init__(self, call: tuple[Any, Any]) -> None:
        self.call = call


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which top-level arguments are static, and which are NNX objects."""

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
    ) -> "Plan | None":
        """The plan for calls like this one; None where such an argument is inside another."""
        static = [i for i, a in enumerate(args) if i in numbers or _is_static_leaf(a)]
        named = [k for k, v in kwargs.items() if k in names or _is_static_leaf(v)]
        nodes = [i for i, a in enumerate(args) if isinstance(a, nnx.Pytree)]
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


class Planned:
    """Calls through a plan: static values choose a dispatcher, NNX variables become leaves."""

    def __init__(self, step: Any, plan: Plan) -> None:
        self.plan = plan
        self._step = step
        self._dispatchers: dict[Any, Callable[..., Any]] = {}
        self._taken = frozenset(plan.static_numbers) | frozenset(plan.node_numbers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan, step = self.plan, self._step
        try:
            static = [args[i] for i in plan.static_numbers]
            static += [kwargs[n] for n in plan.static_names]
            nodes = [args[i] for i in plan.node_numbers]
            key = (len(args), *[(type(s), s) for s in static])
            kept = step.kept_for(nodes) if nodes else None
            known = kept.dispatchers if kept else self._dispatchers
            dispatch = known.get(key)
        except (IndexError, KeyError, TypeError):
            # This call has no static argument or NNX object where calls before it had one.
            return step.direct(*args, **kwargs)
        if nodes and kept is None:
            return step.slow(*args, **kwargs)
        is_new = dispatch is None
        if dispatch is None:
            dispatch = self._new(kept, len(args), static)
        rest = [a for i, a in enumerate(args) if i not in self._taken]
        named = {k: v for k, v in kwargs.items() if k not in plan.static_names}
        leaves = kept.read() if kept else []
        if step.donates and has_repeats((leaves, rest, named)):
            return step.slow(*args, **kwargs)
        if step.bounded:
            CPU_STEPS.make_room()
        results = dispatch(leaves, *rest, **named)
        if type(results) is Slow:
            return step.slow(*results.call[0], **results.call[1])
        if is_new:
            known[key] = dispatch
        if kept is not None:
            state, result = results
            kept.write(state)
        else:
            result = results
        if step.bounded:
            CPU_STEPS.dispatched(results)
        return result

    def _new(self, kept: KeptGraph | None, count: int, static: list[Any]) -> Callable[..., Any]:
        plan = self.plan
        numbers = plan.static_numbers
        fixed = dict(zip(numbers, static, strict=False))
        names = dict(zip(plan.static_names, static[len(numbers) :], strict=True))

        def restore(rest: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
            held = dict(fixed)
            if kept is not None:
                held.update(zip(plan.node_numbers, kept.nodes, strict=True))
            others = iter(rest[1:])
            whole = tuple(held[i] if i in held else next(others) for i in range(count))
            return whole, {**named, **names}

        return self._step.dispatcher_for(plan, restore)
