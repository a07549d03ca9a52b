"""`Group`: the processes that write and read the checkpoints of one folder together."""

import json
from collections.abc import Callable
from typing import Any

from jaxdist._processes import HERE, Agreement, exchange_over, get_agreement
from jaxdist.errors import ContextError, UnavailableError

_MAIN = "checkpoints"


class Group:
    """All processes of the job, which make the same calls of `Checkpoints` in the same order.

    Args:
        agreement: How the processes exchange strings.
        seconds: How long a process waits for the others; None means `collective_seconds`.
    """

    def __init__(self, agreement: Agreement, seconds: float | None = None) -> None:
        self._agreement = agreement
        self.process = agreement.process
        self._seconds = seconds

    def gather(self, call: str, said: Any) -> list[Any]:
        """Return the messages of all processes, in order. Only the main thread may call it.

        Args:
            call: The call of the user, for errors.
            said: The message of this process, which JSON can hold.

        Raises:
            DeadlineExceededError: A process did not answer in time.
            UnavailableError: A process has ended.
        """
        HERE.enter(call, in_wait=True)
        try:
            return self._gather(_MAIN, call, said, bool)
        finally:
            HERE.leave()

    def gather_in_background(self, channel: str, call: str, said: Any) -> list[Any]:
        """Return the messages of all processes, for a thread that has its own channel.

        Raises:
            DeadlineExceededError: A process did not answer in time.
            UnavailableError: A process has ended, or an error in the main thread reports this.
        """
        try:
            return self._gather(channel, call, said, lambda: HERE.blames is not None)
        except ContextError:
            # Only the error of a collective shows that a process of another machine has ended.
            processes = HERE.blames or ()
            names = " and ".join(f"process {i}" for i in processes) or "another process"
            raise UnavailableError(
                f"{call}: {names} did not come, and this process has stopped to wait for the "
                "others.\n\nA checkpoint is complete when all processes have written it.\n\n"
                "Start the job again.",
                processes,
            ) from None

    def _gather(
        self, channel: str, call: str, said: Any, is_stopped: Callable[[], bool]
    ) -> list[Any]:
        text = json.dumps(said)
        texts = exchange_over(self._agreement, call, channel, text, self._seconds, call, is_stopped)
        return [json.loads(text) for text in texts]


def find_group(seconds: float | None) -> Group | None:
    """Return the group of processes of the job; None if this process works alone."""
    agreement = get_agreement()
    if agreement is None or agreement.process.count == 1:
        return None
    return Group(agreement, seconds)
