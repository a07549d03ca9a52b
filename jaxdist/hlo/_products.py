"""Counts the operations of products, convolutions and the kernels of libraries.

The text does not show the operations of a kernel, but it has the estimate of the author, if any. It
lacks estimates for kernels that Triton compiles, and before JAX 0.12 for all kernels for GPUs. In
JAX's flash attention only the kernel of the forward pass has an estimate, and in splash attention
none has, so this module knows the others by name.
"""

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
        lhs, rhs = (_find_dims(within, o) for o in i.operands[:2])
        return _count_convolution(i, lhs, rhs, _text.parse_dims(i.shape))
    kind = find_call(i)
    if kind is Call.PRODUCT:
        return _count_dot(within, i, _OF_GEMM.search(unescape(i.rest)))
    if kind is Call.SCALED:
        # The text has no dims. The call sums over the last dim of both operands.
        summed = _find_dims(within, i.operands[0])[-1:]
        return 2 * math.prod(_text.parse_dims(i.shape) + summed) if summed else None
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


def _find_dims(within: dict[str, Instruction], name: str) -> Shape:
    """Return the sizes of an operand; empty if the text lacks it."""
    return _text.parse_dims(_text.find_shape(within, name))


def _count_dot(
    within: dict[str, Instruction], i: Instruction, contracted: re.Match[str] | None
) -> int | None:
    """Return the operations of a matrix product."""
    if contracted is None or i.operands[0] not in within:
        return None
    lhs = _find_dims(within, i.operands[0])
    summed = list(_parse_numbers(contracted[1]))
    # The result of a cuBLAS call is a tuple of the product and a workspace.
    out = _text.parse_dims(_text.elements(i.shape)[0])
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
    one, other = (_find_dims(within, o) for o in i.operands[:2])
    result = _text.parse_dims(_text.elements(i.shape)[0])
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
    query = _find_dims(within, i.operands[0])  # [..., dims of a head]
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


_TARGETS = ("tpu_custom_call", "mosaic_gpu")
# JAX writes `"cost_estimate":{"flops":"8",...}` for TPUs, and for GPUs, with escaped quotes,
# `cost_estimate_json = "{\22flops\22: 8, ...}"`.
_ESTIMATE = re.compile(r'cost_estimate(?:":|_json = ")\{[^{}]*"flops": ?"?(\d+)')
# The beginnings of the names of kernels, and their matrix products of queries x keys x dims of a
# head: the scores and the results, and the gradients of values, of probabilities and of keys or
# queries.
_PRODUCTS_OF = {
    "flash_mha_bwd_dkv": 4,
    "flash_mha_bwd_dq": 3,
    **{f"splash_{heads}_fwd": 2 for heads in ("mha", "mqa")},
    **{f"splash_{heads}_dkv": 4 for heads in ("mha", "mqa")},
    **{f"splash_{heads}_dq": 3 for heads in ("mha", "mqa")},
}
# In the attributes of splash attention: the positions are the last dim of the keys.
_POSITIONS_LAST = re.compile(r'"k_layout": 2\b')


def count_kernel(within: dict[str, Instruction], i: Instruction) -> int | None:
    """Return the operations of a kernel; None if they cannot be found in the text.

    Attention counts in full: a kernel may skip blocks that causal attention does not need.
    """
    if i.opcode != "custom-call" or not find_target(i).startswith(_TARGETS):
        return None
    estimate = _ESTIMATE.search(unescape(i.rest))
    if estimate is not None:
        return int(estimate[1])
    products = _find_products(i)
    arrays = [within[o].shape for o in i.operands if o in within]
    # Splash attention takes its mask, as integers, before the queries and keys.
    floats = [_text.parse_dims(a) for a in arrays if _text.dtype(a).startswith(("f", "bf"))]
    if products is None or len(floats) < 2:
        return None
    query, key = floats[:2]  # [b, heads, s, dims]
    # One gradient of queries for each block of keys; they are summed later.
    if products == 4 and any(
        len(_text.parse_dims(r)) > len(query) for r in _text.elements(i.shape)
    ):
        products += 1
    positions = key[-1] if _POSITIONS_LAST.search(unescape(i.rest)) else key[-2]
    return 2 * products * math.prod(query) * positions


def find_kernel_dtype(within: dict[str, Instruction], i: Instruction) -> str:
    """Return the dtype of the first operand with floating-point numbers, or of the result.

    The text does not show in which dtype a kernel multiplies.
    """
    dtypes = [_text.dtype(within[o].shape) for o in i.operands if o in within]
    floats = (d for d in dtypes if d.startswith(("f", "bf")))
    return next(floats, _text.dtype(i.shape))


def _find_products(i: Instruction) -> int | None:
    # The compiler keeps the name of a kernel in that of the instruction, or of its operation.
    names = (i.name, _text.metadata(i).get("op_name", "").rsplit("/", 1)[-1])
    return next(
        (n for start, n in _PRODUCTS_OF.items() if any(x.startswith(start) for x in names)), None
    )
