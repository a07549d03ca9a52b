"""The reason why a call does not run the program of the call before it."""

import itertools
from collections.abc import Sequence

from jaxdist._program.trace.trace import Signature


def describe_difference(before: Signature, now: Signature, names: Sequence[str]) -> str:
    """Return how two signatures differ, in words."""
    if (before.treedef, before.structure) != (now.treedef, now.structure):
        return "the structure of its arguments"
    if before.slots != now.slots:
        pairs = zip(before.slots, now.slots, strict=False)
        changed = [f"{a!r} -> {b!r}" for a, b in pairs if a != b]
        return f"a Python value that is part of the program: {', '.join(changed[:3])}"
    if before.graph != now.graph:
        return "the structure or a static attribute of an NNX object"
    offset = len(now.inputs) - len(names)
    changed = []
    for i, (a, b) in enumerate(zip(before.inputs, now.inputs, strict=True)):
        if a != b:
            name = names[i - offset] if i >= offset else f"NNX variable {i}"
            changed.append(
                f"{name}: {a.kind.value} {a.dtype}{list(a.shape)} -> "
                f"{b.kind.value} {b.dtype}{list(b.shape)}"
            )
    return ", ".join(itertools.islice(changed, 3)) or "nothing that can be named"
