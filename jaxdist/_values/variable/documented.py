"""The other documented names of `tf.Variable`: aliases, and errors that say what replaces them."""

from typing import Any

from jaxdist._devices import device_name
from jaxdist._validate import CallerRename, log_without_effect, show
from jaxdist._values.variable.arguments import check_name
from jaxdist.errors import ArgumentTypeError, MissingNameError, ShapeError

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

    def __getattr__(self, name: str) -> Any:
        if name in REPLACED:
            raise MissingNameError(
                f"Variable.{name} is not there.\n\ntf.Variable has it.\n\n{REPLACED[name]}"
            )
        kind = type(self).__name__
        raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=self)

    @property
    def device(self) -> str:
        """The full name of the device that holds the first copy.

        Example:
            >>> Variable(1.0).device
            '/job:localhost/replica:0/task:0/device:CPU:0'

        Source:
            `tf.Variable.device`.
        """
        # This class is a base of `Variable`, which a type checker cannot know here.
        held: Any = self
        layout = held.home.layout
        first: Any = None if layout is None else layout.devices[0]
        return device_name(next(iter(held.read_value().devices())) if first is None else first)

    def get_shape(self) -> tuple[int, ...]:
        """Return the shape, the same as `shape`.

        Example:
            >>> Variable([1.0, 2.0]).get_shape()
            (2,)

        Source:
            `tf.Variable.get_shape`.
        """
        held: Any = self
        return tuple(held.shape)

    def set_shape(self, shape: Any) -> None:
        """Check the shape; None means a dim of any size.

        Raises:
            ShapeError: The variable has another shape, which cannot change.

        Example:
            >>> Variable([1.0, 2.0]).set_shape([None])

        Source:
            `tf.Variable.set_shape`.
        """
        held: Any = self
        if not isinstance(shape, (tuple, list)):
            raise ArgumentTypeError(
                f"Variable {held.label!r}.set_shape was given shape={show(shape)}.\n\n"
                "shape is a tuple or list of integers and None.\n\n"
                f"Pass shape={tuple(held.shape)}."
            )
        wanted = tuple(shape)
        fits = len(wanted) == len(held.shape) and all(
            w in (None, n) for w, n in zip(wanted, held.shape, strict=True)
        )
        if not fits:
            raise ShapeError(
                f"Variable {held.label!r}.set_shape was given shape={list(wanted)}, and the "
                f"variable has the shape {list(held.shape)}.\n\nA variable keeps its shape.\n\n"
                "Make another variable for another shape."
            )

    def is_initialized(self, name: str | None = None) -> bool:
        """Return True: a variable always has a value.

        Example:
            >>> Variable(1.0).is_initialized()
            True
        """
        held: Any = self
        check_name(held.label, "is_initialized", name)
        return True

    def load(self, value: Any, session: Any = None) -> None:
        """Assign `value` without a result, as `assign(value, read_value=False)` does.

        Args:
            value: The new value.
            session: None; JAX has no sessions.

        Example:
            >>> Variable(1.0).load(2.0)

        Source:
            `tf.Variable.load`.
        """
        held: Any = self
        if session is not None:
            log_without_effect("Variable.load", "session", "there are no sessions")
        # Errors of `assign` must name `load`, which is what the user called.
        name = f"Variable {held.label!r}"
        with (
            CallerRename(f"{name}.assign ", f"{name}.load "),
            CallerRename(f"The value of {name}.assign ", f"The value of {name}.load "),
        ):
            held.assign(value, read_value=False)

    def experimental_ref(self) -> Any:
        """Return `ref()`; this is its older name.

        Example:
            >>> v = Variable(1.0)
            >>> v.experimental_ref() == v.ref()
            True

        Source:
            `tf.Variable.experimental_ref`.
        """
        held: Any = self
        return held.ref()
