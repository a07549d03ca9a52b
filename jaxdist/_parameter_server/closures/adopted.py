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
update of a whole model counts or does not. A value that does not fit is an error, and the object
has the values of the servers again.
"""

import inspect
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdist import _compat
from jaxdist._called import called
from jaxdist._parameter_server.closures.inputs import StateLeaf
from jaxdist._parameter_server.closures.trace_errors import make_other_strategy_error
from jaxdist._parameter_server.variables.ports import make_zero
from jaxdist._parameter_server.variables.server_variable import ServerVariable
from jaxdist._program import WholeCall
from jaxdist._values import Variable, cast_to_variable
from jaxdist.errors import JaxdistError, UnsupportedError

_ARGUMENT = re.compile(r"(?:args\[(\d+)\]|kwargs\['(\w+)'\])(.*)")


class Adopted:
    """The variables of NNX objects that are on the servers of one strategy."""

    def __init__(self) -> None:
        # Variables of Flax cannot be referred to weakly, and an `id` is unique only while its
        # object lives.
        self._known: dict[int, tuple[Any, ServerVariable]] = {}

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
    of_optimizers = _find_optimizer_state(call.flat.nodes)
    parameters = _list_parameters(call.fn)
    leaves = []
    for number, variable in enumerate(graph.variables):
        name = _name_by_parameter(graph.shape.name(number), parameters)
        leaves.append(adopt_one(variable, name, strategy, is_state=id(variable) in of_optimizers))
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
        UnsupportedError: Its value is no array and no number.
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
    optimizers = [x for _, x in nnx.iter_graph(list(nodes)) if isinstance(x, nnx.Optimizer)]
    return {
        id(x)
        for optimizer in optimizers
        for _, x in nnx.iter_graph(optimizer.opt_state)
        if isinstance(x, nnx.Variable)
    }
