"""`ModelOnServers`: the variables of a Keras model and of its optimizer, on parameter servers.

Note [Keras models on servers]
The variables of the model stay arrays in this process, as Keras needs them. The first step makes a
variable on the servers for each, and from then on the servers have the values. Keras reads the
state of the model before its steps (`send`), and writes it back when the model is read, at the
latest at the end of an epoch (`fetch`). If a variable then has another array than the one written
back, it has changed, and its value is sent. So loaded weights or a new learning rate reach the
servers with the next step.
"""

import dataclasses
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdist._keras_servers.optimizer import OptimizerOnServers
from jaxdist._parameter_server import Read, list_shards
from jaxdist._values import Variable, VariableAggregation

# Workers that run the same script have the same numbers. The names of layers would not work:
# a second model in the same process gets other names.
_NUMBERS: "weakref.WeakKeyDictionary[Any, itertools.count[int]]" = weakref.WeakKeyDictionary()


@dataclasses.dataclass
class _Held:
    """A variable of Keras, its variable on the servers, and the array that they had last."""

    own: Any  # the variable: while it lives, no other object has its `id`
    remote: Any
    array: Any


class ModelOnServers:
    """The variables of a model on the servers of a strategy.

    Args:
        strategy: The strategy with the servers.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._name = f"keras_{next(_NUMBERS.setdefault(strategy.storage, itertools.count()))}"
        self._held: dict[int, _Held] = {}
        self._arrays: dict[int, Any] = {}  # arrays of the optimizer that the servers had last
        self._optimizers = itertools.count()
        self.optimizer: Any = None  # An `OptimizerOnServers`, from the first training on

    def get(self, variables: Sequence[Any]) -> list[Any]:
        """Return the variables on the servers for variables of Keras."""
        return [self._held[id(v)].remote for v in variables]

    def send(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Make variables on the servers, or send values that changed in this process."""
        for variable, value in zip(variables, values, strict=True):
            held = self._held.get(id(variable))
            if held is None:
                with self._strategy.scope():
                    remote = Variable(
                        np.asarray(value),
                        trainable=variable.trainable,
                        name=f"{self._name}/{len(self._held):04d}_{variable.name}",
                        aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
                    )
                self._held[id(variable)] = _Held(variable, remote, value)
            elif held.array is not value:
                held.remote.assign(np.asarray(value), read_value=False)
                held.array = value

    def send_optimizer(self, optimizer: Any, variables: Sequence[Any], values: Any) -> None:
        """Cut an optimizer for the servers, or send changed values of its state.

        Args:
            optimizer: The optimizer of Keras.
            variables: The variables of the model that it updates, which are on the servers.
            values: The values of its own variables.
        """
        if self.optimizer is None or self.optimizer.optimizer is not optimizer:
            self.optimizer = OptimizerOnServers(
                self._strategy,
                optimizer,
                self.get(variables),
                [v.path for v in variables],
                values,
                f"{self._name}_optimizer_{next(self._optimizers)}",
            )
            self._arrays.clear()
        elif self._arrays:
            for n, value in enumerate(values):
                if value is not self._arrays[n]:
                    self.optimizer.write(n, np.asarray(value))
        self._arrays = dict(enumerate(values))

    def fetch(
        self, variables: Sequence[Any], of_optimizer: Sequence[Any] | None
    ) -> tuple[list[Any], list[Any]]:
        """Return the values on the servers.

        Args:
            variables: Variables of the model.
            of_optimizer: The values of the optimizer's variables from before; None to skip them.

        Returns:
            The values of the variables, and those of the optimizer's variables.
        """
        remote = self.get(variables)
        names = [shard.remote_name for v in remote for shard in list_shards(v)]
        optimizer = None if of_optimizer is None else self.optimizer
        if optimizer is not None:
            names += optimizer.list_names()
        storage = self._strategy.storage
        groups = storage.group(names)
        storage.fence.advance()
        requests = {n: Read(own) for n, own in groups.items()}
        found: dict[str, np.ndarray] = {}
        for read in storage.call_each(requests).values() if requests else ():
            found.update(read.values)
        values = []
        for v in remote:
            parts = [found[shard.remote_name] for shard in list_shards(v)]
            values.append(parts[0] if len(parts) == 1 else np.concatenate(parts))
        if optimizer is None:
            return values, []
        return values, optimizer.read(of_optimizer or [], found)

    def note(self, variables: Sequence[Any], optimizer: Any = None) -> None:
        """Record that variables of Keras now have the values of the servers."""
        for variable in variables:
            if (held := self._held.get(id(variable))) is not None:
                held.array = variable._value
        if optimizer is not None:
            self._arrays = {n: v._value for n, v in enumerate(optimizer.variables)}
