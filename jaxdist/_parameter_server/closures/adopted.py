"""Variables of NNX objects that are on the servers.

Note [Adopted variables]
An NNX object that is an argument of a scheduled function moves to the servers when the first such
function is traced: each of its variables gets a `ServerVariable` as its value, so reading it on the
coordinator returns what the servers have. Flax and JAX see an array there (Note [Distant values]),
so copies of the object have arrays, which move when a scheduled function gets them. The state of an
`nnx.Optimizer` moves when a function first updates with it, because only then it is known which
parameter each part belongs to.

A user may write into such an object later, for instance by restoring a checkpoint. Flax then
replaces the `ServerVariable` by an array. The next scheduled function that gets the object sends
the array to the servers, and puts the `ServerVariable` back.

`variable[...] = value` calls the `ServerVariable`, which checks the shape at once. What `set_value`
and `nnx.update` write is checked by the next scheduled function, all of it before any is sent: an
update of a whole model is sent completely or not at all. A value that does not fit is an error, and
the object has the values of the servers again.

Note [Captured objects]
A trace takes the values of such an object for constants. On the servers the model is trained, and
the constants would stay as they were. So the trace is looked through for values of variables that
the function can reach; these variables move to the servers, and the function is traced again, with
the variables as inputs.

Note [Captured constants]
A captured array moves to the servers (Note [Captured objects]). A number, a string or a random key
does not: the function may branch on a number, and servers hold no keys. So these are constants of
the program, and a function that has other ones when it is scheduled again is traced again.
"""

import dataclasses
import inspect
import itertools
import re
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdist import _compat
from jaxdist._called import called
from jaxdist._parameter_server.closures.inputs import StateLeaf, is_key, make_other_strategy_error
from jaxdist._parameter_server.closures.recorder import list_optimizers
from jaxdist._parameter_server.variables.ports import make_zero
from jaxdist._parameter_server.variables.server_variable import ServerVariable
from jaxdist._program import WholeCall, find_closure_values, iterate_constants
from jaxdist._values import Variable, cast_to_variable
from jaxdist.errors import ContextError, JaxdistError, UnsupportedError

_ARGUMENT = re.compile(r"(?:args\[(\d+)\]|kwargs\['(\w+)'\])(.*)")


class Adopted:
    """The variables of NNX objects that are on the servers of one strategy."""

    def __init__(self) -> None:
        # Variables of Flax cannot be referred to weakly, and an `id` is unique only while its
        # object lives.
        self._known: dict[int, tuple[Any, ServerVariable]] = {}
        # The optimizers, likewise.
        self._numbers: dict[int, tuple[Any, int]] = {}
        self._next = itertools.count()

    def find_number(self, optimizer: Any) -> int:
        """Return the number of an optimizer among those on the servers.

        Two optimizers may update one variable with equal programs, and each has its own state.
        Workers that run the same script have the same numbers.
        """
        known = self._numbers.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            return known[1]
        number = next(self._next)
        self._numbers[id(optimizer)] = weakref.ref(optimizer), number
        return number

    def add(self, variable: Any, moved: ServerVariable) -> None:
        """Let a variable of an NNX object read its value from the servers."""
        self._known[id(variable)] = variable, moved
        _compat.set_held(variable, moved)

    @called("assign")
    def send_new_values(self, variables: Sequence[Any]) -> None:
        """Send the values that were written into variables to the servers.

        Raises:
            ArgumentError: One has another shape or dtype; then none of them is sent.
        """
        written = []
        for variable in variables:
            known = self._known.get(id(variable))
            if known is not None and _compat.get_held(variable) is not known[1]:
                written.append((variable, known[1]))
        values = []
        try:
            for variable, moved in written:
                raw = _compat.get_held(variable)
                value = raw.value() if isinstance(raw, Variable) else raw
                values.append(cast_to_variable(moved, value))
        except JaxdistError as error:
            for variable, moved in written:
                _compat.set_held(variable, moved)
            error.add_note(
                "It was written by set_value or nnx.update. The servers got none of what was "
                "written since the last scheduled function: the model has their values again."
            )
            raise
        for (variable, moved), value in zip(written, values, strict=True):
            moved.assign(value, read_value=False)
            _compat.set_held(variable, moved)


def adopt(call: WholeCall, strategy: Any) -> list[StateLeaf]:
    """Move the variables of the NNX objects of a call to the servers, if they are not there.

    Args:
        call: The call.
        strategy: The strategy of the servers.

    Returns:
        Each leaf of the objects' state, in the order of the trace.
    """
    graph = call.graph
    if graph is None:
        return []
    of_optimizers, moments = _find_optimizer_state(call.flat.nodes), _find_moments(call.flat.nodes)
    parameters = _list_parameters(call.fn)
    leaves = []
    for number, variable in enumerate(graph.variables):
        name = _name_by_parameter(graph.shape.name(number), parameters)
        leaf = adopt_one(variable, name, strategy, is_state=id(variable) in of_optimizers)
        leaves.append(dataclasses.replace(leaf, is_moment=id(variable) in moments))
    return leaves


def _list_parameters(fn: Any) -> list[str]:
    """Return the names of the parameters of a function that take arguments by position."""
    try:
        found = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _name_by_parameter(name: str, parameters: Sequence[str]) -> str:
    """Return `model.kernel` for `args[0].kernel` of a function whose first parameter is `model`."""
    found = _ARGUMENT.match(name)
    if found is None:
        return name
    number, key, rest = found.groups()
    if key is not None:
        return f"{key}{rest}"
    return f"{parameters[int(number)]}{rest}" if int(number) < len(parameters) else name


def adopt_one(variable: Any, name: str, strategy: Any, *, is_state: bool) -> StateLeaf:
    """Move one variable to the servers, if it is not there.

    Args:
        variable: The variable of an NNX object.
        name: Its name.
        strategy: The strategy of the servers.
        is_state: Whether it belongs to the state of an optimizer, which moves later.

    Raises:
        MixedStrategyError: It is on the servers of another strategy.
        UnsupportedError: Its value is neither an array nor a number.
    """
    raw = _compat.get_held(variable)
    if isinstance(raw, ServerVariable):
        if raw.distribute_strategy is not strategy:
            raise make_other_strategy_error("A scheduled function", name)
        found = None if is_state else raw
        return StateLeaf(found, name, make_zero(raw.shape, raw.dtype))
    if isinstance(raw, bool | int | float | complex):
        raw = jnp.asarray(raw)
    if not isinstance(raw, jax.Array | np.ndarray | np.generic):
        raise UnsupportedError(
            f"{name} holds a {type(raw).__name__}.\n\n"
            "A variable on a server is one array.\n\n"
            "Give each array an nnx.Variable of its own, and keep other values in plain attributes."
        )
    if jax.dtypes.issubdtype(raw.dtype, jax.dtypes.prng_key):
        return StateLeaf(None, name, raw, key=raw)
    zero = make_zero(raw.shape, raw.dtype)
    if is_state:
        return StateLeaf(None, name, zero)
    with strategy.scope():
        is_parameter = isinstance(variable, nnx.Param)
        moved = ServerVariable(np.asarray(raw), name=name, trainable=is_parameter)
    strategy.adopted.add(variable, moved)
    return StateLeaf(moved, name, zero)


def _find_optimizer_state(nodes: Sequence[Any]) -> set[int]:
    """Return the variables, by `id`, that are the state of an optimizer's transformation."""
    return {
        id(x)
        for optimizer in list_optimizers(list(nodes))
        for _, x in nnx.iter_graph(optimizer.opt_state)
        if isinstance(x, nnx.Variable)
    }


def _find_moments(nodes: Sequence[Any]) -> set[int]:
    """Return the variables, by `id`, of the metrics whose variables change together."""
    return {
        id(x)
        for _, metric in nnx.iter_graph(list(nodes))
        if isinstance(metric, nnx.metrics.Welford)
        for _, x in nnx.iter_graph(metric)
        if isinstance(x, nnx.Variable)
    }


MAX_DEPTH = 5
# Objects of these packages hold no model of the user.
_CLOSED = frozenset({"builtins", "jax", "jaxlib", "jaxdist", "numpy", "optax"})


def adopt_captured(fn: Any, closed: Any, strategy: Any) -> bool:
    """Move the variables that a trace took for constants to the servers.

    Args:
        fn: The function that was traced.
        closed: The trace.
        strategy: The strategy of the servers.

    Returns:
        Whether there were any: the function has to be traced again.

    Raises:
        ContextError: One belongs to the state of an optimizer.
        UnsupportedError: One holds several arrays.
    """
    constants = {id(x) for x in iterate_constants(closed) if isinstance(x, jax.Array | np.ndarray)}
    if not constants:
        return False
    is_found = False
    for name, variable in find_variables(fn):
        held = _compat.get_held(variable)
        if isinstance(held, ServerVariable):
            continue
        found = [x for x in jax.tree.leaves(held) if id(x) in constants]
        if all(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in found):
            continue
        if isinstance(variable, nnx.OptState):
            raise ContextError(
                f"{getattr(fn, '__name__', 'function')} reads {name} of an optimizer that it "
                "closes over.\n\n"
                "The servers hold the state of an optimizer, and no worker has it.\n\n"
                "Pass the model and the optimizer as arguments, and call optimizer.update."
            )
        adopt_one(variable, name, strategy, is_state=False)
        is_found = True
    return is_found


def find_moved(fn: Any) -> list[Any]:
    """Return the NNX variables on the servers that a function can reach."""
    return [v for _, v in find_variables(fn) if isinstance(_compat.get_held(v), ServerVariable)]


def find_variables(fn: Any) -> Iterator[tuple[str, Any]]:
    """Return name and variable for each NNX variable that a function can reach."""
    seen: set[int] = set()
    for name, value in find_closure_values(fn).items():
        yield from _walk(name, value, seen, MAX_DEPTH)


def _walk(name: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if id(value) in seen or not depth:
        return
    seen.add(id(value))
    if isinstance(value, nnx.Variable):
        yield name, value
    elif isinstance(value, nnx.Pytree):
        for path, part in nnx.iter_graph(value):
            if isinstance(part, nnx.Variable):
                yield ".".join([name, *map(str, path)]), part
    else:
        for key, item in _list_children(value):
            yield from _walk(f"{name}.{key}", item, seen, depth - 1)


def _list_children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(enumerate(value))
    if hasattr(value, "__wrapped__"):
        return list(find_closure_values(value.__wrapped__).items())
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return list(find_closure_values(value).items())
    if isinstance(value, (type, types.ModuleType)):
        return []
    package = type(value).__module__.partition(".")[0]
    return [] if package in _CLOSED else list(getattr(value, "__dict__", {}).items())


def list_constants(fn: Any) -> list[tuple[Any, Any]]:
    """Return the variables that a trace of a function takes for constants, with their values."""
    found = [(variable, _compat.get_held(variable)) for _, variable in find_variables(fn)]
    return [(variable, held) for variable, held in found if _has_constants(held)]


def are_current(constants: Sequence[tuple[Any, Any]]) -> bool:
    """Whether variables still have the values that `list_constants` has found."""
    return all(_is_same(_compat.get_held(v), before) for v, before in constants)


def _has_constants(held: Any) -> bool:
    if isinstance(held, ServerVariable):
        return False
    leaves = jax.tree.leaves(held)
    return any(not isinstance(x, jax.Array | np.ndarray) or is_key(x) for x in leaves)


def _is_same(held: Any, before: Any) -> bool:
    if held is before:
        return True
    if isinstance(held, ServerVariable):
        return False
    leaves, structure = jax.tree.flatten(held)
    known, structure_before = jax.tree.flatten(before)
    return structure == structure_before and all(map(_is_same_leaf, leaves, known))


def _is_same_leaf(leaf: Any, before: Any) -> bool:
    if leaf is before:
        return True
    # `repr` distinguishes 0.0 from -0.0. Other objects may compare as they like.
    is_plain = isinstance(leaf, bool | int | float | complex | str | bytes | np.generic)
    return is_plain and type(leaf) is type(before) and repr(leaf) == repr(before)
