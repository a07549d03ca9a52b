"""The way into a step that touches variables: their arrays go in and come out beside the rest."""

from collections.abc import Callable
from typing import Any

from jaxdist import _compat
from jaxdist.program._donation import has_repeats
from jaxdist.program._variables_lift import LiftedVariables
from jaxdist.runtime import CPU_STEPS
from jaxdist.values import held_by


class LiftedCall:
    """Calls of one step with the variables of one of its programs, through JAX's C++ call path.

    The order of the leaves is that of the program's inputs: written variables, the arguments,
    variables that are only read.
    """

    def __init__(self, step: Any, variables: LiftedVariables) -> None:
        self.variables = variables
        self._step = step
        self._dispatch: Callable[..., Any] = _compat.make_dispatcher(step.name, self._miss)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step, variables = self._step, self.variables
        written, read_only = held_by(variables.written), held_by(variables.read_only)
        if step.donates and has_repeats((written, args, kwargs, read_only)):
            return step.slow(*args, **kwargs)
        if step.bounded:
            CPU_STEPS.make_room()
        results = self._dispatch(written, args, kwargs, read_only)
        if type(results) is _Slow:
            return step.slow(*args, **kwargs)
        if variables.written:
            state, result = results
            variables.write(state)
        else:
            result = results
        if step.bounded:
            CPU_STEPS.dispatched(results)
        return result

    def _miss(self, given: tuple[Any, ...], _: dict[str, Any]) -> tuple[Any, Any]:
        written, args, kwargs, read_only = given
        found: tuple[Any, Any] | None = self._step.run_with(
            self.variables, written, args, kwargs, read_only
        )
        return (_Slow(), None) if found is None else found


class _Slow:
    """A dispatcher's way to say: this call has to go the slow way."""

    __slots__ = ()
