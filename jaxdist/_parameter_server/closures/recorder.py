"""Recording of optimizer updates: a traced closure sends gradients, and the servers update."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.extend.core import Primitive
from jax.tree_util import keystr

from jaxdist._called import call_as, refuse
from jaxdist._collectives import assume_replicated
from jaxdist._mesh import ReplicaMesh
from jaxdist._parameter_server.variables.ports import Port
from jaxdist.errors import ShapeError, UnsupportedError

# `updated` stands for what an optimizer on the servers adds to a parameter. No worker knows it, so
# a program that uses it cannot be compiled; a closure only returns it as the parameter's new value,
# and that result is dropped. `optimizer` is its number in the closure, and `leaf` that of the
# parameter in the tree that it updates.
UPDATED = Primitive("jaxdist_updated_on_servers")
UPDATED.def_abstract_eval(lambda x, *, optimizer, leaf: x)


def list_optimizers(nodes: Any) -> list[nnx.Optimizer[Any]]:
    """Return the optimizers among NNX objects."""
    return [x for _, x in nnx.iter_graph(nodes) if isinstance(x, nnx.Optimizer)]


class Recorder:
    """Replaces the transformation of one optimizer while a closure is traced.

    Its `update` writes the gradients to ports, and returns marks instead of updates.

    Args:
        number: The number of the optimizer in the closure.
        tx: The transformation of the optimizer.
        layout: The replicas that run the closure.
    """

    def __init__(self, number: int, tx: Any, layout: ReplicaMesh) -> None:
        self._number, self._layout = number, layout
        self.tx = tx
        self.gradients: list[Port] = []
        self.names: list[str] = []
        # The structure of the parameters, as the optimizer sees them.
        self.treedef: Any = None
        self.shapes: list[jax.ShapeDtypeStruct] = []
        self.count = Port(f"updates of optimizer {number}", layout, (), np.int32)

    @property
    def is_used(self) -> bool:
        """Whether the closure updates parameters with it."""
        return bool(self.gradients)

    def make_transformation(self) -> optax.GradientTransformationExtraArgs:
        """Return the transformation that records."""
        return optax.GradientTransformationExtraArgs(self._refuse_init, self._update)

    def _refuse_init(self, params: Any) -> Any:
        raise UnsupportedError(
            "optimizer.tx.init was called in a function that a coordinator schedules.\n\n"
            "The state of an optimizer is on the parameter servers, beside its parameters.\n\n"
            "Make the optimizer before, in strategy.scope()."
        )

    def _update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if params is None or extra:
            found = f"the arguments {sorted(extra)}" if extra else "no params"
            raise call_as(
                "optimizer.tx.update",
                refuse,
                f"{found} in a function that a coordinator schedules.",
                "The servers update from gradients and their own values only.",
                "Call optimizer.update(model, grads).",
                kind=UnsupportedError,
            )
        leaves, treedef = jax.tree.flatten(updates)
        values, of_params = jax.tree.flatten(params)
        if treedef != of_params:
            raise call_as(
                "optimizer.update",
                refuse,
                f"{len(leaves)} gradients for {len(values)} parameters.",
                "Each parameter has one gradient, in the same structure.",
                "Take the gradients of the same model: nnx.value_and_grad(loss_fn)(model).",
                kind=ShapeError,
            )
        if self.treedef is None or self.treedef != treedef:
            self._make_ports(updates, treedef)
        for port, gradient in zip(self.gradients, leaves, strict=True):
            port.assign(gradient, read_value=False)
        self.count.assign_add(1, read_value=False)
        # The servers compute one value. The proof that replicas agree does not know the mark, and
        # checks the gradients themselves.
        marked = [
            assume_replicated(UPDATED.bind(v, optimizer=self._number, leaf=k))
            for k, v in enumerate(values)
        ]
        return treedef.unflatten(marked), state

    def _make_ports(self, grads: Any, treedef: Any) -> None:
        found = jax.tree_util.tree_flatten_with_path(grads)[0]
        self.treedef = treedef
        self.names = [keystr(path) for path, _ in found]
        self.shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in found]
        self.gradients = [
            Port(f"gradient of {name}", self._layout, s.shape, s.dtype)
            for name, s in zip(self.names, self.shapes, strict=True)
        ]


class Recorders:
    """The recorders of all optimizers among the arguments of a closure."""

    def __init__(self, layout: ReplicaMesh) -> None:
        self._layout = layout
        self.all: list[Recorder] = []

    @contextlib.contextmanager
    def replace_in(self, nodes: Any) -> Iterator[None]:
        """Let the optimizers among NNX objects record, in the block."""
        found = list_optimizers(nodes)
        before = [optimizer.tx for optimizer in found]
        for number, optimizer in enumerate(found):
            if number == len(self.all):
                self.all.append(Recorder(number, optimizer.tx, self._layout))
            optimizer.tx = self.all[number].make_transformation()
        try:
            yield
        finally:
            for optimizer, tx in zip(found, before, strict=True):
                optimizer.tx = tx
