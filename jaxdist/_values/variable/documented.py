"""The other documented names of `tf.Variable`: aliases, and errors that say what replaces them."""

from typing import Any

from jaxdist._called import called, refuse
from jaxdist._devices import device_name
from jaxdist._validate import CallerRename, check_instance, log_without_effect
from jaxdist._values.variable.arguments import check_name
from jaxdist.errors import MissingNameError, ShapeError

_GRAPHS = "JAX has no graphs and sessions: a variable has its value at once, read_value()."
_SAVED = "A checkpoint saves the value: jaxdist.training.Checkpoints, or read_value()."

# Documented names that `Variable` does not have, and what replaces them.
REPLACED = {
    "SaveSliceInfo": _SAVED,
    "constraint": "Apply it to the value: v.assign(project(v.value())).",
    "count_up_to": "Use range(limit), or v.assign_add(1).",
    "eval": _GRAPHS,
    "from_proto": _SAVED,
    "graph": _GRAPHS,
    "handle": "The array is read_value().",
    "initial_value": "Keep the value that the variable is made of, where it is needed again.",
    "initialized_value": _GRAPHS,
    "initializer": _GRAPHS,
    "op": _GRAPHS,
    "to_proto": _SAVED,
}


class DocumentedNames:
    """A base class with the names of `tf.Variable` that neither read nor assign."""

    __slots__ = ()

    # `self` is a `Variable`, which this module cannot import.

    def __getattr__(self, name: str) -> Any:
        if name in REPLACED:
            raise MissingNameError(
                f"Variable.{name} is not there.\n\ntf.Variable has it.\n\n{REPLACED[name]}"
            )
        return super().__getattribute__(name)

    @property
    def device(self: Any) -> str:
        """The full name of the device that holds the first copy.

        Example:
            >>> Variable(1.0).device
            '/job:localhost/replica:0/task:0/device:CPU:0'

        Source:
            `tf.Variable.device`.
        """
        layout = self.home.layout
        first: Any = None if layout is None else layout.first_device
        if layout is not None and layout.variables_on is not None:
            (first,) = layout.variables_on.device_set
        return device_name(next(iter(self.read_value().devices())) if first is None else first)

    def get_shape(self: Any) -> tuple[int, ...]:
        """Return the shape, the same as `shape`.

        Example:
            >>> Variable([1.0, 2.0]).get_shape()
            (2,)

        Source:
            `tf.Variable.get_shape`.
        """
        return tuple(self.shape)

    @called(lambda self: f"Variable {self.label!r}.set_shape")
    def set_shape(self: Any, shape: Any) -> None:
        """Check the shape; None means a dim of any size.

        Raises:
            ShapeError: The variable has another shape, which cannot change.

        Example:
            >>> Variable([1.0, 2.0]).set_shape([None])

        Source:
            `tf.Variable.set_shape`.
        """
        kinds, what = (tuple, list), "a tuple or list of integers and None"
        remedy = f"Pass shape={tuple(self.shape)}."
        check_instance("shape", shape, kinds, what, remedy)
        wanted = tuple(shape)
        fits = len(wanted) == len(self.shape) and all(
            w in (None, n) for w, n in zip(wanted, self.shape, strict=True)
        )
        if not fits:
            raise refuse(
                f"shape={list(wanted)}, and the variable has the shape {list(self.shape)}.",
                "A variable keeps its shape.",
                "Make another variable for another shape.",
                kind=ShapeError,
            )

    @called("is_initialized")
    def is_initialized(self: Any, name: str | None = None) -> bool:
        """Return True: a variable always has a value.

        Example:
            >>> Variable(1.0).is_initialized()
            True
        """
        check_name(self.label, name)
        return True

    @called("Variable.load")
    def load(self: Any, value: Any, session: Any = None) -> None:
        """Assign `value` without a result, as `assign(value, read_value=False)` does.

        Args:
            value: The new value.
            session: None; JAX has no sessions.

        Example:
            >>> Variable(1.0).load(2.0)

        Source:
            `tf.Variable.load`.
        """
        if session is not None:
            log_without_effect("session", "there are no sessions")
        # Errors of `assign` must name `load`, which is what the user called.
        name = f"Variable {self.label!r}"
        with (
            CallerRename(f"{name}.assign ", f"{name}.load "),
            CallerRename(f"The value of {name}.assign ", f"The value of {name}.load "),
        ):
            self.assign(value, read_value=False)

    def experimental_ref(self: Any) -> Any:
        """Return `ref()`; this is its older name.

        Example:
            >>> v = Variable(1.0)
            >>> v.experimental_ref() == v.ref()
            True

        Source:
            `tf.Variable.experimental_ref`.
        """
        return self.ref()
