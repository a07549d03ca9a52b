"""`TraceInputs`: what each input of the trace of a closure is; and the errors of traces."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxdist._mesh import ReplicaMesh
from jaxdist._parameter_server.variables.ports import Port, RowRead, WorkerIndex
from jaxdist._parameter_server.variables.server_variable import ServerVariable
from jaxdist._parameter_server.worker_protocol import Input, Source
from jaxdist._program import BatchLeaf, FunctionTrace, WholeCall
from jaxdist.errors import ContextError, MixedStrategyError, UnsupportedError


def make_other_strategy_error(function: str, name: str) -> MixedStrategyError:
    """Return the error of a variable on the servers of another strategy."""
    return MixedStrategyError(
        f"{function} uses {name}, which is on the parameter servers of another strategy.\n\n"
        "A function reads and changes variables on the servers of the strategy that runs it; one "
        "of the same name there would be another variable.\n\n"
        "Use that strategy, or make the variable inside `with strategy.scope():` of this one. "
        "To take a model over, give it arrays: "
        "nnx.update(model, jax.tree.map(jnp.asarray, nnx.state(model)))."
    )


def make_used_after_error(function: str, name: str) -> ContextError:
    """Return the error of a parameter that is used after its update, or updated twice."""
    return ContextError(
        f"{function} uses {name} after optimizer.update, or updates it twice.\n\n"
        "The servers compute the new value when the whole function has run, so a worker does not "
        "have it.\n\n"
        "Let the function end with the update, and schedule it once for each step."
    )


def make_changed_too_error(function: str, name: str) -> ContextError:
    """Return the error of a parameter that a function changes, and that an optimizer updates."""
    return ContextError(
        f"{function} changes {name} itself, before or after optimizer.update, or updates it "
        "twice.\n\n"
        "The servers update the values that they have, once, when the whole function has run, so "
        "the other change would be lost.\n\n"
        "Make it part of the optimizer: optax.chain(tx, change), where change is a transformation "
        "such as optax.add_decayed_weights or optax.keep_params_nonnegative. Or change it in "
        "another function: coordinator.schedule(clip, args=(model,))."
    )


def make_state_error(function: str, name: str) -> UnsupportedError:
    """Return the error of a function that uses the state of an optimizer."""
    return UnsupportedError(
        f"{function} reads or changes {name}, which is the state of an optimizer.\n\n"
        "The servers hold it beside the parameters, and no worker has it.\n\n"
        "Change the parameters by optimizer.update(model, grads) only."
    )


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """A variable of an NNX object that is an argument.

    Args:
        variable: Its variable on the servers; None for the state of an optimizer, which the
            servers hold beside the parameters, and for random keys.
        key: The random key, for an `nnx.RngKey`.
        name: Its name in messages.
        is_moment: Whether it belongs to an `nnx.metrics.Welford`, whose variables change together.
    """

    variable: ServerVariable | None
    name: str
    template: Any
    key: Any = None
    is_moment: bool = False


class TraceInputs:
    """What each input of the trace of a closure is.

    Args:
        call: The call that was traced.
        state: The variables of its NNX objects.
        layout: The replicas of one worker.
        found: The trace.

    Attributes:
        name: The name of the function.
        slots: For each input the variable, the port, the leaf of the state, or the argument.
        reads: The ports through which rows are read.
    """

    def __init__(
        self,
        call: WholeCall,
        state: Sequence[StateLeaf],
        layout: ReplicaMesh,
        found: FunctionTrace,
    ) -> None:
        self.name = getattr(call.fn, "__name__", "function")
        self._layout, self._found = layout, found
        self._arguments, self._batches = jax.tree.leaves(call.arguments), call.draws.batches
        # The leaves of the state that are random keys; these come after the arguments.
        self._keys = [n for n, leaf in enumerate(state) if leaf.key is not None]
        self.slots = self._find_slots(state)
        ports = [x for x in found.inputs if isinstance(x, Port)]
        self.reads = [x for x in ports if isinstance(x.role, RowRead)]

    def describe(self, number: int) -> tuple[Input, jax.ShapeDtypeStruct]:
        """Return one input of the program, with its shape."""
        slot, key, sharding = self.slots[number], self.find_key(number), None
        aval: Any = self._found.closed.in_avals[number] if key is None else jax.random.key_data(key)
        if isinstance(slot, ServerVariable):
            found = Input(Source.VARIABLE, slot.remote_name)
        elif isinstance(slot, Port) and isinstance(slot.role, WorkerIndex):
            # The last argument; the worker finds it by itself.
            found = self._describe_argument(len(self._keys))
        elif isinstance(slot, Port):
            index = next(n for n, port in enumerate(self.reads) if port is slot)
            found = Input(Source.ROWS, slot.role.variable.remote_name, (index,))
            sharding = slot.home.sharding
        elif isinstance(slot, Input):
            found = slot
            if key is None:
                sharding = getattr(self._find_given(slot), "sharding", None)
        elif number in self._keys:
            found = self._describe_argument(self._keys.index(number))
        else:
            raise make_state_error(self.name, getattr(slot, "name", "an input"))
        return found, self.shape(aval.shape, aval.dtype, sharding)

    def _describe_argument(self, after: int) -> Input:
        """Return an argument that comes after those of the call."""
        return Input(Source.ARGUMENT, index=(len(self._arguments) + after,))

    def _find_given(self, slot: Input) -> Any:
        """Return the argument, or the leaf of a batch, that an input has at the trace."""
        if slot.source is Source.ARGUMENT:
            return self._arguments[slot.index[0]]
        return BatchLeaf(*slot.index).of(self._batches)

    def find_key(self, number: int) -> Any:
        """Return the random key that an input has at the trace, as an array; None for others."""
        slot = self.slots[number]
        if isinstance(slot, StateLeaf):
            return slot.key
        if isinstance(slot, Input) and slot.source is Source.ARGUMENT:
            given = self._find_given(slot)
            return given if is_key(given) else None
        return None

    def shape(
        self, shape: tuple[int, ...], dtype: Any, sharding: Any = None
    ) -> jax.ShapeDtypeStruct:
        """Return the shape of an array on the devices of a worker."""
        if self._layout.num_replicas == 1:
            return jax.ShapeDtypeStruct(shape, dtype)
        # An array of one device is whole on every replica.
        if not isinstance(sharding, NamedSharding):
            sharding = self._layout.replicated
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def _find_slots(self, state: Sequence[StateLeaf]) -> list[Any]:
        """Return what each input of the trace is."""
        others = [
            Input(Source.BATCH, index=(x.source, x.batch, x.leaf))
            if isinstance(x, BatchLeaf)
            else x
            for x in self._found.inputs
        ]
        return [
            *(leaf if leaf.variable is None else leaf.variable for leaf in state),
            *(Input(Source.ARGUMENT, index=(n,)) for n in range(len(self._arguments))),
            *others,
        ]


def is_key(value: Any) -> bool:
    """Whether an array, or the shape of one, has random keys as elements."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))
