"""`BucketStorage`: checkpoints in a bucket, each complete when the list of the folder names it."""

import json
import re
import uuid
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from jaxdist._buckets import BucketPath
from jaxdist._checkpoints.bucket_lock import BucketLock
from jaxdist._checkpoints.records import Shards
from jaxdist._checkpoints.shards import start_shards
from jaxdist._checkpoints.storage import INDEX, METADATA, STATE, Storage
from jaxdist.errors import CheckpointError

# Note [Complete or absent in a bucket]
# A bucket has no rename. Each attempt to write a checkpoint writes into a folder with a name of its
# own (`7/3f29c0a1d2e4`), so a process that was taken for dead writes where nobody reads. An object,
# `checkpoints.json`, has the folder of each complete checkpoint. It is changed under the condition
# that it is as it was read. So one write completes a checkpoint, and one write deletes it, before
# its objects are deleted.
# Steps are not found by listings: a listing may be late, and tensorstore returns an empty one where
# it is not allowed to list a bucket of Google Cloud Storage. Listings only find what is left over.

_FOLDER = re.compile(r"(\d+/[0-9a-f]{12})/")


# The folder that each storage of this process writes, or has written last.
_WRITING: "weakref.WeakKeyDictionary[BucketStorage, str]" = weakref.WeakKeyDictionary()


class BucketStorage(Storage):
    """See `Storage` and Note [Complete or absent in a bucket]."""

    def __init__(self, directory: BucketPath) -> None:
        self._directory = directory
        self.lock = BucketLock(directory)

    @property
    def directory(self) -> BucketPath:
        return self._directory

    def make(self) -> None:
        if self._read()[1] is None:
            self.directory.check_bucket()

    def _read(self) -> tuple[dict[str, dict[str, str]], bytes | None]:
        """Return the folders by step, and the version of the object that has them."""
        found = (self.directory / INDEX).read_version()
        if found is None:
            return self._find_copied(), None
        try:
            index = json.loads(found[0])
            return {kind: dict(index[kind]) for kind in ("complete", "damaged")}, found[1]
        except (ValueError, LookupError, TypeError) as error:
            raise CheckpointError(
                f"{self.directory / INDEX} cannot be read: {error}.\n\n"
                "It names the folder of each checkpoint.\n\n"
                "Copy it back, or choose another directory."
            ) from error

    def _find_copied(self) -> dict[str, dict[str, str]]:
        """Return the checkpoints of a local directory that was copied here."""
        ending = f"/{METADATA}"
        names = self.directory.list_names()
        steps = [n.removesuffix(ending) for n in names if n.endswith(ending)]
        return {"complete": {s: s for s in steps if s.isdigit()}, "damaged": {}}

    def _change(self, change: Callable[[dict[str, dict[str, str]]], None]) -> None:
        while True:
            index, version = self._read()
            change(index)
            content, file = json.dumps(index).encode(), self.directory / INDEX
            done = file.create(content) if version is None else file.replace(content, version)
            if done:
                return

    def list_steps(self) -> tuple[int, ...]:
        return tuple(sorted(map(int, self._read()[0]["complete"])))

    def find_folder(self, step: int) -> BucketPath:
        return self.directory / self._read()[0]["complete"].get(str(step), str(step))

    def find_damage(self, step: int, *, read_contents: bool = True) -> list[str]:
        # The store has checksums of its own, and each chunk has one that is compared when it is
        # read. To compare them here would read everything twice.
        return []

    def prepare(self, step: int, mark: str) -> str:
        names = self.directory.list_names()
        # After the listing: a folder that is completed in between is among those that are kept.
        kept = {folder for folders in self._read()[0].values() for folder in folders.values()}
        # Another object of this process may write into the same directory.
        others = [other for other in _WRITING if other is not self and other.lock.is_held]
        kept |= {_WRITING[other] for other in others}
        for name in names:
            found = _FOLDER.match(name)
            if found and found[1] not in kept:
                (self.directory / name).unlink(missing_ok=True)
        _WRITING[self] = f"{step}/{uuid.uuid4().hex[:12]}"
        return _WRITING[self]

    def start_arrays(
        self, folder: Any, leaves: Mapping[str, Any], shards: Shards, process: int, writer: int
    ) -> Callable[[], None]:
        return start_shards(folder / STATE, shards, process)

    def publish(self, name: str, step: int, keep: int, writer: int) -> None:
        old: list[str] = []

        def change(index: dict[str, dict[str, str]]) -> None:
            self.lock.check()
            steps = index["complete"]
            if str(step) in steps and steps[str(step)] != name:
                raise FileExistsError(f"another job has written checkpoint {step}")
            steps[str(step)] = name
            too_old = sorted(steps, key=int)[:-keep]
            old[:] = [steps.pop(one) for one in too_old]

        self._change(change)
        for folder in old:
            (self.directory / folder).rmtree()

    def delete(self, step: int) -> None:
        folders: list[str] = []

        def change(index: dict[str, dict[str, str]]) -> None:
            self.lock.check()
            folders.append(index["complete"].pop(str(step), str(step)))

        self._change(change)
        (self.directory / folders[-1]).rmtree()

    def set_aside(self, step: int) -> None:
        def change(index: dict[str, dict[str, str]]) -> None:
            index["damaged"][str(step)] = index["complete"].pop(str(step))

        self._change(change)

    def get_damaged(self, step: int) -> BucketPath:
        # Its folder stays where it is.
        return self.directory / self._read()[0]["damaged"].get(str(step), str(step))
