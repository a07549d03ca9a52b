"""Counts the operations of a matrix product or convolution: an instruction or a library call."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxdist.hlo import _text
from jaxdist.hlo._known import Call, find_call, find_target, unescape
from jaxdist.hlo._text import Instruction

Shape = tuple[int, ...]

_DIMS = re.compile(r"\[([\d,<=]*)\]")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_GROUPS = re.compile(r"(feature|batch)_group_count=(\d+)")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_RAGGED = re.compile(r"lhs_ragged_dims=\{(\d+)\}")
_SCORES = re.compile(r'"intermediate_tensor_shape":\{"dimensions":(\[[^\]]*\])')
_OF_GEMM = re.compile(r'"lhs_contracting_dimensions":(\[[^\]]*\])')


def count_products(within: dict[str, Instruction], i: Instruction) -> int | None:
    """Return the multiplications and additions of an instruction; None if its text lacks them."""
    if i.opcode in ("dot", "scaled-dot", "ragged-dot"):
        return _count_dot(within, i, _CONTRACTED.search(i.rest))
    if i.opcode == "convolution":
        lhs, rhs = (_find_shape(within, o) for o in i.operands[:2])
        return _count_convolution(i, lhs, rhs, parse_dims(i.shape))
    kind = find_call(i)
    if kind is Call.PRODUCT:
        return _count_dot(within, i, _OF_GEMM.search(unescape(i.rest)))
    if kind is Call.SCALED:
        # The text has no dims. The call sums over the last dim of both operands.
        summed = _find_shape(within, i.operands[0])[-1:]
        return 2 * math.prod(parse_dims(i.shape) + summed) if summed else None
    if kind is Call.CONVOLUTION:
        return _count_convolution(i, *_read_cudnn_shapes(within, i))
    if kind is Call.ATTENTION:
        return _count_attention(within, i)
    return None


def find_product_dtype(within: dict[str, Instruction], i: Instruction) -> str:
    """Return the dtype of the operands that an instruction multiplies; the wider one of two.

    A fusion may widen arrays of 8 bits before it multiplies them. The operands of the instruction
    itself then have the wider dtype, in which the device multiplies.
    """
    dtypes = [_text.dtype(within[o].shape) for o in i.operands[:2] if o in within]
    return max(dtypes, key=_text.num_bits)


def parse_dims(shape: str) -> Shape:
    """Return the sizes of an array shape; for a tuple, those of the first array."""
    found = _DIMS.search(shape)
    return tuple(int(d.lstrip("<=")) for d in found[1].split(",") if d) if found else ()


def _find_shape(within: dict[str, Instruction], name: str) -> Shape:
    """Return the sizes of an operand."""
    return parse_dims(within[name].shape) if name in within else ()


def _count_dot(
    within: dict[str, Instruction], i: Instruction, contracted: re.Match[str] | None
) -> int | None:
    """Return the operations of a matrix product."""
    if contracted is None or i.operands[0] not in within:
        return None
    lhs = _find_shape(within, i.operands[0])
    summed = list(_parse_numbers(contracted[1]))
    # The result of a cuBLAS call is a tuple of the product and a workspace.
    out = parse_dims(_text.elements(i.shape)[0])
    ragged = _RAGGED.search(i.rest)
    if ragged and int(ragged[1]) in summed:
        # Each group sums over its own rows, with its own result. Together they sum over all rows.
        out = out[1:]
    return 2 * math.prod(out) * math.prod(lhs[d] for d in summed)


def _parse_numbers(text: str) -> Iterator[int]:
    """Return the integers of `1,2` or `["1","2"]`."""
    listed: Any = json.loads(text) if text.startswith("[") else text.split(",")
    return (int(d) for d in listed if d != "")


def _read_cudnn_shapes(
    within: dict[str, Instruction], i: Instruction
) -> tuple[Shape, Shape, Shape]:
    """Return input, filter and output of the forward convolution of a cuDNN call.

    For a gradient, the labels and the window in the text are those of the forward convolution.
    """
    one, other = (_find_shape(within, o) for o in i.operands[:2])
    result = parse_dims(_text.elements(i.shape)[0])
    target = find_target(i)
    if "convBackwardInput" in target:
        return result, other, one
    return (one, result, other) if "convBackwardFilter" in target else (one, other, result)


def _count_convolution(i: Instruction, lhs: Shape, rhs: Shape, out: Shape) -> int | None:
    """Return twice the number of products, without products with padding."""
    labels = _LABELS.search(i.rest)
    if labels is None or not lhs or not rhs:
        return None
    of_lhs, of_rhs, of_out = labels[1], labels[2], labels[3]
    groups = {m[1]: int(m[2]) for m in _GROUPS.finditer(i.rest)}
    places = list(_windows(i))
    spatial = sorted(c for c in of_out if c.isdigit())
    count = rhs[of_rhs.index("i")] * out[of_out.index("f")]
    # In the text, the output features are those of all groups, and the input features those of one.
    count *= lhs[of_lhs.index("b")] // groups.get("batch", 1)
    for number, dim in enumerate(spatial):
        window = places[number] if number < len(places) else _Window()
        sizes = (lhs[of_lhs.index(dim)], rhs[of_rhs.index(dim)], out[of_out.index(dim)])
        count *= window.count_valid(*sizes)
    return 2 * count


def _count_attention(within: dict[str, Instruction], i: Instruction) -> int | None:
    """Return the operations of attention by cuDNN, counting all scores, even masked ones.

    The forward pass has two products, scores and values. The backward pass computes the scores
    again, and the gradients of values, probabilities, queries and keys.
    """
    scores = _SCORES.search(unescape(i.rest))  # [b, heads, queries, keys]
    query = _find_shape(within, i.operands[0])  # [..., dims of a head]
    if scores is None or not query:
        return None
    products = 5 if "Backward" in find_target(i) else 2
    return 2 * products * math.prod(_parse_numbers(scores[1])) * query[-1]


@dataclasses.dataclass(frozen=True)
class _Window:
    """The movement of a kernel along one dim."""

    stride: int = 1
    low: int = 0
    of_input: int = 1  # dilation
    of_kernel: int = 1

    def count_valid(self, size: int, kernel: int, out: int) -> int:
        """Return the pairs of a result and a kernel element that meet an input element."""
        at = np.arange(out)[:, None] * self.stride + np.arange(kernel) * self.of_kernel - self.low
        # With dilation, there are holes between the input elements, which are zero.
        inside = (at >= 0) & (at <= (size - 1) * self.of_input) & (at % self.of_input == 0)
        return int(inside.sum())


# Attributes of a window in the text, and the fields that hold them.
_FIELDS = {"stride": "stride", "pad": "low", "lhs_dilate": "of_input", "rhs_dilate": "of_kernel"}


def _windows(i: Instruction) -> Iterator[_Window]:
    """Yield the window of each spatial dim."""
    found = _WINDOW.search(i.rest)
    given = dict(part.split("=") for part in found[1].split()) if found else {}
    numbers = {n: [int(v.split("_")[0]) for v in of.split("x")] for n, of in given.items()}
    for dim in range(len(numbers.get("size", ()))):
        yield _Window(**{field: numbers[n][dim] for n, field in _FIELDS.items() if n in numbers})
