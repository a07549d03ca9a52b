"""Counts the work of kernels that a library compiled into a program: Pallas on TPUs and GPUs.

The text does not show the operations of a kernel, but it has the estimate of the author, if any. It
lacks estimates for kernels that Triton compiles, and before JAX 0.12 for all kernels for GPUs. In
JAX's flash attention only the kernel of the forward pass has an estimate, and in splash attention
none has, so this module knows the others by name.
"""

import math
import re

from jaxdist.hlo import _text
from jaxdist.hlo._known import find_target, unescape
from jaxdist.hlo._products import parse_dims
from jaxdist.hlo._text import Instruction

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
    if not _is_kernel(i):
        return None
    estimate = _ESTIMATE.search(unescape(i.rest))
    if estimate is not None:
        return int(estimate[1])
    products = _find_products(i)
    arrays = [within[o].shape for o in i.operands if o in within]
    # Splash attention takes its mask, as integers, before the queries and keys.
    floats = [parse_dims(a) for a in arrays if _text.dtype(a).startswith(("f", "bf"))]
    if products is None or len(floats) < 2:
        return None
    query, key = floats[:2]  # [b, heads, s, dims]
    # One gradient of queries for each block of keys; they are summed later.
    if products == 4 and any(len(parse_dims(r)) > len(query) for r in _text.elements(i.shape)):
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


def _is_kernel(i: Instruction) -> bool:
    return i.opcode == "custom-call" and find_target(i).startswith(_TARGETS)


def _find_products(i: Instruction) -> int | None:
    # The compiler keeps the name of a kernel in that of the instruction, or of its operation.
    names = (i.name, _text.metadata(i).get("op_name", "").rsplit("/", 1)[-1])
    return next(
        (n for start, n in _PRODUCTS_OF.items() if any(x.startswith(start) for x in names)), None
    )
