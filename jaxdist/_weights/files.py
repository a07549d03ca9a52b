"""Files of safetensors: where each array is, and how a file is written array by array.

The package `safetensors` reads and writes files of the local disk, and has no bfloat16 and float8
for NumPy. Weights are also in buckets, and a process reads only its slices of them. So the format
is read here: the length of a header, the header in JSON, and the arrays one after the other.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jaxdist._buckets import BucketPath, Place
from jaxdist._called import refuse
from jaxdist._checkpoints import replace_file
from jaxdist.errors import BucketError, CheckpointError

ENDING = ".safetensors"
WHOLE = f"model{ENDING}"
INDEX = f"{WHOLE}.index.json"

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "C64": np.dtype(np.complex64),
}
CODES = {dtype: code for code, dtype in _DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # bytes, as the package has it


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where an array is.

    Attributes:
        file: The file.
        start: The first byte, counted from the start of the file.
        shape: The shape; elements are in C order, without gaps.
        dtype: The dtype, little-endian.
    """

    file: Place
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """The number of its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Opened:
    """The arrays of a file or of a folder of files, by name, and the metadata of the first file."""

    arrays: dict[str, Stored]
    metadata: dict[str, str]


def open_weights(name: str, place: Place) -> Opened:
    """Return where the arrays of a file or folder are. Only headers are read.

    Args:
        name: The argument of the user that has the place.
        place: A file, or a folder with `model.safetensors.index.json` or `model.safetensors`.

    Raises:
        CheckpointError: There is no such file, or one is damaged.
        BucketError: The bucket cannot be read.
    """
    is_file = place.exists() if isinstance(place, BucketPath) else place.is_file()
    if str(place).endswith(ENDING) and is_file:
        return Opened(*_read_header(place))
    if (place / INDEX).exists():
        return _read_index(place / INDEX, place)
    if (place / WHOLE).exists():
        return Opened(*_read_header(place / WHOLE))
    raise refuse(
        f"{name}={str(place)!r}, which has no weights.",
        f"Weights are a file *{ENDING}, or a folder with {INDEX} or {WHOLE}. While a folder is "
        "written it has neither.",
        "Pass what training.export_weights or Hugging Face has written.",
        kind=CheckpointError,
    )


def _read_index(file: Place, folder: Place) -> Opened:
    try:
        names = dict(json.loads(_read_file(file))["weight_map"])
    except (ValueError, LookupError, TypeError) as error:
        what = f"it is not an index: {type(error).__name__}: {error}"
        raise _make_damage_error(file, what) from None
    # A file of another folder is never meant.
    wrong = [x for x in names.values() if not isinstance(x, str) or "/" in x or "\\" in x]
    if wrong:
        raise _make_damage_error(file, f"it names {wrong[0]!r}, which is not in its folder")
    arrays: dict[str, Stored] = {}
    metadata: dict[str, str] = {}
    for number, part in enumerate(sorted(set(names.values()))):
        found, more = _read_header(folder / part)
        own = [name for name, where in names.items() if where == part and name in found]
        arrays |= {name: found[name] for name in own}
        metadata = metadata if number else more
    missing = sorted(names.keys() - arrays.keys())
    if missing:
        what = f"{len(missing)} array(s) are not in the files that it names: {missing[:5]}"
        raise _make_damage_error(file, what)
    return Opened(arrays, metadata)


def _read_header(file: Place) -> tuple[dict[str, Stored], dict[str, str]]:
    with read_ranges(file, [(0, 8)]) as [head]:
        length = int.from_bytes(head.tobytes(), "little")
    if length > _LONGEST_HEADER:
        raise _make_damage_error(file, f"its header would have {length:,} bytes")
    with read_ranges(file, [(8, length)]) as [text]:
        try:
            header = dict(json.loads(text.tobytes()))
            metadata = dict(header.pop("__metadata__", {}))
        except (ValueError, TypeError) as error:
            raise _make_damage_error(file, f"its header is not JSON: {error}") from None
    arrays = {name: _read_entry(file, 8 + length, name, x) for name, x in header.items()}
    end = 8 + length
    # Arrays without elements come before the one that begins at the same byte.
    order = sorted(arrays, key=lambda name: (arrays[name].start, arrays[name].nbytes, name))
    for name in order:
        where = arrays[name]
        if where.start != end:
            raise _make_damage_error(file, f"{name!r} starts at byte {where.start:,}, not {end:,}")
        end += where.nbytes
    if isinstance(file, BucketPath):
        # A cut upload; its last byte is read without the others.
        with read_ranges(file, [(end - 1, 1)]):
            pass
    elif (size := file.stat().st_size) != end:
        raise _make_damage_error(file, f"it has {size:,} bytes, not {end:,}")
    return arrays, metadata


def _read_entry(file: Place, base: int, name: str, entry: Any) -> Stored:
    try:
        code, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        lengths = tuple(n for n in shape if isinstance(n, int) and n >= 0)
        is_wrong = (
            not isinstance(code, str)
            or len(lengths) != len(shape)
            or not (isinstance(start, int) and isinstance(stop, int))
            or start < 0
        )
    except (TypeError, LookupError, ValueError):
        is_wrong, code, lengths, start, stop = True, "", (), 0, 0
    if is_wrong:
        raise _make_damage_error(file, f"the entry of {name!r} is {entry!r:.100}")
    if code not in _DTYPES:
        raise CheckpointError(
            f"{file} has {name!r} with the dtype {code!r}.\n\n"
            f"The dtypes of JAX that safetensors has are {', '.join(_DTYPES)}.\n\n"
            "Convert the file with the library that has written it."
        )
    if stop - start != math.prod(lengths) * _DTYPES[code].itemsize:
        what = f"{name!r}, {code}{list(lengths)}, has {stop - start:,} bytes"
        raise _make_damage_error(file, what)
    return Stored(file, base + start, lengths, _DTYPES[code])


def _make_damage_error(file: Place, what: str) -> CheckpointError:
    return CheckpointError(
        f"{file} cannot be read as weights: {what}.\n\n"
        "A file of safetensors has a header in JSON and then its arrays without gaps.\n\n"
        "Copy or export it again."
    )


def _read_file(file: Place) -> bytes:
    try:
        return file.read_bytes()
    except BucketError:
        raise
    except OSError as error:
        raise _make_missing_error(file, error) from None


def _make_missing_error(file: Place, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{file} cannot be read: {type(error).__name__}: {error}.\n\n"
        f"Weights are a file *{ENDING}, or a folder with {INDEX} or {WHOLE}.\n\n"
        "Correct the path, or change its permissions."
    )


@contextlib.contextmanager
def read_ranges(file: Place, ranges: Sequence[tuple[int, int]]) -> Iterator[Iterator[np.ndarray]]:
    """Read ranges of bytes, each `(start, count)`, in this order and a few at a time.

    Raises:
        CheckpointError: The file cannot be read, or is shorter.
        BucketError: The bucket cannot be read.
    """
    if isinstance(file, BucketPath):
        yield (
            _check_length(file, start, count, data)
            for (start, count), data in zip(ranges, file.read_ranges(ranges), strict=True)
        )
        return
    try:
        opened = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise _make_missing_error(file, error) from None
    try:
        yield (_read_range(file, opened, start, count) for start, count in ranges)
    finally:
        os.close(opened)


def _read_range(file: Place, opened: int, start: int, count: int) -> np.ndarray:
    data = np.empty(count, np.uint8)
    done = 0
    # Linux reads at most 2 GiB at once.
    while done < count:
        try:
            got = os.preadv(opened, [data.data[done : done + (1 << 30)]], start + done)
        except OSError as error:
            raise _make_missing_error(file, error) from None
        if got == 0:
            break
        done += got
    return _check_length(file, start, count, data[:done])


def _check_length(file: Place, start: int, count: int, data: Any) -> np.ndarray:
    if len(data) != count:
        what = f"it ends before byte {start + count:,}"
        raise _make_damage_error(file, what)
    return data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)


@dataclasses.dataclass(frozen=True)
class ToWrite:
    """An array to write: its shape, its dtype, and a function that returns it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    def with_read(self, read: Callable[[], np.ndarray]) -> "ToWrite":
        """Return the same array, read by another function."""
        return dataclasses.replace(self, read=read)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def order_weights(arrays: Mapping[str, ToWrite]) -> list[str]:
    """Return the names in the order of the file."""
    # Larger elements first, so that each array is aligned.
    return sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))


def write_weights(
    place: Place, arrays: Mapping[str, ToWrite], metadata: Mapping[str, str], most_bytes: int
) -> None:
    """Write a file or a folder of files; one array is in memory at a time.

    A file is replaced as a whole. A folder has neither an index nor a whole file while it is
    written, so that a reader finds the old arrays, the new ones, or none.

    Args:
        place: A file, whose name ends with `.safetensors`, or a folder.
        arrays: The arrays by name.
        metadata: Texts for the header.
        most_bytes: About how many bytes a file of a folder may have.
    """
    names = order_weights(arrays)
    if str(place).endswith(ENDING):
        if not isinstance(place, BucketPath):
            place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, _list_content(names, arrays, metadata))
        return
    groups = _divide(names, arrays, most_bytes)
    if not isinstance(place, BucketPath):
        place.mkdir(parents=True, exist_ok=True)
    files = [f"model-{k + 1:05}-of-{len(groups):05}{ENDING}" for k in range(len(groups))]
    files = files if groups[1:] else [WHOLE]
    (place / INDEX).unlink(missing_ok=True)
    (place / WHOLE).unlink(missing_ok=True)
    for file, group in zip(files, groups, strict=True):
        write_weights(place / file, {name: arrays[name] for name in group}, metadata, most_bytes)
    for name in _list_files(place):
        if _PART.fullmatch(name) and name not in files:
            (place / name).unlink(missing_ok=True)
    if not groups[1:]:
        return
    total = sum(array.nbytes for array in arrays.values())
    where = {name: file for file, group in zip(files, groups, strict=True) for name in group}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    replace_file(place / INDEX, json.dumps(index, indent=2).encode())


_PART = re.compile(rf"model-\d{{5}}-of-\d{{5}}{re.escape(ENDING)}")


def _list_files(folder: Place) -> list[str]:
    return folder.list_names() if isinstance(folder, BucketPath) else os.listdir(folder)


def _divide(
    names: Sequence[str], arrays: Mapping[str, ToWrite], most_bytes: int
) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    filled = 0
    for name in names:
        if groups[-1] and filled + arrays[name].nbytes > most_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += arrays[name].nbytes
    return groups


def _list_content(
    names: Iterable[str], arrays: Mapping[str, ToWrite], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name in names:
        array = arrays[name]
        header[name] = {
            "dtype": CODES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [start, start + array.nbytes],
        }
        start += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in names:
        values = np.ascontiguousarray(arrays[name].read())
        yield values.reshape(-1).view(np.uint8).data
