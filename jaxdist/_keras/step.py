"""One step of a Keras model, as one replica computes it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._keras import gather, losses, metrics
from jaxdist._keras.rows import Rows, use_rows
from jaxdist._keras.source import keras_module


class UnknownLossError(Exception):
    """The step added losses of which is unknown how those of the replicas combine."""


@dataclasses.dataclass(frozen=True)
class Sums:
    """What the replicas of a step have computed together.

    Args:
        loss: The loss of the global batch.
        fixed: The values of the variables that are not trained, after the step.
        metrics: What the rows add to the variables of the metrics; those values of which the other
            metrics are computed where `everything` is given.
        everything: `x`, `y`, outputs and weights of all rows, of which metrics are computed; None
            where all metrics are sums.
        gradients: The gradients of the loss of the global batch.
    """

    loss: Any
    fixed: list[Any]
    metrics: Any
    everything: Any
    gradients: Any


@dataclasses.dataclass
class Step:
    """The train, test and predict steps of a model.

    Args:
        model: The Keras model.
        added: For each loss that the forward pass adds: whether it is a mean over the rows (or
            does not depend on them), and not a sum. None: unknown.
    """

    model: Any
    added: tuple[bool, ...] | None = None

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
                # Zeros, but a derivative that is not finite would make them nan.
                gradients = jax.tree.map(jnp.zeros_like, gradients)
            logs, fixed, of_metrics, gradients = self._combine(
                rows, aux, fixed, of_metrics, gradients
            )
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
            logs, fixed, of_metrics, _ = self._combine(rows, aux, fixed, of_metrics, [])
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
            shares = _share_fixed(fixed, new, rows)
            fixed = _merge_fixed(fixed, new, rows.add_up(shares) if shares else [])
        return outputs, (trainable, fixed)

    def _with_shares(self, rows: Rows) -> Rows:
        return dataclasses.replace(rows, has_shares=losses.has_shares(self.model))

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
        y_pred, new, added = model.stateless_call(
            trainable,
            fixed,
            _add_row(x) if rows.own == 0 else x,
            return_losses=True,
            **kwargs,
        )
        if rows.own == 0:
            y_pred = _drop_row(y_pred)
        added = self._weigh(added, rows)
        sums = metrics.have_increments(model) and rows.has_shares
        # Increments: what the variables would be if they had been zero before.
        before = [jnp.zeros_like(v) for v in of_metrics] if sums else of_metrics
        if rows.has_shares:
            everything = None
            loss, after, new = self._loss(
                trainable, new, before, x, y, y_pred, weight, added, train
            )
        else:
            everything = self._gather(x, y, y_pred, weight, rows)
            direct = gather.scale_gradient(trainable, rows.fraction)
            x_all, y_all, pred_all, weight_all = everything
            loss, after, new = self._loss(
                direct, new, before, x_all, y_all, pred_all, weight_all, added, train
            )
        if sums:
            # Metrics of Keras that count rows need one.
            if rows.own:
                after = metrics.scale_loss_trackers(model, after, rows.total / rows.own)
                # `train_step` of Keras loses the masks of its outputs, which `test_step` keeps.
                shown = jax.tree.map(jax.lax.stop_gradient, y_pred) if train else y_pred
                after = metrics.update_compiled(model, after, y, shown, weight)
        elif everything is None:
            everything = self._gather(x, y, y_pred, weight, rows)
        unscaled = loss
        if train:
            loss = self._scale(loss, of_optimizer)
        return loss, (unscaled, new, after, everything)

    def _scale(self, loss: Any, of_optimizer: Any) -> Any:
        """Return the loss as the optimizer scales it before it is differentiated."""
        optimizer = self.model.optimizer
        pairs = list(zip(optimizer.variables, of_optimizer, strict=True))
        with keras_module("backend").StatelessScope(state_mapping=pairs):
            return optimizer.scale_loss(loss)

    def _loss(
        self,
        trainable: Any,
        fixed: Any,
        of_metrics: Any,
        x: Any,
        y: Any,
        y_pred: Any,
        weight: Any,
        added: Any,
        train: bool,
    ) -> tuple[Any, list[Any], list[Any]]:
        model = self.model
        if added:
            model._losses_override.clear()
            model._losses_override = added
        try:
            loss, (_, fixed, of_metrics) = model.stateless_compute_loss(
                trainable,
                fixed,
                of_metrics,
                x=x,
                y=y,
                y_pred=y_pred,
                sample_weight=weight,
                training=train,
            )
        finally:
            if added:
                model._losses_override.clear()
        return loss, of_metrics, fixed

    def _gather(self, x: Any, y: Any, y_pred: Any, weight: Any, rows: Rows) -> Any:
        # `x` is gathered only for methods of the user, since those of Keras do not use it.
        trainer = keras_module("trainers.trainer").Trainer
        kind = type(self.model)
        is_users = (kind.compute_loss, kind.compute_metrics) != (
            trainer.compute_loss,
            trainer.compute_metrics,
        )
        given = (x if is_users else None, y, y_pred, weight)
        return gather.gather_rows(given, rows)

    def _weigh(self, added: list[Any], rows: Rows) -> list[Any]:
        """Return the losses that the forward pass added, for the global batch or as shares."""
        num_fixed = sum(v.regularizer is not None for v in self.model.trainable_variables)
        own, of_weights = added[: len(added) - num_fixed], added[len(added) - num_fixed :]
        # One row is all there is, so a mean and a sum are the same.
        if own and self.added is None and rows.count > 1 and rows.total > 1:
            raise UnknownLossError
        means = self.added or (True,) * len(own)
        shares: list[Any] = []
        for loss, is_mean in zip(own, means, strict=True):
            share = jnp.sum(loss) * (rows.fraction if is_mean else float(rows.own > 0))
            # A loss of no rows may be nan.
            share = share if rows.own else jnp.zeros_like(share)
            shares.append(share if rows.has_shares else gather.add_shares(share, rows))
        for loss in of_weights:
            if rows.has_shares:
                shares.append(loss * rows.fraction)
            else:
                shares.append(gather.scale_gradient(loss, rows.fraction))
        return shares

    def _combine(
        self, rows: Rows, aux: Any, fixed: Any, of_metrics: Any, gradients: Any
    ) -> tuple[Any, Any, Any, Any]:
        """Add up the shares of the replicas; return logs, state and gradients."""
        found = self._add_up(rows, aux, fixed, gradients)
        if found.everything is None:
            logs, values = metrics.add_to_metrics(
                self.model, of_metrics, found.metrics, found.loss, None, rows.total
            )
        else:
            logs, values = metrics.compute_on_all(
                self.model, found.metrics, found.loss, found.everything, rows.total
            )
        return logs, found.fixed, values, found.gradients

    def _add_up(self, rows: Rows, aux: Any, fixed: Any, gradients: Any) -> "Sums":
        """Add up the shares of the replicas."""
        loss, new, after, everything = aux
        sent = {
            "gradients": gradients,
            "loss": [loss] if rows.has_shares else [],
            "metrics": after if everything is None else [],
            "fixed": _share_fixed(fixed, new, rows),
        }
        sums = rows.add_up(sent)
        return Sums(
            sums["loss"][0] if rows.has_shares else loss,
            _merge_fixed(fixed, new, sums["fixed"]),
            sums["metrics"] if everything is None else after,
            everything,
            sums["gradients"],
        )


def _share_fixed(old: Any, new: Any, rows: Rows) -> list[Any]:
    """Return the shares of the non-trainable floats that the step changed."""
    places = _changed_floats(old, new)
    if rows.own == 0:
        return [jnp.zeros_like(old[n]) for n in places]
    return [new[n] * jnp.asarray(rows.fraction, new[n].dtype) for n in places]


def _merge_fixed(old: Any, new: Any, sums: Any) -> list[Any]:
    merged = list(new)
    for n, value in zip(_changed_floats(old, new), sums, strict=True):
        merged[n] = value
    return merged


def _changed_floats(old: Any, new: Any) -> list[int]:
    pairs = enumerate(zip(old, new, strict=True))
    return [n for n, (a, b) in pairs if a is not b and jnp.issubdtype(a.dtype, jnp.inexact)]


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
