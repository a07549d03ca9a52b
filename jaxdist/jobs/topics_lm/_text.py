"""The data of the language model: the topics of Python's documentation, as windows of bytes."""

import dataclasses
import zlib
from pydoc_data.topics import topics

import numpy as np

# The byte before and after each topic. No topic contains it.
SEPARATOR = b"\0"
VOCABULARY = 256


@dataclasses.dataclass(frozen=True)
class Text:
    """The training bytes and the held-out bytes, with separators around each topic."""

    train: np.ndarray  # [n] uint8
    held_out: np.ndarray  # [m] uint8

    @property
    def checksum(self) -> int:
        """The checksum of the text. Topics differ between versions of Python."""
        return zlib.crc32(self.held_out.tobytes(), zlib.crc32(self.train.tobytes()))


def load_text(test_fraction: float, seed: int) -> Text:
    """Load the topics of `help()`, and hold out topics with about `test_fraction` of all bytes.

    The choice depends only on `seed` and the version of Python. Many topics repeat parts of
    others, so a paragraph of a held-out topic is removed from the training topics.
    """
    texts = {name: topics[name].encode() for name in sorted(topics)}
    # A checksum as the random order: the same on every machine and with every version of NumPy.
    names = sorted(texts, key=lambda name: zlib.crc32(f"{seed}/{name}".encode()))
    room = test_fraction * sum(map(len, texts.values()))
    held_out: list[str] = []
    for name in names:
        if len(texts[name]) <= room:
            held_out.append(name)
            room -= len(texts[name])
    # Hold out at least one topic, even if none is short enough.
    held_out = held_out or [min(names, key=lambda name: len(texts[name]))]
    seen = {p.strip() for name in held_out for p in _split_paragraphs(texts[name])}
    train = [
        b"\n\n".join(p for p in _split_paragraphs(texts[name]) if p.strip() not in seen)
        for name in names
        if name not in held_out
    ]
    return Text(_join(train), _join([texts[name] for name in held_out]))


def _split_paragraphs(text: bytes) -> list[bytes]:
    return text.split(b"\n\n")


def _join(texts: list[bytes]) -> np.ndarray:
    parts = [text for text in texts if text.strip()]
    return np.frombuffer(SEPARATOR.join([b"", *parts, b""]), np.uint8)


def make_training_windows(text: np.ndarray, length: int, stride: int) -> dict[str, np.ndarray]:
    """Return windows `[n, length + 1]` that start `stride` bytes apart; none if text is shorter.

    Example:
        >>> make_training_windows(np.arange(7, dtype=np.uint8), 2, 2)["tokens"].tolist()
        [[0, 1, 2], [2, 3, 4], [4, 5, 6]]
    """
    if len(text) <= length:
        return {"tokens": np.zeros((0, length + 1), np.uint8)}
    windows = np.lib.stride_tricks.sliding_window_view(text, length + 1)[::stride]
    return {"tokens": np.ascontiguousarray(windows)}


def make_held_out_windows(text: np.ndarray, length: int) -> dict[str, np.ndarray]:
    """Return windows in which each byte but the first is predicted once; the last one is padded.

    Example:
        >>> windows = make_held_out_windows(np.arange(1, 7, dtype=np.uint8), 2)
        >>> windows["tokens"].tolist(), windows["length"].tolist()
        ([[1, 2, 3], [3, 4, 5], [5, 6, 0]], [2, 2, 1])
    """
    # Windows overlap by one byte: the last target of a window is the first input of the next.
    count = -(-(len(text) - 1) // length)
    padded = np.zeros(count * length + 1, np.uint8)
    padded[: len(text)] = text
    lengths = np.minimum(length, len(text) - 1 - length * np.arange(count)).astype(np.int32)
    return {**make_training_windows(padded, length, length), "length": lengths}


def compute_baselines(text: Text) -> dict[str, float]:
    """Return the bits per held-out byte of two baselines: byte counts and pair counts.

    The counts are of the training text. The count of a byte starts at 1. The count of a pair
    starts at a share that is proportional to the count of its second byte.

    Example:
        >>> once = np.zeros(1001, np.uint8)
        >>> found = compute_baselines(Text(once, once))
        >>> {name: round(bits, 2) for name, bits in found.items()}
        {'unigram': 0.33, 'bigram': 0.06}
    """
    single = np.bincount(text.train, minlength=VOCABULARY) + 1.0
    alone = single / single.sum()
    codes = text.train[:-1].astype(np.int64) * VOCABULARY + text.train[1:]
    pairs = np.bincount(codes, minlength=VOCABULARY**2).reshape(VOCABULARY, VOCABULARY)
    after = pairs + VOCABULARY * alone
    after = after / after.sum(1, keepdims=True)
    before, targets = text.held_out[:-1], text.held_out[1:]
    return {
        "unigram": float(-np.log2(alone[targets]).mean()),
        "bigram": float(-np.log2(after[before, targets]).mean()),
    }
