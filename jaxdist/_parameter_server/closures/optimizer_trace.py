"""`OptimizerTrace`: the trace of an optax transformation, as programs of arrays."""

from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.extend.core import ClosedJaxpr
from jax.tree_util import keystr, tree_flatten_with_path

from jaxdist import _compat
from jaxdist._parameter_server.closures.inputs import is_key
from jaxdist._typing import PyTree
from jaxdist.errors import ArgumentError

# The name in errors about optimizers.
CALLER = "ParameterServerStrategy"


class OptimizerTrace:
    """The traced `init` and `update` of a transformation, as programs of leaves.

    Args:
        tx: The transformation.
        params: A pytree of arrays or of `jax.ShapeDtypeStruct`s.
        labels: The names of the parameters in errors; None means their paths.

    Attributes:
        names: The paths of the parameters.
        labels: Their names in errors.
        leaves: Their shapes and dtypes.
        slots: The shapes and dtypes of the leaves of the state.
        slot_names: Their paths.
        init: The program that makes the state.
        update: The program of gradients, state and parameters.

    Raises:
        ArgumentError: The transformation cannot be traced, or its state changes its shape.
    """

    def __init__(
        self,
        tx: optax.GradientTransformationExtraArgs,
        params: PyTree,
        labels: Sequence[str] | None = None,
    ) -> None:
        flat, structure = tree_flatten_with_path(params)
        self.names = [keystr(path, simple=True, separator=".") for path, _ in flat]
        self.labels = self.names if labels is None else list(labels)
        self.leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in flat]
        self.count = len(flat)
        try:
            whole = jax.tree.unflatten(structure, self.leaves)
            packing = _Packing()
            self.slots: list[Any] = jax.eval_shape(lambda p: packing.pack(tx.init(p)), whole)
            of_state = tree_flatten_with_path(jax.eval_shape(tx.init, whole))[0]
            self.slot_names = [keystr(p, simple=True, separator=".") for p, _ in of_state]

            def init(*leaves: Any) -> list[Any]:
                return packing.pack(tx.init(jax.tree.unflatten(structure, leaves)))

            def update(*arrays: Any) -> list[Any]:
                grads, params = (
                    jax.tree.unflatten(structure, part)
                    for part in (arrays[: self.count], arrays[len(arrays) - self.count :])
                )
                held = packing.unpack(arrays[self.count : len(arrays) - self.count])
                updates, held = tx.update(grads, held, params)
                return [*jax.tree.leaves(optax.apply_updates(params, updates)), *packing.pack(held)]

            self.init = jax.make_jaxpr(init)(*self.leaves)
            self.update = jax.make_jaxpr(update)(*self.leaves, *self.slots, *self.leaves)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise ArgumentError(
                f"{CALLER} cannot trace the update of the optimizer: "
                f"{type(error).__name__}: {error}.\n\n"
                "A server calls tx.update(grads, state, params), with nothing else.\n\n"
                "Use a transformation that needs no value, loss or function as an extra argument."
            ) from error
        self._check_state()

    def _check_state(self) -> None:
        after = [v.aval for v in self.update.jaxpr.outvars[self.count :]]
        if len(after) != len(self.slots):
            raise ArgumentError(
                f"{CALLER}: the update of the optimizer makes a state of {len(after)} arrays, "
                f"and its init one of {len(self.slots)}.\n\n"
                "The slots of a server are those that init makes.\n\n"
                "Make the first state with all arrays of the later ones."
            )
        for name, one, other in zip(self.slot_names, self.slots, after, strict=True):
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                raise ArgumentError(
                    f"{CALLER}: the update of the optimizer makes {other.dtype}"
                    f"{list(other.shape)} of {name}, which is {one.dtype}{list(one.shape)}.\n\n"
                    "A slot of a server keeps its shape and dtype.\n\n"
                    "Make the first state with the dtype of the later ones."
                )

    def find_needed(
        self, leaf: int, kept: Sequence[int] = ()
    ) -> tuple[list[int], ClosedJaxpr, list[int]]:
        """Return the slots that a parameter needs, its program, and which inputs that needs.

        Args:
            leaf: The number of the result: a parameter, or a leaf of the state after these.
            kept: Other slots that it has.
        """
        slots: set[int] = set(kept)
        while True:
            order = sorted(slots)
            results = [leaf, *(self.count + j for j in order)]
            program, needed = _compat.drop_unused(self.update, results)
            found = {n - self.count for n in needed} & set(range(len(self.slots)))
            if found <= slots:
                return order, program, needed
            slots |= found

    def get_owner(self, number: int) -> int | None:
        """Return the parameter to which an input belongs; None for a slot."""
        if number < self.count:
            return number
        last = number - self.count - len(self.slots)
        return last if last >= 0 else None


class _Packing:
    """Makes plain arrays of a state and back: servers have no arrays of random keys."""

    def __init__(self) -> None:
        self._structure: Any = None
        self._impls: list[Any] = []

    def pack(self, state: PyTree) -> list[Any]:
        leaves, self._structure = jax.tree.flatten(state)
        self._impls = [jax.random.key_impl(x) if is_key(x) else None for x in leaves]
        return [jax.random.key_data(x) if is_key(x) else jax.numpy.asarray(x) for x in leaves]

    def unpack(self, arrays: Sequence[Any]) -> PyTree:
        pairs = zip(arrays, self._impls, strict=True)
        made = [x if i is None else jax.random.wrap_key_data(x, impl=i) for x, i in pairs]
        return jax.tree.unflatten(self._structure, made)
