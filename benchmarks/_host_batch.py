"""The batch of the input rows, on the host: the same in every arm, with JAX and without."""

import zlib
from collections.abc import Iterable

import numpy as np

HostBatch = tuple[np.ndarray, np.ndarray]


def mlp_batch(*, aligned: bool = False) -> HostBatch:
    """256 images of 784 float32 and their labels: 785 KiB.

    Args:
        aligned: Whether the arrays start at a multiple of 64 bytes. JAX takes such memory over on
            CPU instead of copying it. NumPy's own large arrays start 16 bytes after one.
    """
    images = np.arange(256 * 784, dtype="float32").reshape(256, 784)
    labels = np.arange(256, dtype="int32") % 10
    offset = 0 if aligned else 16
    return _placed(images, offset), _placed(labels, offset)


def _placed(array: np.ndarray, offset: int) -> np.ndarray:
    raw = np.empty(array.nbytes + 64 + offset, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    placed: np.ndarray = np.ndarray(array.shape, array.dtype, raw, start)
    placed[...] = array
    return placed


def checksum(pieces: Iterable[np.ndarray]) -> str:
    """A checksum of the bytes of all pieces, one after the other."""
    found = 0
    for piece in pieces:
        found = zlib.crc32(piece.tobytes(), found)
    return f"{found:08x}"
