"""`Limit`: the time limit of one wait for other processes."""

import threading
import time

from jaxdist._processes.watching.current import get_doctor
from jaxdist._processes.watching.diagnosis import Diagnosis, diagnose
from jaxdist._processes.watching.sockets import cut_collectives
from jaxdist._processes.watching.whereabouts import HERE

# The caller normally ends its own wait; the doctor does so if the caller is inside C++ code.
_GRACE_SECONDS = 0.05
_MOST_SECONDS_TO_DIAGNOSE = 10.0


class Limit:
    """The time limit of one wait, from now on.

    Args:
        seconds: How long the wait may take.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end = time.monotonic() + seconds
        self.found = Diagnosis((), "This process has joined no other processes.")
        self._lock = threading.Lock()
        self._is_expiring = False
        self._is_done = False
        self._has_expired = threading.Event()
        doctor = get_doctor()
        if doctor is not None:
            doctor.watch_limit(self)

    @property
    def ends_at(self) -> float:
        """When the doctor ends the wait, by `time.monotonic`."""
        return self.end + _GRACE_SECONDS

    def expire(self) -> None:
        """Find which process is behind, and end the collectives of this process."""
        with self._lock:
            if self._is_expiring or self._is_done:
                return
            self._is_expiring = True
        doctor = get_doctor()
        try:
            if doctor is not None:
                table = doctor.observer.look_until_fresh()
                self.found = diagnose(table, doctor.process.index)
                HERE.blame(self.found.behind)
                # Before the connections close, so that the others know which process to name.
                doctor.publish()
        except Exception as error:
            self.found = Diagnosis((), f"The coordination service did not answer: {error}")
        finally:
            cut_collectives()
            self._has_expired.set()

    def finish(self) -> bool:
        """Cancel the limit, and return whether its time had already passed."""
        doctor = get_doctor()
        if doctor is not None:
            doctor.forget_limit(self)
        with self._lock:
            self._is_done = True
            is_expiring = self._is_expiring
        if is_expiring:
            self._has_expired.wait(_MOST_SECONDS_TO_DIAGNOSE)
        return is_expiring
