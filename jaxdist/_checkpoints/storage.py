"""`Storage`: the checkpoints of one directory, on a file system or in a bucket."""

import abc
from collections.abc import Callable, Mapping
from typing import Any

from jaxdist._buckets import Place
from jaxdist._checkpoints.errors import DAMAGED as DAMAGED
from jaxdist._checkpoints.records import Shards

STATE, NOTES, LEAVES = "state", "notes", "leaves"  # the parts of one checkpoint
METADATA = "_CHECKPOINT_METADATA"  # Orbax's file in each checkpoint that it has written
INDEX = "checkpoints.json"  # in a bucket: the folder of each checkpoint


class Storage(abc.ABC):
    """What differs between directories of a file system and of a bucket.

    Args:
        directory: The directory of the checkpoints.

    Attributes:
        lock: A context manager that keeps other jobs out.
    """

    lock: Any

    @property
    @abc.abstractmethod
    def directory(self) -> Place:
        """The directory of the checkpoints."""

    @abc.abstractmethod
    def make(self) -> None:
        """Make the directory, and check that it can be read.

        Raises:
            OSError: It cannot be made or read.
        """

    @abc.abstractmethod
    def list_steps(self) -> tuple[int, ...]:
        """Return the steps of the complete checkpoints, oldest first."""

    @abc.abstractmethod
    def find_folder(self, step: int) -> Place:
        """Return the folder that contains the parts of a checkpoint."""

    @abc.abstractmethod
    def find_damage(self, step: int, *, read_contents: bool = True) -> list[str]:
        """Return a sentence for each file of a checkpoint that differs from what was written.

        Args:
            step: The step of the checkpoint.
            read_contents: Whether to read the files. If not, only their sizes are compared.
        """

    @abc.abstractmethod
    def prepare(self, step: int, mark: str) -> str:
        """Delete partly written checkpoints, and make the folder of a new one.

        Args:
            step: The step of the checkpoint.
            mark: A part of the folder's name.

        Returns:
            The name of the folder in the directory.
        """

    @abc.abstractmethod
    def start_arrays(
        self, folder: Place, leaves: Mapping[str, Any], shards: Shards, process: int, writer: int
    ) -> Callable[[], None]:
        """Start to write the shards of this process, and return a function that waits for that.

        Args:
            folder: The folder of the checkpoint.
            leaves: The arrays that have elements.
            shards: Their shards in this process, on the host.
            process: The number of this process, among those that write.
            writer: JAX's index of the process that writes what all have in common.
        """

    @abc.abstractmethod
    def publish(self, name: str, step: int, keep: int, writer: int) -> None:
        """Make a folder that all processes have written a checkpoint; delete the oldest ones."""

    @abc.abstractmethod
    def delete(self, step: int) -> None:
        """Delete a complete checkpoint."""

    @abc.abstractmethod
    def set_aside(self, step: int) -> None:
        """Move a checkpoint to the damaged ones."""

    @abc.abstractmethod
    def get_damaged(self, step: int) -> Place:
        """Return where `set_aside` moves a checkpoint."""
