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

from jaxdist._called import called, name_call
from jaxdist._processes import Agreement, exchange_over, find_odd_ones
from jaxdist.data._sharing.structure import (
    Structure,
    check_equal,
    structure_of_text,
)
from jaxdist.errors import (
    ContextError,
    DeadlineExceededError,
    OtherProcessError,
    ProgramMismatchError,
    UnavailableError,
)

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
        # Compare only processes that have an element in this step.
        now = zip(answers, self._structures, strict=True)
        check_equal([s if a["rows"] is not None else None for a, s in now])
        offers = [Offer(a["rows"], a["padded"], a["progress"]) for a in answers]
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
