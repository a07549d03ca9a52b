"""Computes a step of a Keras model on servers, and the states of its random number generators."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._keras import Law, Rows, Step, use_rows
from jaxdist._keras_servers.checks import UNKNOWN, Accumulated, check_added_up, check_state_of_loss
from jaxdist._keras_servers.variables import ModelOnServers

# As for the replicas of one step, multiples of an odd number are different 32-bit words.
_STRIDE = 0x9E3779B9


class Seeds:
    """The states of the generators of a model.

    Workers that read one state at the same time would draw the same numbers. So this process
    advances the states, and gives each step its own.

    Args:
        model: The model.
        worker: The number of this worker, if each has its own model. Worker 0 draws the same as a
            model without a strategy.
    """

    def __init__(self, model: Any, worker: int = 0) -> None:
        own = [g.state for layer in model._flatten_layers() for g in layer._seed_generators]
        known = {id(v) for v in own}
        fixed = model.non_trainable_variables
        self.positions = [n for n, v in enumerate(fixed) if id(v) in known]
        self._mixed = np.uint32(worker * _STRIDE & 0xFFFFFFFF)
        self._states: list[np.ndarray] = []
        # By how much a step advances them; None until the first step returns it.
        self._steps: list[np.ndarray] | None = None

    def start(self, fixed: Sequence[Any]) -> None:
        """Begin with the states among the non-trainable variables."""
        self._states = [np.array(fixed[n]) for n in self.positions]

    def take(self) -> list[np.ndarray]:
        """Return the states for the next step."""
        given = [np.array(state) for state in self._states]
        for state in given:
            state[0] ^= self._mixed.astype(state.dtype)
        if self._steps is not None:
            self._advance(self._steps)
        return given

    def learn(self, steps: Sequence[Any]) -> None:
        """Learn from the result of a step by how much it advanced its states."""
        if self._steps is None:
            self._steps = [np.array(x) for x in steps]
            self._advance(self._steps)

    @property
    def is_known(self) -> bool:
        """Whether the next states are known; if not, they depend on a step that is running."""
        return self._steps is not None or not self.positions

    def put_into(self, fixed: list[Any]) -> None:
        """Write the states into the values of the non-trainable variables."""
        for place, state in zip(self.positions, self._states, strict=True):
            fixed[place] = state

    def _advance(self, steps: Sequence[np.ndarray]) -> None:
        for state, step in zip(self._states, steps, strict=True):
            state += step


@dataclasses.dataclass(kw_only=True)
class ServerStep(Step):
    """The train and test steps of a model: they read variables, and send changes.

    The results are the additions to the metrics for the process with the model: the loss, the
    increments of metric variables, and the rows themselves if a metric is not a sum.

    Args:
        remote: The variables on the servers.
        seeds: The states of random number generators, which are arguments of the step.
        accumulated: The non-trainable variables that are computed from their own values, such as
            moving averages; `UNKNOWN` before the first step.
    """

    remote: ModelOnServers
    seeds: Seeds
    accumulated: Accumulated = UNKNOWN

    def run(self, data: Any, given: list[Any], rows: Rows, *, is_train: bool) -> dict[str, Any]:
        """Run a step; `given` are the states of the random number generators."""
        rows = self._with_shares(rows)
        trainable, fixed, zeros = self._read(given)
        compute = functools.partial(self._compute, rows, is_train)
        gradients: Any = []
        with use_rows(rows):
            if is_train:
                (_, aux), gradients = jax.value_and_grad(compute, has_aux=True)(
                    trainable, fixed, zeros, None, data
                )
            else:
                _, aux = compute(trainable, fixed, zeros, None, data)
            if rows.own == 0:
                # They are zeros, unless a derivative that is not finite makes them nan.
                gradients = jax.tree.map(jnp.zeros_like, gradients)
            own = self._find_states(rows, is_train, trainable, fixed, aux[1], data, aux[4])
            # The additions to variables that the replicas do not merge.
            laws, sent = own
            known = self.accumulated.added
            groups = [[n] for n in laws.by_number if n in known and n not in sent]
            added = self._compute_additions(rows, is_train, trainable, fixed, groups, data)
            results, gradients = self._finish(rows, aux, fixed, zeros, gradients, own, added)
            if is_train:
                self.remote.optimizer.send(gradients)
        return results

    def _scale(self, loss: Any, of_optimizer: Any) -> Any:
        # `check_model` only allows a constant scale.
        return self.model.optimizer.scale_loss(loss)

    def _read(self, given: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the values of the variables, and zeros for the variables of the metrics."""
        model, remote = self.model, self.remote
        states = dict(zip(self.seeds.positions, given, strict=True))
        fixed = [
            jnp.asarray(states[n]) if n in states else remote.get([v])[0].value()
            for n, v in enumerate(model.non_trainable_variables)
        ]
        trainable = [v.value() for v in remote.get(model.trainable_variables)]
        return trainable, fixed, [jnp.zeros(v.shape, v.dtype) for v in model.metrics_variables]

    def _finish(
        self,
        rows: Rows,
        aux: Any,
        fixed: list[Any],
        zeros: list[Any],
        gradients: Any,
        own: Any,
        added: dict[int, Any],
    ) -> tuple[dict[str, Any], Any]:
        """Send changes of non-trainable variables; return the results and gradients."""
        after, is_all = aux[2], aux[3] is not None
        check_state_of_loss(self.model, aux[4].values)
        if is_all:
            pairs = zip(self.model.metrics_variables, zeros, after, strict=True)
            known = self._list_of_losses()
            check_added_up(
                self.model, [v for v, a, b in pairs if a is not b and id(v) not in known]
            )
        # For a variable that was zero, the new value is the sum of all replicas' additions.
        laws, _ = own
        is_added = [laws.by_number.get(n) is Law.ADD for n in range(len(fixed))]
        before = [jnp.zeros_like(v) if a else v for v, a in zip(fixed, is_added, strict=True)]
        sums = self._add_up(rows, aux, before, gradients, own)
        variables = self.model.non_trainable_variables
        steps = []
        for n, (variable, old, new) in enumerate(zip(variables, fixed, sums.fixed, strict=True)):
            if n in self.seeds.positions:
                steps.append(new - old)
            elif new is not old:
                change = new if is_added[n] else added.get(n)
                remote = self.remote.get([variable])[0]
                _send_change(remote, old, new, change, n in self.accumulated.numbers)
        results = {"loss": sums.loss, "metrics": sums.metrics, "seeds": steps}
        return {**results, "rows": sums.everything}, sums.gradients

    def _list_of_losses(self) -> set[int]:
        compiled = self.model._compile_loss
        trackers = () if compiled is None else compiled.metrics
        return {id(v) for m in trackers for v in m.variables}


def _send_change(remote: Any, old: Any, new: Any, change: Any, is_sum: bool) -> None:
    """Send the change of a non-trainable variable in a step, such as a moving mean.

    Two workers that compute from one value would overwrite each other. So this sends the
    difference, which the server adds to its value, or `change` if it is known exactly. For a value
    that does not depend on the one before, the last one counts.
    """
    if is_sum and not jnp.issubdtype(new.dtype, jnp.bool_):
        remote.assign_add(new - old if change is None else change, read_value=False)
    else:
        remote.assign(new, read_value=False)
