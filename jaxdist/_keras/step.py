"""Computes one step of a Keras model on one replica."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._keras import shares
from jaxdist._keras.forward import added, states
from jaxdist._keras.forward.pairs import Call, Pairs
from jaxdist._keras.models import forget_losses
from jaxdist._keras.rows import Rows, add_shares, gather_rows, scale_gradient, use_rows
from jaxdist._keras.source import keras_module


@dataclasses.dataclass(frozen=True)
class Sums:
    """The results that the replicas of a step computed together.

    Args:
        loss: The loss of the global batch.
        fixed: The values of the non-trainable variables after the step.
        metrics: The increments of the metric variables from the rows; with `everything`, the values
            from which other metrics are computed.
        everything: `x`, `y`, outputs and weights of all rows, to compute metrics from; None if all
            metrics are sums.
        gradients: The gradients of the loss of the global batch.
    """

    loss: Any
    fixed: list[Any]
    metrics: Any
    everything: Any
    gradients: Any


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Numbers:
    """The numbers of variables, as a result of a function that JAX differentiates."""

    values: frozenset[int]


_NONE = Numbers(frozenset())


@dataclasses.dataclass
class Step:
    """The train, test and predict steps of a model.

    Args:
        model: The Keras model.
    """

    model: Any

    def __post_init__(self) -> None:
        self._pairs = Pairs()

    def train(self, state: Any, data: Any, rows: Rows) -> tuple[Any, Any]:
        """Return the logs and the new state."""
        trainable, fixed, of_optimizer, of_metrics = state
        rows = self._with_shares(rows)
        compute = functools.partial(self._compute, rows, True)
        with use_rows(rows):
            (_, aux), gradients = jax.value_and_grad(compute, has_aux=True)(
                trainable, fixed, of_metrics, of_optimizer, data
            )
            if rows.own == 0:
                # They are zeros, unless a derivative that is not finite makes them nan.
                gradients = jax.tree.map(jnp.zeros_like, gradients)
            own = self._find_states(rows, True, trainable, fixed, aux[1], data, aux[4])
            logs, fixed, of_metrics, gradients = self._combine(
                rows, aux, fixed, of_metrics, gradients, own
            )
            with use_rows(rows.of_all):
                trainable, of_optimizer = self.model.optimizer.stateless_apply(
                    of_optimizer, gradients, trainable
                )
        return logs, (trainable, fixed, of_optimizer, of_metrics)

    def test(self, state: Any, data: Any, rows: Rows) -> tuple[Any, Any]:
        """Return the logs and the new state."""
        trainable, fixed, of_metrics = state
        rows = self._with_shares(rows)
        with use_rows(rows):
            _, aux = self._compute(rows, False, trainable, fixed, of_metrics, None, data)
            own = self._find_states(rows, False, trainable, fixed, aux[1], data, aux[4])
            logs, fixed, of_metrics, _ = self._combine(rows, aux, fixed, of_metrics, [], own)
        return logs, (trainable, fixed, of_metrics)

    def predict(self, state: Any, data: Any, rows: Rows) -> tuple[Any, Any]:
        """Return the outputs for the rows of this replica, and the new state."""
        trainable, fixed = state
        with use_rows(rows):
            x, _, _ = _unpack(data)
            kwargs = {"training": False} if self.model._call_has_training_arg else {}
            x = _add_row(x) if rows.own == 0 else x
            outputs, new = self.model.stateless_call(trainable, fixed, x, **kwargs)
            if rows.own == 0:
                outputs = _drop_row(outputs)
            if rows.replica.strategy.layout.is_shared:
                outputs = jax.tree.map(rows.gather, outputs)
            laws, sent = self._find_states(rows, False, trainable, fixed, new, data)
            if rows.most * (rows.count - 1) >= rows.total:
                # A replica without rows runs another program, so `run` finds no proof.
                first = laws.take_kept_of_first()
                sent.update(states.share_states(first, fixed, new, {}, rows))
                laws = states.Laws({**laws.by_number, **first.by_number}, laws.together)
            fixed = states.merge_states(laws, fixed, new, rows.add_up(sent) if sent else {})
        return outputs, (trainable, fixed)

    def _with_shares(self, rows: Rows) -> Rows:
        return dataclasses.replace(rows, has_shares=shares.has_shares(self.model))

    def _compute(
        self,
        rows: Rows,
        train: bool,
        trainable: Any,
        fixed: Any,
        of_metrics: Any,
        of_optimizer: Any,
        data: Any,
    ) -> tuple[Any, Any]:
        """Return the scaled loss of this replica, and everything else that the step needs."""
        model = self.model
        x, y, weight = _unpack(data)
        kwargs = {"training": train} if model._call_has_training_arg else {}
        forget_losses(model)
        with use_rows(dataclasses.replace(rows, has_shares=False)):
            y_pred, new, found = model.stateless_call(
                trainable, fixed, _add_row(x) if rows.own == 0 else x, return_losses=True, **kwargs
            )
        if rows.own == 0:
            y_pred = _drop_row(y_pred)
        num_own = len(found) - sum(v.regularizer is not None for v in model.trainable_variables)
        own = found[:num_own]
        if own and rows.count > 1:
            call = Call(model, trainable, fixed, x, rows, train)
            own = added.compute_shares(call, self._pairs, own)
        of_call = self._share_losses(own, found[num_own:], rows)
        sums = shares.have_increments(model) and rows.has_shares
        # Increments: the values that the variables would have if they had been zero before.
        before = [jnp.zeros_like(v) for v in of_metrics] if sums else of_metrics
        given = x, y, y_pred, weight
        if rows.has_shares:
            everything = None
            variables = trainable, new, before
            loss, later, after = shares.compute_loss(model, variables, given, of_call, train)
        else:
            everything = self._gather(given, rows)
            variables = scale_gradient(trainable, rows.fraction), new, before
            with use_rows(rows.of_all):
                loss, later, after = shares.compute_loss(
                    model, variables, everything, of_call, train
                )
        if sums:
            # Keras metrics that count rows need at least one.
            if rows.own:
                after = shares.scale_loss_trackers(model, after, rows.total / rows.own)
                # `train_step` of Keras loses the masks of its outputs; `test_step` keeps them.
                shown = jax.tree.map(jax.lax.stop_gradient, y_pred) if train else y_pred
                after = shares.update_compiled(model, after, y, shown, weight)
        elif everything is None:
            everything = self._gather(given, rows)
        unscaled = loss
        if train:
            loss = self._scale(loss, of_optimizer)
        pairs = enumerate(zip(new, later, strict=True))
        of_loss = Numbers(frozenset(n for n, (a, b) in pairs if a is not b))
        return loss, (unscaled, later, after, everything, of_loss)

    def _scale(self, loss: Any, of_optimizer: Any) -> Any:
        """Return the loss as the optimizer scales it before differentiation."""
        optimizer = self.model.optimizer
        with shares.open_scope(optimizer.variables, of_optimizer):
            return optimizer.scale_loss(loss)

    def _gather(self, data: tuple[Any, ...], rows: Rows) -> Any:
        # `x` is gathered only for methods of the user; those of Keras do not use it.
        trainer = keras_module("trainers.trainer").Trainer
        kind = type(self.model)
        methods = trainer.compute_loss, trainer.compute_metrics
        is_users = (kind.compute_loss, kind.compute_metrics) != methods
        return gather_rows(data if is_users else (None, *data[1:]), rows)

    def _share_losses(self, own: list[Any], of_weights: list[Any], rows: Rows) -> list[Any]:
        """Return losses that the call added, as shares or for the global batch.

        Args:
            own: The shares of this replica of the losses that layers add.
            of_weights: The losses of weight regularizers, which are equal on all replicas.
            rows: The rows of this replica.
        """
        if rows.has_shares:
            return [*own, *(loss * rows.fraction for loss in of_weights)]
        of_layers = [add_shares(share, rows) for share in own]
        return [*of_layers, *(scale_gradient(loss, rows.fraction) for loss in of_weights)]

    def _find_states(
        self,
        rows: Rows,
        train: bool,
        trainable: Any,
        fixed: Any,
        new: Any,
        data: Any,
        of_loss: Numbers = _NONE,
    ) -> tuple[states.Laws, dict[int, Any]]:
        """Return the laws of the non-trainable variables, and the values that this replica sends.

        Args:
            rows: The rows of this replica.
            train: Whether it is a step of training.
            trainable: The values of the trainable variables.
            fixed: The values of the other variables before the step.
            new: The values of the other variables after the step.
            data: The batch.
            of_loss: The variables that `compute_loss` assigned.
        """
        call = Call(self.model, trainable, fixed, _unpack(data)[0], rows, train)
        laws = states.find_laws(call, self._pairs, new)
        states.check_assigned_in_loss(self.model, laws, of_loss.values)
        groups = laws.find_groups() if rows.count > 1 else []
        additions = self._compute_additions(rows, train, trainable, fixed, groups, data)
        return laws, states.share_states(laws, fixed, new, additions, rows)

    def _compute_additions(
        self, rows: Rows, train: bool, trainable: Any, fixed: Any, groups: Any, data: Any
    ) -> dict[int, Any]:
        x, _, _ = _unpack(data)
        x = _add_row(x) if rows.own == 0 else x
        call = Call(self.model, trainable, fixed, x, rows, train)
        return states.compute_additions(call, groups)

    def _combine(
        self, rows: Rows, aux: Any, fixed: Any, of_metrics: Any, gradients: Any, own: Any
    ) -> tuple[Any, Any, Any, Any]:
        """Add up the shares of the replicas; return logs, state and gradients."""
        found = self._add_up(rows, aux, fixed, gradients, own)
        with use_rows(rows.of_all):
            if found.everything is None:
                logs, values = shares.add_to_metrics(
                    self.model, of_metrics, found.metrics, found.loss, None, rows.total
                )
            else:
                logs, values = shares.finish(
                    self.model, found.metrics, found.loss, found.everything, rows.total
                )
        return logs, found.fixed, values, found.gradients

    def _add_up(self, rows: Rows, aux: Any, fixed: Any, gradients: Any, own: Any) -> "Sums":
        """Add up the shares of the replicas; `own` is the result of `_find_states`."""
        loss, new, after, everything, _ = aux
        laws, of_states = own
        sent = {
            "gradients": gradients,
            "loss": [loss] if rows.has_shares else [],
            "metrics": after if everything is None else [],
            "fixed": of_states,
        }
        sums = rows.add_up(sent)
        return Sums(
            sums["loss"][0] if rows.has_shares else loss,
            states.merge_states(laws, fixed, new, sums["fixed"]),
            sums["metrics"] if everything is None else after,
            everything,
            sums["gradients"],
        )


def _unpack(data: Any) -> tuple[Any, Any, Any]:
    utils = keras_module("trainers.data_adapters.data_adapter_utils")
    x, y, weight = utils.unpack_x_y_sample_weight(data)
    return x, y, weight


def _add_row(value: Any) -> Any:
    # Layers such as `Flatten` cannot compute on arrays without rows.
    return jax.tree.map(lambda x: jnp.zeros((1, *x.shape[1:]), x.dtype), value)


def _drop_row(value: Any) -> Any:
    backend = keras_module("backend")

    def drop(leaf: Any) -> Any:
        rows, mask = leaf[:0], backend.get_keras_mask(leaf)
        if mask is not None:
            backend.set_keras_mask(rows, mask[:0])
        return rows

    return jax.tree.map(drop, value)
