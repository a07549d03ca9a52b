"""Counts the bytes that one instruction reads from and writes to a device's main memory."""

import math
import re

from jaxdist.hlo import _text
from jaxdist.hlo._known import find_target
from jaxdist.hlo._text import Instruction, Module, find_shape, parse_dims

# The memory space in a layout. Space 0 is HBM, which the text leaves out.
_SPACE = re.compile(r"S\((\d+)\)")
# On GPUs these spaces are buffers of NCCL and NVSHMEM in HBM. On TPUs space 1 is VMEM. Layouts of
# arrays have tiles, such as `T(8,128)`, on TPUs but not on GPUs.
_SPACES_OF_NCCL = frozenset({"1", "7"})
_ROOM = re.compile(r"[su]8\[\d+\]")
_ARRAY = re.compile(r"[a-z]+\d*[a-z0-9]*\[[\d,<=]*\](?:\{[^{}]*\})?")


def count_traffic(module: Module, within: dict[str, Instruction], i: Instruction) -> int:
    """Return the bytes that an instruction reads from and writes to main memory."""
    if i.opcode in ("dynamic-slice", "slice", "gather"):
        # These read as many bytes as they write, not the whole operand.
        is_there = bool(_count_bytes(find_shape(within, i.operands[0])))
        return _count_bytes(i.shape) + (_text.num_bytes(i.shape) if is_there else 0)
    if i.opcode == "dynamic-update-slice":
        # XLA updates the array in place: it reads the update and writes it.
        return 2 * _count_bytes(find_shape(within, i.operands[1]))
    if i.opcode == "scatter":
        # Also in place: it reads the indices, the updates and the old rows, and writes the rows.
        count = _count_scattered(i)
        shapes = [find_shape(within, o) for o in i.operands[count:]]
        return _count_bytes(shapes[0]) + 3 * sum(map(_count_bytes, shapes[1:]))
    if i.opcode == "fusion":
        return _count_fusion(module, within, i)
    # An operand that is used twice is read once.
    read = sum(_count_bytes(find_shape(within, o)) for o in dict.fromkeys(i.operands))
    if i.opcode in ("copy-start", "async-start", "send", "recv"):
        # The shape is (result, operand, numbers that the runtime waits on).
        return read + _count_bytes(_text.elements(i.shape)[0])
    shapes = _text.elements(i.shape)
    return read + sum(map(_count_bytes, shapes)) - _count_bytes(_find_room(i))


def find_fused(i: Instruction) -> str:
    """Return the name of the computation of a fusion."""
    return next((name for how, name in i.called if how == "calls"), "")


def _count_fusion(module: Module, within: dict[str, Instruction], i: Instruction) -> int:
    """Return the bytes that a fusion reads and writes."""
    inside = module.computations.get(find_fused(i), {})
    total = _count_written(inside, i)
    parameters = [j for j in inside.values() if j.opcode == "parameter"]
    numbered = {int(p.operands[0]): p.name for p in parameters if p.operands}
    for number, operand in enumerate(i.operands):
        whole = _count_bytes(find_shape(within, operand))
        if whole:
            # The operand may be in fast memory, which counts 0 as `whole`.
            total += min(whole, _count_read(module, inside, numbered.get(number, "")))
    return total


def _count_written(inside: dict[str, Instruction], i: Instruction) -> int:
    """Return the bytes of the results; for a result that is updated in place, of the update."""
    shapes = _text.elements(i.shape)
    for j in inside.values():
        # A fusion that slices the operands of a library call also returns the call's workspace.
        if (room := _find_room(j)) in shapes:
            shapes.remove(room)
    total = sum(map(_count_bytes, shapes))
    for j in inside.values():
        if j.opcode == "dynamic-update-slice" and _count_bytes(j.shape) <= total:
            update = _text.num_bytes(find_shape(inside, j.operands[1]))
            total -= max(0, _count_bytes(j.shape) - update)
        elif j.opcode == "scatter" and _count_bytes(j.shape) <= total:
            count = _count_scattered(j)
            if not all(_is_parameter(inside, o) for o in j.operands[:count]):
                continue  # the array that it scatters into is computed here, and written whole
            rows = sum(_text.num_bytes(find_shape(inside, o)) for o in j.operands[count + 1 :])
            # The old rows are read, and the new ones written.
            total -= max(0, _count_bytes(j.shape) - 2 * rows)
    return max(total, 0)


def _count_scattered(i: Instruction) -> int:
    """Return the number of arrays that a scatter updates; it has as many updates, and indices."""
    return (len(i.operands) - 1) // 2


def _is_parameter(inside: dict[str, Instruction], name: str) -> bool:
    """Whether a value inside a fusion is one of its operands, perhaps under another shape."""
    while name in inside and inside[name].opcode == "bitcast":
        name = inside[name].operands[0]
    return name in inside and inside[name].opcode == "parameter"


def _count_read(module: Module, inside: dict[str, Instruction], name: str) -> int:
    """Return the bytes of a parameter that are read: all, unless it is only sliced."""
    whole = _text.num_bytes(inside[name].shape) if name in inside else 0
    total = 0
    for user in inside.values():
        if name not in user.operands:
            continue
        if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
            all_elements = max(1, math.prod(parse_dims(inside[name].shape)))
            total += math.prod(parse_dims(user.shape)) * whole // all_elements
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
            continue  # in place
        elif user.opcode == "scatter" and name in user.operands[: _count_scattered(user)]:
            continue  # in place as well
        elif user.opcode == "bitcast":
            # A bitcast is the same memory under another shape.
            total += _count_read(module, inside, user.name)
        elif user.opcode == "fusion":
            deeper = module.computations.get(find_fused(user), {})
            places = [k for k, o in enumerate(user.operands) if o == name]
            names = [
                p.name
                for p in deeper.values()
                if p.opcode == "parameter" and p.operands and int(p.operands[0]) in places
            ]
            total += sum(_count_read(module, deeper, n) for n in names)
        else:
            return whole
    return min(total, whole)


def _find_room(i: Instruction) -> str:
    """Return the shape of a library's workspace, its last result, an array of bytes; or ""."""
    shapes = _text.elements(i.shape)
    is_library = i.opcode == "custom-call" and find_target(i).startswith("__cu")
    return shapes[-1] if is_library and len(shapes) > 1 and _ROOM.match(shapes[-1]) else ""


def _count_bytes(shape: str) -> int:
    """Return the bytes of the arrays of a shape that are in main memory."""
    return sum(_text.num_bytes(array) for array in _ARRAY.findall(shape) if _is_in_main(array))


def _is_in_main(array: str) -> bool:
    space = _SPACE.search(array)
    if space is None or space[1] == "0":
        return True
    return space[1] in _SPACES_OF_NCCL and "T(" not in array
