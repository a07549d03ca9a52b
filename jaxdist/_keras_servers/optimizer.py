"""`OptimizerOnServers`: a Keras optimizer that servers apply to the variables of a model.

Note [Optimizers of Keras on servers]
`optimizer.stateless_apply` is a function of all gradients, all weights and the state. It is cut
into one update program for each variable: see Note [Cut of an optimizer]. A worker sends
gradients, and the server of a variable updates it and its state from their current values: so
updates of several workers all count. Everything that needs the gradients of all variables is
computed by the worker before it sends them: the scale of the loss, and `global_clipnorm`.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist._parameter_server import Change, apply_updates, cut_update, list_shards
from jaxdist._values import Variable, VariableAggregation


def make_transformation(
    optimizer: Any, make_first: Callable[[], Sequence[Any]]
) -> optax.GradientTransformation:
    """Return a transformation whose updates give the weights that the optimizer computes.

    Args:
        optimizer: The optimizer, already built.
        make_first: Returns the initial values of its variables.
    """

    def init(params: Any) -> list[Any]:
        del params
        return list(make_first())

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        before, treedef = jax.tree.flatten(params)
        after, state = optimizer.stateless_apply(state, jax.tree.leaves(updates), before)
        changes = [new - old for new, old in zip(after, before, strict=True)]
        return treedef.unflatten(changes), list(state)

    return optax.GradientTransformation(init, update)


class OptimizerOnServers:
    """A Keras optimizer whose state is on the servers.

    Args:
        strategy: The strategy with the servers.
        optimizer: The optimizer, already built for the variables.
        variables: The variables on the servers, in the order of the optimizer.
        labels: The names of the variables in errors.
        values: The values of the variables of the optimizer.
        prefix: The name of its state on the servers.
    """

    def __init__(
        self,
        strategy: Any,
        optimizer: Any,
        variables: Sequence[Any],
        labels: Sequence[str],
        values: Sequence[Any],
        prefix: str,
    ) -> None:
        self.optimizer = optimizer
        self._storage, self._variables = strategy.storage, list(variables)
        held = [np.asarray(x) for x in values]
        # The names on the servers of each variable of the optimizer: one for each shard of the
        # model variable whose state it is, or for each variable that needs a count.
        self._slots: dict[int, list[list[str]]] = {}
        # The operation with which the server updates a variable, by its name there.
        self._ops: dict[str, str] = {}
        for variable, update in zip(variables, self._cut(held, labels), strict=True):
            places = [int(slot) for slot in update.slots]
            start, names, rows = 0, list[list[str]](), tuple(variable.shape[:1])
            for shard in list_shards(variable):
                program = update.by_shape[shard.shape]
                end = start + (shard.shape[0] if shard.shape else 0)
                # As in the cut, state with the rows of a variable is cut into rows, too.
                own = [
                    held[n][start:end]
                    if shard is not variable and held[n].shape[:1] == rows
                    else held[n]
                    for n in places
                ]
                name = shard.remote_name
                request = program.make_request(prefix, name, len(own), own, prefix)
                names.append(self._storage.register(self._storage.find_server(name), request))
                self._ops[name] = f"program:{request.key}"
                start = end
            for number, n in enumerate(places):
                self._slots.setdefault(n, []).append([of_shard[number] for of_shard in names])
        own = optimizer.variables
        number = next(n for n, v in enumerate(own) if v is optimizer._iterations)
        with strategy.scope():
            self.iterations = Variable(
                held[number],
                trainable=False,
                name=f"{prefix}/iterations",
                aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
            )
        self._number = number

    def _cut(self, held: Sequence[np.ndarray], labels: Sequence[str]) -> Any:
        params = [jax.ShapeDtypeStruct(tuple(v.shape), v.dtype) for v in self._variables]
        sharded = {
            str(n): [int(shard.shape[0]) for shard in shards]
            for n, v in enumerate(self._variables)
            if len(shards := list_shards(v)) > 1
        }

        # The values go to the servers with the registrations, not as constants of a program.
        def make_zeros() -> list[Any]:
            return [jnp.zeros(x.shape, x.dtype) for x in held]

        with _without_global_parts(self.optimizer):
            tx = make_transformation(self.optimizer, make_zeros)
            # The averages of weights (`use_ema`) are state that no update needs.
            return cut_update(tx, params, sharded, labels, keeps_unneeded=True)

    # Inside a step

    def send(self, gradients: Sequence[Any]) -> None:
        """Send gradients, which are equal on all replicas, to the servers."""
        optimizer = self.optimizer
        if (scale := optimizer.loss_scale_factor) is not None:
            gradients = [g / scale for g in gradients]
        if optimizer.global_clipnorm:
            gradients = optimizer._clip_gradients(gradients)
        for gradient, variable in zip(gradients, self._variables, strict=True):
            apply_updates(variable, self._ops, gradient.astype(variable.dtype), "fit")
        self.iterations.assign_add(1, read_value=False)

    # Outside a step

    def list_names(self) -> list[str]:
        """Return the names of the optimizer's state on the servers."""
        return [
            self.iterations.remote_name,
            *(n for found in self._slots.values() for names in found for n in names),
        ]

    def read(self, values: Sequence[Any], found: Mapping[str, np.ndarray]) -> list[Any]:
        """Return the values of the variables of the optimizer.

        Args:
            values: The values from before. Those that no server needs do not change.
            found: The values on the servers, by the names of `list_names`.
        """
        now = list(values)
        for n, names in self._slots.items():
            # When nothing is running, the counts of all variables are equal.
            parts = [found[name] for name in names[0]]
            is_whole = parts[0].shape == tuple(now[n].shape)
            now[n] = parts[0] if is_whole else np.concatenate(parts)
        now[self._number] = found[self.iterations.remote_name]
        return now

    def write(self, n: int, value: np.ndarray) -> None:
        """Send the new value of a variable of the optimizer to the servers."""
        if n == self._number:
            self.iterations.assign(value)
        for names in self._slots.get(n, ()):
            start = 0
            for name in names:
                shape = self._storage.read(name).shape if len(names) > 1 else value.shape
                is_whole = shape == value.shape
                own = value if is_whole else value[start : start + shape[0]]
                self._storage.change(Change("assign", name, (own,)))
                start += 0 if is_whole else shape[0]


@contextlib.contextmanager
def _without_global_parts(optimizer: Any) -> Iterator[None]:
    """Disable the parts that workers compute before they send gradients."""
    before = optimizer.loss_scale_factor, optimizer.global_clipnorm
    optimizer.loss_scale_factor = optimizer.global_clipnorm = None
    try:
        yield
    finally:
        optimizer.loss_scale_factor, optimizer.global_clipnorm = before
