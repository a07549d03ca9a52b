"""`RayChild`: one process of a job on a node of Ray, seen from the launcher."""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import IO, Any

from jaxdist._launching.child import End, Record, Write


class RayChild:
    """A process that a Ray actor runs, with the methods of `Child`.

    Args:
        index: Its number in the job.
        actor: The `ProcessOnNode` that runs it.
        get: Waits for the result of a method of the actor.
        write: Two functions that take lines: of its standard output, and of its standard error.
    """

    def __init__(
        self, index: int, actor: Any, get: Callable[[Any], Any], write: tuple[Write, Write]
    ) -> None:
        self.index = index
        self.end: End | None = None
        self._actor, self._get, self._write = actor, get, write
        self._was_ended = False
        self._lock = threading.Lock()
        self._news: list[tuple[bytes, bytes]] = []
        self._ended: End | None = None
        # The launcher's selector waits for this pipe.
        reads, self._wake = os.pipe()
        os.set_blocking(reads, False)
        self._pipe: IO[bytes] = os.fdopen(reads, "rb", buffering=0)
        self.streams: dict[IO[bytes], None] = {self._pipe: None}
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def read(self, pipe: IO[bytes]) -> bool:
        """Write new output; return False after the last of it."""
        with contextlib.suppress(BlockingIOError):
            if not os.read(pipe.fileno(), 4096):
                self._write_news()
                return False
        self._write_news()
        return True

    def signal(self, number: int, *, to_group: bool = False) -> None:
        """Send a signal to the process, or to all processes of its group."""
        if self.end is None:
            self._actor.signal.remote(number, to_group=to_group)

    def ask_to_end(self) -> None:
        """Ask the process to end because of another one; it may clean up."""
        self._was_ended = True
        self._actor.ask_to_end.remote()

    def kill(self) -> None:
        """End the process and its group at once."""
        self._was_ended = True
        self._actor.kill.remote()

    def hear(self, end: End) -> None:
        """Write for the process how another one ended."""
        self._actor.hear.remote(end)

    def collect(self) -> End | None:
        """Return how the process ended, once it has, and write the rest of its output."""
        if self.end is None:
            with self._lock:
                ended = self._ended
            if ended is not None:
                self._write_news()
                self._pipe.close()
                self.end = ended
        return self.end

    def abandon(self) -> None:
        """Drop a process that was killed. Its output is not written."""
        self._pipe.close()

    def _write_news(self) -> None:
        with self._lock:
            news = list(self._news)
            self._news.clear()
        for lines in news:
            for write, part in zip(self._write, lines, strict=True):
                if part:
                    write(part)

    def _ask(self) -> None:
        """Ask the actor for news until the process has ended."""
        try:
            ended = self._prepare()
        except Exception as error:
            ended = self._describe_loss(error)
        if ended is not None:
            with self._lock:
                self._ended = ended
        while ended is None:
            try:
                out, err, ended = self._get(self._actor.read.remote())
            except Exception as error:
                # Ray raises errors of many classes, including those of the actor itself.
                out, err, ended = b"", b"", self._describe_loss(error)
            with self._lock:
                self._news.append((out, err))
                self._ended = ended
            # The pipe is closed if the launcher itself fails.
            with contextlib.suppress(OSError):
                os.write(self._wake, b"x")
        os.close(self._wake)

    def _prepare(self) -> End | None:
        """Start the process, if not yet done; return its end if it must not start."""
        return None

    def _describe_loss(self, error: Exception) -> End:
        text = f"Ray has lost the actor that ran this process: {error}"
        record = Record(is_about_others=False, processes=(), text=text)
        return End(self.index, 1, was_ended=self._was_ended, record=record)
