"""Exported functions that a server runs: update programs, and initialisers of variables."""

import hashlib
import re
import threading
import warnings
from collections.abc import Sequence
from typing import Any, Self

import jax
import numpy as np
from jax import export
from jax.sharding import SingleDeviceSharding

from jaxdist._called import called, name_call, refuse, refuse_type
from jaxdist._parameter_server.protocol import RegisterUpdate
from jaxdist._parameter_server.server.stored import StoredVariable, check_array
from jaxdist.errors import ShapeError
from jaxdist.training import require_extra


class UpdateProgram:
    """An update program `f(value, *slots, *operands) -> (value, *slots)`.

    Args:
        key: The name of the program.
        content: The bytes of the `jax.export` function.
        num_slots: How many slots it has.

    Raises:
        ArgumentTypeError: The bytes are not an exported function.
        ArgumentError: The function does not have this form.
    """

    def __init__(self, key: str, content: bytes, num_slots: int) -> None:
        self.key, self.content, self.num_slots = key, content, num_slots
        exported = load_exported(f"program {key!r}", content)
        self.digest = compute_digest(exported.mlir_module())
        self._given = list(exported.in_avals)
        _check_form(key, exported, num_slots)
        self._exported = exported
        self._compiled: Any = None
        self._compiling = threading.Lock()

    def compile(self) -> Any:
        """Return the compiled function; the first call compiles it."""
        with self._compiling:
            if self._compiled is None:
                self._compiled = compile_exported(self._exported, donated=1 + self.num_slots)
            return self._compiled

    @classmethod
    def prepare(cls, request: RegisterUpdate, found: Self | None) -> Self:
        """Return the program of a registration: `found` if it is the same, else a new one."""
        content = request.program.tobytes()
        is_same = found is not None and found.content == content
        if found is not None and is_same and found.num_slots == request.num_slots:
            return found
        made = cls(request.key, content, request.num_slots)
        if found is not None:
            found.check_same(made)
        made.compile()
        return made

    def check_same(self, other: "UpdateProgram") -> None:
        """Check that a program that is registered again is the same."""
        if (self.digest, self.num_slots) != (other.digest, other.num_slots):
            raise refuse(
                f"another program under the key {self.key!r}: sha256 {other.digest[:12]} with "
                f"{other.num_slots} slots, and there is {self.digest[:12]} with {self.num_slots}.",
                "A key names one program as long as the server lives.",
                "Use another key, such as the hash of the program.",
            )

    def check_variable(self, variable: StoredVariable) -> None:
        """Check that a variable is what the program takes."""
        given = self._given[0]
        if tuple(given.shape) != variable.shape or given.dtype != variable.dtype:
            raise ShapeError(
                f"{name_call()}: program {self.key!r} takes {_describe(given)} where "
                f"{variable.name!r} is {variable.describe()}.\n\n"
                "A program is exported for the shapes and dtypes of one variable and its "
                "slots.\n\nExport one for this shape, and register it under another key."
            )

    def make_slots(
        self,
        variable: StoredVariable,
        given: Sequence[Any] | None,
        init: "Initialiser | None",
    ) -> list[np.ndarray]:
        """Return the first values of the slots of a variable."""
        if given is None and init is not None:
            values = init.run(variable.peek())
        else:
            what = f"a slot of {variable.name!r}"
            values = [np.array(check_array(what, x)) for x in given or ()]
        wanted = [_describe(a) for a in self._given[1 : 1 + self.num_slots]]
        found = [_describe(x) for x in values]
        if wanted != found:
            raise refuse(
                f"the slots {found} for {variable.name!r}.",
                f"Program {self.key!r} has the slots {wanted}.",
                "Pass one first value for each slot, or an exported initialiser of them.",
                kind=ShapeError,
            )
        return values

    def check_operands(self, name: str, operands: Sequence[Any]) -> None:
        """Check the arrays of one change."""
        wanted = self._given[1 + self.num_slots :]
        if len(operands) != len(wanted):
            raise refuse(
                f"{len(operands)} operands of program {self.key!r} for {name!r}.",
                f"It takes {len(wanted)}, after the value and {self.num_slots} slots.",
                f"Pass {len(wanted)}.",
            )
        for given, operand in zip(wanted, operands, strict=True):
            array = check_array(f"an operand of program {self.key!r}", operand)
            if tuple(given.shape) != array.shape or given.dtype != array.dtype:
                raise refuse(
                    f"program {self.key!r} for {name!r} with an operand of {array.dtype}"
                    f"{list(array.shape)}.",
                    f"The program takes {_describe(given)}.",
                    f"Convert the operand: np.asarray(value, {str(given.dtype)!r}).",
                    kind=ShapeError,
                )

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the next value and slots. Arrays of JAX for value and slots are donated."""
        # Otherwise JAX would convert operands of 64 bits to 32.
        with jax.enable_x64(True):
            return list(jax.block_until_ready(self.compile()(*arrays)))


def load_exported(what: str, content: bytes) -> export.Exported:
    """Return the exported function in some bytes, if this server can run it.

    Raises:
        ArgumentTypeError: The bytes are not an exported function.
        ArgumentError: It needs something that a server does not have.
        MissingExtraError: flatbuffers is not installed.
    """
    require_extra("grpcio", "read programs of a server")
    try:
        exported = export.deserialize(bytearray(content))
    # The reader of flatbuffers can raise any error for a wrong offset.
    except Exception as error:
        raise refuse_type(
            f"{len(content)} bytes for {what}, which are not an exported function: "
            f"{type(error).__name__}: {str(error)[:200]}.",
            "A program is what jax.export.export(jax.jit(f))(*shapes).serialize() returns.",
            "Send these bytes, exported with a version of JAX of the same year as this one, "
            f"{jax.__version__}.",
        ) from error
    avals = [*exported.in_avals, *exported.out_avals]
    leaves = [0] * len(exported.in_avals)
    reasons = {
        f"it is compiled for {exported.platforms}": "cpu" not in exported.platforms,
        f"it needs {exported.nr_devices} devices": exported.nr_devices != 1,
        "it has effects, such as a print or a callback": bool(
            exported.ordered_effects or exported.unordered_effects
        ),
        "its shapes are symbolic": not all(isinstance(n, int) for a in avals for n in a.shape),
        "its arguments are nested": exported.in_tree != jax.tree.structure((tuple(leaves), {})),
    }
    wrong = [reason for reason, is_so in reasons.items() if is_so]
    if wrong:
        raise refuse(
            f"{what}, and {', and '.join(wrong)}.",
            "A server runs functions of arrays with fixed shapes, on one CPU device.",
            "Export it so: jax.export.export(jax.jit(f), platforms=['cpu'])(*shapes).",
        )
    return exported


def compile_exported(exported: export.Exported, donated: int = 0) -> Any:
    """Compile an exported function for the CPU; it donates its first arguments."""
    sharding = SingleDeviceSharding(jax.devices("cpu")[0])
    with jax.enable_x64(True), warnings.catch_warnings():
        # A program that does not use a slot cannot reuse its memory either.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        given = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in exported.in_avals
        ]
        made = jax.jit(exported.call, donate_argnums=tuple(range(donated)))
        return made.lower(*given).compile()


class Initialiser:
    """A compiled function that makes first values.

    Args:
        what: What it makes, for error messages.
        content: The bytes of the `jax.export` function.
    """

    def __init__(self, what: str, content: bytes) -> None:
        self._caller, self._what = name_call(), what
        exported = load_exported(what, content)
        self._wanted = [_describe(a) for a in exported.in_avals]
        self._run = compile_exported(exported)

    @called(lambda self: self._caller)
    def run(self, *given: Any) -> list[np.ndarray]:
        """Return the first values.

        Raises:
            ShapeError: The function takes other arguments.
        """
        found = [_describe(a) for a in given]
        if self._wanted != found:
            raise refuse(
                f"{self._what}, which takes {self._wanted or 'nothing'}.",
                f"It is called with {found or 'nothing'}.",
                "Export it for these arguments.",
                kind=ShapeError,
            )
        with jax.enable_x64(True):
            results = jax.tree.leaves(self._run(*given))
            return [np.asarray(x) for x in jax.block_until_ready(results)]


# Lines of Python code, by number or in full. Text in quotes may hold brackets.
_LOCATION = re.compile(r"""^#loc.*\n|\s?loc\((?:[^()"]|"[^"]*"|\([^()]*\))*\)""", re.MULTILINE)


def compute_digest(module: str) -> str:
    """Return a hash of a program that does not depend on the lines of code that traced it."""
    return hashlib.sha256(_LOCATION.sub("", module).encode()).hexdigest()


def _check_form(key: str, exported: export.Exported, num_slots: int) -> None:
    state = [_describe(a) for a in exported.in_avals[: 1 + num_slots]]
    results = [_describe(a) for a in exported.out_avals]
    if len(state) != 1 + num_slots or state != results:
        raise refuse(
            f"program {key!r} with num_slots={num_slots}: it takes "
            f"{[_describe(a) for a in exported.in_avals]} and returns {results}.",
            "An update program is f(value, *slots, *operands) -> (value, *slots), with the same "
            "shapes and dtypes.",
            "Return the next value first, then the next slots in the same order.",
        )


def _describe(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}"
