"""`LocalStorage`: checkpoints on a file system, written by Orbax and published by a rename."""

import json
import math
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxdist._checkpoints.as_bytes import view_stored
from jaxdist._checkpoints.files import read_dict, replace_file
from jaxdist._checkpoints.folder_lock import JobLock
from jaxdist._checkpoints.orbax import list_stored_names, merge_arrays, start_arrays
from jaxdist._checkpoints.records import Shards
from jaxdist._checkpoints.storage import (
    DAMAGED,
    INDEX,
    LEAVES,
    METADATA,
    NOTES,
    STATE,
    Storage,
)

# Note [Complete or absent]
# A checkpoint is written into a folder with a temporary name, and the folder is renamed when all
# files are written. So a directory that is named by its step is complete, even if the process was
# killed. Old checkpoints are deleted after the rename, oldest first, and each is renamed before
# its files are deleted. So a reader finds all files of a checkpoint, or none; see Note [A
# checkpoint that is deleted while it is read].
# A checkpoint contains the arrays, the notes, and a checksum of each shard, so these are complete
# or absent together. The manifest (size and checksum of each file) is written after the rename, and
# a killed process may not have written it. Then the checksums of the shards still detect damage,
# but cannot name the damaged file.

# The name that Orbax gives such folders.
_TEMPORARY = "orbax-checkpoint-tmp"
_MANIFESTS = "manifests"  # the folder of the manifests
_CONTENT = json.dumps({"item_handlers": {}, "metrics": {}, "performance_metrics": {}})


class LocalStorage(Storage):
    """See `Storage` and Note [Complete or absent]."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.lock = JobLock(directory)

    @property
    def directory(self) -> Path:
        return self._directory

    def make(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.list_steps()

    def list_steps(self) -> tuple[int, ...]:
        entries = self.directory.iterdir() if self.directory.is_dir() else ()
        steps = sorted(int(p.name) for p in entries if p.name.isdigit() and p.is_dir())
        copied = self._read_copied()
        if copied is None:
            return tuple(steps)
        # The folder of a step may hold what was never completed in the bucket.
        own = {s for s in steps if (self.directory / str(s) / METADATA).exists()}
        return tuple(s for s in steps if s in own or str(s) in copied)

    def find_folder(self, step: int) -> Path:
        return self.directory / (self._read_copied() or {}).get(str(step), str(step))

    def _renew_copied(self) -> None:
        """Name the checkpoints of now in the list that was copied from a bucket, if there is one.

        The directory may be copied to a bucket again, where only this list counts.
        """
        copied = self._read_copied()
        if copied is not None:
            complete = {str(s): copied.get(str(s), str(s)) for s in self.list_steps()}
            content = json.dumps({"complete": complete, "damaged": {}}).encode()
            replace_file(self.directory / INDEX, content)

    def _read_copied(self) -> dict[str, str] | None:
        """Return the folders of checkpoints that were copied from a bucket; None if none were."""
        found = (read_dict(self.directory / INDEX) or {}).get("complete")
        return found if isinstance(found, dict) else None

    def find_damage(self, step: int, *, read_contents: bool = True) -> list[str]:
        # Without a manifest the list is empty: see Note [Complete or absent].
        files = read_dict(self._get_manifest(step)) or {}
        root = self.directory / str(step)
        found = [
            _describe_problem(root / name, measured, read_contents)
            for name, measured in files.items()
        ]
        return [problem for problem in found if problem]

    def prepare(self, step: int, mark: str) -> str:
        for left in self.directory.glob(f"*.{_TEMPORARY}*"):
            shutil.rmtree(left)
        name = f"{step}.{_TEMPORARY}-{mark}"
        # In Orbax, all processes wait for process 0 to make the last one, even if it has ended.
        for part in (STATE, NOTES, LEAVES, f"{STATE}/array_metadatas"):
            (self.directory / name / part).mkdir(parents=True, exist_ok=True)
        return name

    def start_arrays(
        self, folder: Any, leaves: Mapping[str, Any], shards: Shards, process: int, writer: int
    ) -> Callable[[], None]:
        stored = {name: view_stored(leaf) for name, leaf in leaves.items()}
        return start_arrays(folder / STATE, stored, writer)

    def publish(self, name: str, step: int, keep: int, writer: int) -> None:
        folder = self.directory / name
        merge_arrays(folder / STATE, writer)
        _check_names(folder)
        # Orbax logs a warning if a folder lacks this file.
        (folder / METADATA).write_text(_CONTENT)
        # The manifest of an earlier checkpoint of this step.
        self._get_manifest(step).unlink(missing_ok=True)
        folder.rename(self.directory / str(step))
        for old in self.list_steps()[:-keep]:
            self.delete(old)
        self._write_manifest(step)
        self._renew_copied()

    def delete(self, step: int) -> None:
        # Rename it first, so that a partly deleted checkpoint does not count.
        left = self.directory / f"{step}.{_TEMPORARY}-deleted"
        if left.exists():
            # A process was killed while deleting an earlier checkpoint of this step.
            shutil.rmtree(left)
        (self.directory / str(step)).rename(left)
        shutil.rmtree(left)
        self._renew_copied()

    def set_aside(self, step: int) -> None:
        target = self.get_damaged(step)
        target.parent.mkdir(exist_ok=True)
        if target.exists():
            shutil.rmtree(target)
        (self.directory / str(step)).rename(target)
        self._renew_copied()

    def get_damaged(self, step: int) -> Path:
        return self.directory / DAMAGED / str(step)

    def _get_manifest(self, step: int) -> Path:
        return self.directory / _MANIFESTS / f"{step}.json"

    def _write_manifest(self, step: int) -> None:
        """Write size and checksum of each file; delete the manifests of missing checkpoints."""
        path, root = self._get_manifest(step), self.directory / str(step)
        path.parent.mkdir(exist_ok=True)
        files = {
            str(p.relative_to(root)): _measure(p) for p in sorted(root.rglob("*")) if p.is_file()
        }
        replace_file(path, json.dumps(files, indent=1).encode())
        kept = {self._get_manifest(kept) for kept in self.list_steps()}
        for file in set(path.parent.glob("*.json")) - kept:
            # Another process of the job may delete it at the same time.
            file.unlink(missing_ok=True)


def _check_names(folder: Path) -> None:
    """Check that each leaf in the records was written, before the checkpoint counts."""
    recorded = json.loads(next((folder / LEAVES).glob("*.json")).read_bytes())["leaves"]
    wanted = {n for n, record in recorded.items() if math.prod(record["shape"])}
    missing = sorted(wanted - list_stored_names(folder / STATE))
    if missing:
        raise OSError(f"Orbax has not written {len(missing)} leaves, such as {missing[0]}")


def _describe_problem(file: Path, measured: list[int], read_contents: bool) -> str | None:
    size, checksum = measured
    try:
        there = file.stat().st_size
        found = _measure(file)[1] if read_contents and there == size else checksum
    except (FileNotFoundError, NotADirectoryError):
        # The file may have been deleted between `stat` and `read_bytes`.
        return f"{file} is missing."
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}."
    if there != size:
        return f"{file} has {there} bytes, {size} were written."
    if found != checksum:
        return f"{file} has the right size, but not the bytes that were written."
    return None


def _measure(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    return len(content), zlib.crc32(content)
