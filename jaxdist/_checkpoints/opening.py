"""Opens the checkpoints of a directory, on a file system or in a bucket."""

from typing import Any

from jaxdist._buckets import BucketPath, Place
from jaxdist._checkpoints.bucket_storage import BucketStorage
from jaxdist._checkpoints.local_storage import LocalStorage
from jaxdist._checkpoints.storage import Storage


def open_storage(directory: Place) -> Storage:
    """Return the checkpoints of a directory."""
    if isinstance(directory, BucketPath):
        return BucketStorage(directory)
    return LocalStorage(directory)


def lock_folder(directory: Place) -> Any:
    """Return a context manager that keeps other jobs out of a directory."""
    return open_storage(directory).lock


def list_steps(directory: Place) -> tuple[int, ...]:
    """Return the steps of the complete checkpoints, oldest first."""
    return open_storage(directory).list_steps()


def find_folder(directory: Place, step: int) -> Place:
    """Return the folder that contains the parts of a checkpoint."""
    return open_storage(directory).find_folder(step)


def delete_step(directory: Place, step: int) -> None:
    """Delete a complete checkpoint, in a job that has the lock of the directory.

    Raises:
        CheckpointError: Another job uses the directory.
        BucketError: The bucket cannot be changed.
    """
    storage = open_storage(directory)
    with storage.lock:
        storage.delete(step)


def find_damage(directory: Place, step: int, *, read_contents: bool = True) -> list[str]:
    """Return a sentence for each file of a checkpoint that differs from what was written."""
    return open_storage(directory).find_damage(step, read_contents=read_contents)
