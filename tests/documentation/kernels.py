"""Kernels of notebooks, and the processes that they start."""

import contextlib
import os
import pathlib
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

from jupyter_client.manager import start_new_kernel

_NAME = "TEST_OF_NOTEBOOKS"


@contextlib.contextmanager
def marked_environment(env: dict[str, str]) -> Iterator[tuple[dict[str, str], str]]:
    """Give an environment by which all processes of a run are found, and the name of the run.

    What is left at the end is killed, so that a test that fails leaves nothing behind.
    """
    run = uuid.uuid4().hex
    try:
        yield {**env, _NAME: run}, run
    finally:
        for pid in find_marked(run):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def find_marked(run: str) -> list[int]:
    """Return the processes that have the mark of a run, whoever their parents are now."""
    wanted = f"{_NAME}={run}".encode()
    found: list[int] = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            # Empty for a process that has ended, and whose parent has not read its exit code.
            marked = wanted in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if marked:
            found.append(int(folder.name))
    return found


def wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    """Wait for a condition, and raise if it does not come."""
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"not so after {seconds} s")
        time.sleep(0.1)


def start_and_kill(
    before: Sequence[str],
    last: str,
    env: dict[str, str],
    folder: pathlib.Path,
    run: str,
    processes: int,
) -> list[int]:
    """Run cells, and kill the kernel when its last cell has started its processes.

    Returns:
        The processes that were there then, with the kernel.
    """
    manager, client = start_new_kernel(env=env, cwd=str(folder))
    try:
        for source in before:
            reply = client.execute_interactive(source, timeout=120, output_hook=lambda _: None)
            assert reply["content"]["status"] == "ok", reply["content"]
        client.execute(last)
        wait_until(lambda: len(find_marked(run)) >= processes, 120)
        return find_marked(run)
    finally:
        client.stop_channels()
        # With SIGKILL, so that the kernel cannot end what it has started.
        manager.shutdown_kernel(now=True)
