"""`Exchange`, with which the processes of a job agree on the rows of each step of a pass.

# Note [Agreement on rows]
Before it assembles a batch, every process must know how many rows each replica has. If the dataset
does not determine this, the prefetch threads exchange it for each step, over the key-value store of
the job. (A collective in that thread would interfere with those of the steps.) A process whose data
has ended continues to answer, with no rows, until all have ended. A process that stops reading
tells the others, which would otherwise wait for it.
"""

import contextlib
import dataclasses
import itertools
import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist._called import called, name_call
from jaxdist._processes import Agreement, exchange_over, find_odd_ones
from jaxdist.data._reading.elements import Element, device_dtype
from jaxdist.errors import (
    ContextError,
    DeadlineExceededError,
    OtherProcessError,
    ProgramMismatchError,
    UnavailableError,
)


@dataclasses.dataclass(frozen=True)
class Structure:
    """The leaves of a batch, without their rows.

    Attributes:
        tree: The containers, as a string to compare.
        skeleton: The containers as JSON if they are dicts, lists, tuples and None; else `null`.
        leaves: Name, dtype and trailing dims of each leaf; a scalar has None instead of dims.
    """

    tree: str
    skeleton: str
    leaves: tuple[tuple[str, str, tuple[int, ...] | None], ...]

    @property
    def has_rows(self) -> bool:
        """Whether a leaf has rows."""
        return any(dims is not None for _, _, dims in self.leaves)

    def to_text(self) -> str:
        """Return JSON that `structure_of_text` reads."""
        return json.dumps([self.tree, self.skeleton, self.leaves])


def structure_of(element: Element) -> Structure:
    """Return the structure of an element.

    Example:
        >>> from jaxdist.data._reading.elements import ElementReader
        >>> from jaxdist.data._sharing.exchange import structure_of
        >>> structure_of(ElementReader()({"x": np.ones((4, 2), np.int8)}, 0)).leaves
        (("batch['x']", 'int8', (2,)),)
    """
    leaves = tuple(
        (name, str(device_dtype(x.dtype)), tuple(x.shape[1:]) if x.ndim else None)
        for name, x in element.named_leaves()
    )
    skeleton = json.dumps(_describe(element.treedef.unflatten(range(len(leaves)))))
    return Structure(str(element.treedef), skeleton, leaves)


def structure_of_text(text: str) -> Structure:
    """Return the structure that `to_text` wrote."""
    tree, skeleton, leaves = json.loads(text)
    named = tuple((n, d, None if dims is None else tuple(dims)) for n, d, dims in leaves)
    return Structure(tree, skeleton, named)


def make_empty(structure: Structure, owner: int) -> Element:
    """Return an element without rows, for a process that has no element.

    Args:
        structure: The structure of another process.
        owner: The index of this process.

    Raises:
        ProgramMismatchError: The containers are not built into Python, so they cannot be made here.
    """
    try:
        leaves: list[Any] = [
            np.zeros(() if dims is None else (0, *dims), np.dtype(dtype))
            for _, dtype, dims in structure.leaves
        ]
        skeleton = json.loads(structure.skeleton)
        built = None if skeleton is None else _build(skeleton, leaves)
    except TypeError:  # a dtype that NumPy does not know
        built = None
    if built is None:
        raise ProgramMismatchError(
            f"{name_call()}: process {owner} has no element at all, and the batches of the others "
            f"are {structure.tree}.\n\nA process without data contributes batches of no rows. "
            "It can build dicts, lists and tuples of arrays, and no other containers.\n\nGive "
            "every process one element or more, or make the batches dicts of arrays.",
            (owner,),
        )
    flat, treedef = jax.tree.flatten(built[0])
    return Element(flat, treedef, 0 if structure.has_rows else None)


def check_equal(structures: Sequence[Structure | None]) -> None:
    """Check that all processes that have a structure have the same one.

    Raises:
        ProgramMismatchError: Structures differ; the message names the processes and the first leaf
            that differs.
    """
    culprits, usual = find_odd_ones(structures)
    if not culprits or usual is None:
        return
    first = culprits[0]
    found, wanted = _describe_difference(structures[first], structures[usual])
    which = ", ".join(f"process {p}" for p in culprits)
    raise ProgramMismatchError(
        f"{name_call()}: the batches of {which} have another structure than those of the others.\n"
        f"  there: {found}\n"
        f"  else:  {wanted}\n\n"
        "All processes run one program, so their batches have the same structure, dtypes and "
        "trailing dims in each step; only the rows may differ.\n\n"
        "Make the same batches in every process; pad dims that vary to one length.",
        culprits,
    )


def _describe_difference(found: Structure | None, usual: Structure | None) -> tuple[str, str]:
    one, other = ({n: (d, s) for n, d, s in x.leaves} if x else {} for x in (found, usual))
    for name in dict.fromkeys([*one, *other]):
        if one.get(name) != other.get(name):
            return _show_leaf(name, one), _show_leaf(name, other)
    return (found.tree if found else ""), (usual.tree if usual else "")


def _show_leaf(name: str, leaves: dict[str, Any]) -> str:
    if name not in leaves:
        return f"no {name}"
    dtype, dims = leaves[name]
    if dims is None:
        return f"{name} is a scalar of {dtype}"
    return f"{name} is {dtype}[{', '.join(['rows', *map(str, dims)])}]"


def _describe(tree: Any) -> Any:
    """Return nested containers as JSON values; None if one is not built into Python."""
    if tree is None:
        return ["none"]
    if isinstance(tree, int):
        return ["leaf", tree]
    kind = {dict: "dict", list: "list", tuple: "tuple"}.get(type(tree))
    if kind is None or (kind == "dict" and not all(isinstance(k, str) for k in tree)):
        return None
    parts = [_describe(x) for x in (tree.values() if kind == "dict" else tree)]
    return None if None in parts else [kind, parts, [*tree] if kind == "dict" else None]


def _build(skeleton: Any, leaves: Sequence[Any]) -> list[Any]:
    """Return a list of one item: the containers that `_describe` described, with `leaves`."""
    kind = skeleton[0]
    if kind == "none":
        return [None]
    if kind == "leaf":
        return [leaves[skeleton[1]]]
    parts = [_build(x, leaves)[0] for x in skeleton[1]]
    if kind == "dict":
        return [dict(zip(skeleton[2], parts, strict=True))]
    return [parts if kind == "list" else tuple(parts)]


# All processes start the same passes in the same order, so the number of a pass names it.
_PASSES: "weakref.WeakKeyDictionary[Agreement, Any]" = weakref.WeakKeyDictionary()

Rows = Sequence[int | None]  # for each local replica; None without an element


@dataclasses.dataclass(frozen=True)
class Offer:
    """The message of one process about one step.

    Attributes:
        rows: The rows of its replicas; None if its data has ended.
        padded_rows: Rows to which it pads the value of a replica; 0 without padding.
        progress: Its progress in each file, with the policy FILE.
    """

    rows: Rows | None
    padded_rows: int = 0
    progress: dict[str, int] = dataclasses.field(default_factory=dict)


class Exchange:
    """The agreement of all processes on the steps of one pass.

    Args:
        caller: The name of the function in messages.
        agreement: The agreement of the job.
        same: This process's values, by name, that must be equal in all processes.
        seconds: How long a loop waits for the other processes; None means `collective_seconds`.
    """

    def __init__(
        self,
        agreement: Agreement,
        same: dict[str, str],
        seconds: float | None = None,
    ) -> None:
        number = next(_PASSES.setdefault(agreement, itertools.count()))
        self.process = agreement.process.index
        self.is_stopped = False
        # Returns when the loop began to wait for a batch, by `time.monotonic`. While no batch is
        # needed, the prefetch thread may wait longer than the limit.
        self.needed_since: Callable[[], float | None] | None = None
        self._seconds = seconds
        self._caller = name_call()
        self._agreement = agreement
        self._channel = f"data/{number}"
        self._same: dict[str, str] | None = same
        self._said: Structure | None = None
        self._structures: list[Structure | None] = [None] * agreement.process.count
        self._has_ended = False

    @property
    def structure(self) -> Structure | None:
        """The structure of the batches of all processes, once one has a batch."""
        return next((s for s in self._structures if s is not None), None)

    @property
    def has_met(self) -> bool:
        """Whether the processes have compared their batches."""
        return self._same is None

    @called(lambda self: self._caller)
    def share(self, step: int, offer: Offer, structure: Structure | None) -> list[Offer]:
        """Return the offers of all processes for a step, in their order.

        Raises:
            ProgramMismatchError: The processes read different data, or have different batches.
            UnavailableError: Another process has stopped reading.
            DeadlineExceededError: Another process has not answered in time.
        """
        said: dict[str, Any] = {
            "rows": offer.rows,
            "padded": offer.padded_rows,
            "progress": offer.progress,
        }
        if self._same is not None:
            said["same"] = self._same
        if structure is not None and structure != self._said:
            said["structure"] = structure.to_text()
            self._said = structure
        answers = self._gather(step, said)
        if self._same is not None:
            self._check_same([a.get("same", {}) for a in answers])
            self._same = None
        for process, answer in enumerate(answers):
            if "structure" in answer:
                self._structures[process] = structure_of_text(answer["structure"])
        offers = [Offer(a["rows"], a["padded"], a["progress"]) for a in answers]
        # Compare only processes that have an element in this step.
        now = zip(offers, self._structures, strict=True)
        check_equal([s if o.rows is not None else None for o, s in now])
        self._has_ended = all(o.rows is None for o in offers)
        return offers

    def end(self) -> None:
        """End the exchange: each process knows the rows, so `leave` need not tell the others."""
        self._has_ended = True

    def leave(self, reason: str) -> None:
        """Tell the others that this process has stopped reading, without waiting for them."""
        if self._has_ended:
            return
        self._has_ended = True
        text = json.dumps({"left": reason})
        # The answers of the others no longer matter, nor does a service that has ended.
        with contextlib.suppress(OtherProcessError, ContextError):
            self._agreement.gather(self._channel, text, 0.0)

    def _gather(self, step: int, said: dict[str, Any]) -> list[dict[str, Any]]:
        purpose = f"the rows of step {step + 1} of {self._caller}"
        try:
            texts = exchange_over(
                self._agreement,
                "next(iterator)",
                self._channel,
                json.dumps(said),
                self._seconds,
                purpose,
                lambda: self.is_stopped,
                None if self._seconds is None else self.needed_since,
            )
        except DeadlineExceededError:
            self._has_ended = True
            raise
        answers = [json.loads(text) for text in texts]
        left = {i: a["left"] for i, a in enumerate(answers) if "left" in a}
        if left:
            self._has_ended = True
            who = "; ".join(f"process {i} has left the loop over it ({r})" for i, r in left.items())
            raise UnavailableError(
                f"{self._caller}: no batch for step {step + 1} of the dataset: {who}.\n\n"
                "Every step takes a batch in every process, so all processes take the same number "
                "of batches.\n\n"
                "Let all processes end the loop after the same step. If an error ended it, look "
                "at the output of that process.",
                [*left],
            )
        return answers

    def _check_same(self, all_same: Sequence[dict[str, str]]) -> None:
        for name in all_same[self.process]:
            values = [same.get(name) for same in all_same]
            odd, usual = find_odd_ones(values)
            if odd and usual is not None:
                which = ", ".join(f"process {p}" for p in odd)
                raise ProgramMismatchError(
                    f"{self._caller}: {which} reads another dataset than the others: {name} is "
                    f"{values[odd[0]]} there, and {values[usual]} elsewhere.\n\n"
                    "All processes read one dataset, from the same position and with the same "
                    "options.\n\n"
                    "Make the dataset with the same arguments in every process, and restore the "
                    "same state of its iterator.",
                    odd,
                )
