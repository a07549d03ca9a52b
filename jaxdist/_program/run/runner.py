"""Caches all functions that one strategy has run."""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from jaxdist import _compat
from jaxdist._called import called, name_call
from jaxdist._program.arguments.exact import exact
from jaxdist._program.arguments.options import RunOptions, check_options
from jaxdist._program.arguments.retrace import Compilation, RetraceWatch
from jaxdist._program.compile.program import Program
from jaxdist._program.run.donation import is_about_deleted
from jaxdist._program.run.step import Step
from jaxdist._replica import HasLayout
from jaxdist._validate import check_keys
from jaxdist.errors import ArgumentError, DonationError, NotFiniteError

# Functions without weak references (bound methods, partials) are kept alive, but only this many.
MAX_KEPT_FUNCTIONS = 256
_DEFAULT = RunOptions()


class Runner:
    """Finds the `Step` of a function.

    It holds plain functions weakly. So a redefined notebook cell frees its old programs.
    """

    def __init__(self, strategy: HasLayout) -> None:
        self._strategy = weakref.ref(strategy)
        # Steps by a weak reference to their function, or by that and their options. `Strategy.run`
        # reads this dict itself, to save a call.
        self.known: dict[Any, Step] = {}
        self._strong: OrderedDict[Any, Step] = OrderedDict()
        self._watch = RetraceWatch()
        # Whether some step donates arguments. Then all steps must check for deleted ones.
        self._guards = False

    @property
    def compilations(self) -> tuple[Compilation, ...]:
        """The programs that were compiled for calls of `run`, the oldest first."""
        return tuple(self._watch.compilations)

    def find_call(self, fn: Callable[..., Any], options: RunOptions | None) -> Callable[..., Any]:
        """Return the call path of `fn` with these options; None means the default ones."""
        # A known pair needs no check of the options.
        try:
            step = None if options is None else self.known.get((weakref.ref(fn), options))
        except TypeError:
            step = None
        return self.step(fn, options).call if step is None else step.call

    def step(self, fn: Callable[..., Any], options: RunOptions | None) -> Step:
        """Return the `Step` of `fn` with these options; make it at the first call."""
        chosen = _DEFAULT if options is None else check_options(options)
        if type(fn).__name__ == "function":
            return self._find_weakly_held(fn, chosen)
        key = (exact(fn), chosen) if _is_hashable(fn) else (id(fn), chosen)
        step = self._strong.get(key)
        if step is None:
            step = self._strong[key] = self._new(fn, chosen)
            if len(self._strong) > MAX_KEPT_FUNCTIONS:
                self._strong.popitem(last=False)
        else:
            self._strong.move_to_end(key)
        return step

    def _find_weakly_held(self, fn: Callable[..., Any], options: RunOptions) -> Step:
        def key_of(reference: weakref.ref[Any]) -> Any:
            return reference if options == _DEFAULT else (reference, options)

        step = self.known.get(key_of(weakref.ref(fn)))
        if step is None:
            step = self._new(fn, options)
            known = self.known
            # A weak reference other than that of the look-up: only this one removes the entry.
            kept = weakref.ref(fn, lambda dead: known.pop(key_of(dead), None))
            hash(kept)  # A weak reference can compute its hash only while the function lives.
            known[key_of(kept)] = step
        return step

    def _new(self, fn: Callable[..., Any], options: RunOptions) -> Step:
        strategy: Any = self._strategy()
        step = Step(fn, options, strategy, self._watch)
        # The first step that donates makes all other steps check for deleted arrays.
        if step.finds_deleted and not self._guards:
            self._guards = True
            for other in (*self.known.values(), *self._strong.values()):
                other.guard()
        elif self._guards:
            step.guard()
        return step

    @called("strategy.run")
    def explain(
        self,
        error: Exception,
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
        options: RunOptions | None,
    ) -> DonationError | NotFiniteError | ArgumentError | None:
        """Return a better error for a call that failed, or None."""
        try:
            if type(error) is ValueError:
                check_keys(f"{name_call()} was given", "args", tuple(args))
                check_keys(f"{name_call()} was given", "kwargs", dict(kwargs or {}))
            if isinstance(error, _compat.InvalidNumberError):
                self.step(fn, options).find_invalid_number(tuple(args), dict(kwargs or {}), error)
            if isinstance(error, (RuntimeError, ValueError)) and is_about_deleted(error):
                self.step(fn, options).check_deleted(tuple(args), dict(kwargs or {}))
        except (ArgumentError, DonationError, NotFiniteError) as better:
            return better
        return None

    def program(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, options: RunOptions | None
    ) -> Program:
        """Return the program that a call would run."""
        try:
            return self.step(fn, options).program(tuple(args), dict(kwargs or {}))
        except Exception as error:
            better = self.explain(error, fn, args, kwargs, options)
            if better is None:
                raise
            raise better from error


def _is_hashable(fn: Any) -> bool:
    try:
        hash(fn)
    except TypeError:
        return False
    return True
