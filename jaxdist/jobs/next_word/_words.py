"""The data: words of Python's documentation, and the rows of the table for their features."""

import re
import zlib
from collections import Counter
from pydoc_data.topics import topics

import numpy as np

# How many words before the next one the model sees, and how many features these give: each word
# with its place, the pairs of neighbours, and all of them together.
CONTEXT = 3
NUM_FEATURES = CONTEXT + (CONTEXT - 1) + 1
_WORD = re.compile(rb"[A-Za-z_]+|[0-9]+|[^\sA-Za-z_0-9]")


def load_examples(
    rows: int, classes: int, test_fraction: float, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], int]:
    """Return the examples to train on, the held-out ones, and the checksum of the text.

    An example is the row numbers of its features `[n, NUM_FEATURES]`, and the class of the next
    word `[n]`. Each of the most frequent words has its own class; 0 means any other word.
    """
    parts = _split_words(test_fraction, seed)
    train, held_out = parts
    # By name, if two words are equally frequent.
    frequent = sorted(Counter(train).items(), key=lambda item: (-item[1], item[0]))
    number = {word: n for n, (word, _) in enumerate(frequent[: classes - 1], 1)}
    made = [_make_examples(words, number, rows) for words in (train, held_out)]
    return made[0], made[1], zlib.crc32(b" ".join(held_out), zlib.crc32(b" ".join(train)))


def _split_words(test_fraction: float, seed: int) -> tuple[list[bytes], list[bytes]]:
    """Return the words to train on, and the held-out ones, of other paragraphs."""
    # Topics repeat paragraphs of other topics.
    every = dict.fromkeys(p.strip() for n in sorted(topics) for p in topics[n].split("\n\n"))
    paragraphs = [p.encode() for p in every if p]
    # A checksum as the random order: the same on every machine and with every version of NumPy.
    paragraphs.sort(key=lambda p: zlib.crc32(b"%d/%s" % (seed, p)))
    count = max(1, round(test_fraction * len(paragraphs)))
    parts = paragraphs[count:], paragraphs[:count]
    train, held_out = (_WORD.findall(b"\n\n".join(part)) for part in parts)
    return train, held_out


def _make_examples(
    words: list[bytes], number: dict[bytes, int], rows: int
) -> dict[str, np.ndarray]:
    features = np.zeros((max(len(words) - CONTEXT, 0), NUM_FEATURES), np.int32)
    for place in range(len(features)):
        features[place] = find_rows(words[place : place + CONTEXT], rows)
    labels = [number.get(word, 0) for word in words[CONTEXT:]]
    return {"features": features, "label": np.asarray(labels, np.int32)}


def find_rows(words: list[bytes], rows: int) -> list[int]:
    """Return the rows of the features of some words, chosen by hashes.

    Example:
        >>> len(find_rows([b"a", b"list", b"of"], 1000))
        6
    """
    alone = [b"%d %s" % (place, word) for place, word in enumerate(words)]
    pairs = [b"%d %s %s" % (n, *words[n : n + 2]) for n in range(len(words) - 1)]
    return [zlib.crc32(feature) % rows for feature in (*alone, *pairs, b"all " + b" ".join(words))]
