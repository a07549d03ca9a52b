"""A call path that finds repeated and deleted buffers before they are donated.

XLA refuses them too, but only while it starts the program. With several devices that may end the
process.
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh
from jaxdist._values import PerReplica


def may_crash(layout: ReplicaMesh) -> bool:
    """Whether a deleted buffer in a call ends the process; see `_compat.REJECTS_DELETED_ARRAYS`."""
    is_late = not _compat.REJECTS_DELETED_ARRAYS and layout.platform == "cpu"
    return is_late and len(layout.devices) > 1


def has_repeats(tree: Any) -> bool:
    """Whether a pytree contains one array twice."""
    leaves = jax.tree.leaves(tree)
    return len(set(map(id, leaves))) != len(leaves)


class DonatingCall:
    """A call path that first checks for repeated arrays, and for deleted ones if JAX does not.

    Without keyword arguments it does not flatten arrays, or flat dicts and sequences of arrays.
    For 100 leaves that takes a fifth of the time.
    """

    def __init__(
        self,
        dispatch: Callable[..., Any],
        slow: Callable[..., Any],
        *,
        one_device: bool,
        finds_deleted: bool,
    ) -> None:
        self.dispatch = dispatch
        self._slow = slow
        self._one_device = one_device
        self._finds_deleted = finds_deleted
        self._all_flat = True

    def register_structure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Register the structure of a call's arguments before the C++ path takes over."""
        whole = [*args, *kwargs.values()]
        # From one nested argument on, all calls are flattened: `_parts` would miss its arrays.
        self._all_flat = self._all_flat and all(
            isinstance(x, (jax.Array, PerReplica)) or jax.tree_util.all_leaves(_parts(x))
            for x in whole
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Under jax_debug_nans only the slow path runs the program that donates nothing.
        if _compat.is_checking_numbers():
            return self._slow(*args, **kwargs)
        if self._one_device:
            return self._call_on_one_device(*args, **kwargs)
        # Plain loops over flat arguments, since this runs at every step; see the class.
        may_repeat, finds_deleted = True, self._finds_deleted
        if self._all_flat and not kwargs:
            count = 0
            seen: set[int] = set()
            for argument in args:
                parts = _parts(argument)
                count += len(parts)
                seen.update(map(id, parts))
                if finds_deleted and _compat.has_deleted(parts):
                    return self._slow(*args, **kwargs)
            may_repeat = len(seen) != count
        elif finds_deleted and _compat.has_deleted(jax.tree.leaves((args, kwargs))):
            return self._slow(*args, **kwargs)
        if may_repeat and has_repeats((args, kwargs)):
            return self._slow(*args, **kwargs)
        return self.dispatch(*args, **kwargs)

    def _call_on_one_device(self, *args: Any, **kwargs: Any) -> Any:
        """Run on one device, where XLA refuses repeated buffers without ending the process."""
        try:
            return self.dispatch(*args, **kwargs)
        except ValueError as error:
            if "donate" not in str(error) or not has_repeats((args, kwargs)):
                raise
        return self._slow(*args, **kwargs)


def _parts(argument: Any) -> Any:
    kind = type(argument)
    if kind is dict:
        return argument.values()
    if kind is list or kind is tuple:
        return argument
    return (argument._data,) if kind is PerReplica else (argument,)
