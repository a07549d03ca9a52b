"""Which shapes of stacks were placed in chunks, where their layout does not show it."""

import weakref

from jax.sharding import Mesh

# Note [Chunks without stages]
# Layers in chunks, `[chunks, layers / chunks, ...]`, look like a stack of fewer layers with one
# more dim. On stages their layout tells them apart. Without the axis, and op by op, they are whole,
# and a layer such as `x @ w` may even compute with a stack instead of one matrix: other numbers,
# and no error. So the shapes that were placed in chunks are kept for each mesh.
_CHUNKS: "weakref.WeakKeyDictionary[Mesh, dict[tuple[int, ...], int]]" = weakref.WeakKeyDictionary()


def note_chunks(mesh: Mesh, shape: tuple[int, ...], chunks: int) -> None:
    """Note that an array of this shape was placed on a mesh as layers in chunks."""
    _CHUNKS.setdefault(mesh, {})[shape] = chunks


def find_chunks(mesh: Mesh, shape: tuple[int, ...]) -> int | None:
    """Return in how many chunks an array of this shape was placed last; None if never."""
    return _CHUNKS.get(mesh, {}).get(shape)
