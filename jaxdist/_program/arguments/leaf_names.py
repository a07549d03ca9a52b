"""Names traced leaves in JAX's error messages by the parameters of the step."""

import functools
import inspect
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxdist._program.arguments.arguments import argument_name

_NUMBERED = re.compile(r"args\[(\d+)\]")
_KEYED = re.compile(r"kwargs\['(\w+)'\]")


class LeafNames(inspect.Signature):
    """A signature through which JAX names each of several flat arguments.

    JAX calls `bind` to find each argument's parameter. `bind` returns the pytree path of each leaf.
    """

    __slots__ = ("_find",)

    _find: Callable[[], Sequence[str]]

    def __init__(self, find: Callable[[], Sequence[str]]) -> None:
        super().__init__([inspect.Parameter("leaves", inspect.Parameter.VAR_POSITIONAL)])
        self._find = find

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        """Return the arguments by their names."""
        names = self._find()
        # JAX may also bind arguments other than the flat leaves. Those have no names here.
        if kwargs or len(names) != len(args):
            return super().bind(*args, **kwargs)
        return types.SimpleNamespace(arguments=dict(zip(names, args, strict=True)))


def find_function_with_source(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a callable whose source line JAX's messages show."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    has_code = hasattr(inspect.unwrap(fn), "__code__")
    return fn if has_code else type(fn).__call__


def leaf_names(fn: Callable[..., Any], signature: Any) -> list[str]:
    """Return the names of all inputs of a step, in order."""
    graph = signature.graph
    objects = [graph.name(i) for i in range(len(graph.paths))] if graph else []
    numbered = jax.tree_util.tree_unflatten(signature.treedef, range(len(signature.slots)))
    paths = zip(jax.tree.leaves_with_path(numbered), signature.slots, strict=True)
    names = [*objects, *(argument_name(p) for (p, _), s in paths if isinstance(s, int))]
    parameters = _parameters(fn)
    names = [_use_parameter_name(name, parameters) for name in names]
    # Two variables may have one name, but JAX needs one name for each leaf.
    return names if len(set(names)) == len(names) else [f"{n} ({i})" for i, n in enumerate(names)]


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(fn).parameters.values())
    # Some builtins and callables of C extensions have no signature.
    except (TypeError, ValueError):
        return []


def _use_parameter_name(name: str, parameters: Sequence[inspect.Parameter]) -> str:
    """Return a path with the parameter's name: `args[1]['x']` becomes `batch['x']`."""
    keyed = _KEYED.match(name)
    if keyed is not None:
        return keyed.group(1) + name[keyed.end() :]
    numbered = _NUMBERED.match(name)
    if numbered is None:
        return name
    index, rest = int(numbered.group(1)), name[numbered.end() :]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [p.name for p in parameters if p.kind in positional]
    if index < len(named):
        return named[index] + rest
    many = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
    return f"{many[0]}[{index - len(named)}]{rest}" if many else name
