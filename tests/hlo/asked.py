"""The work of a traced function on one device, from its jaxpr: products, collective bytes.

Nothing of a compiler is read, so this is an oracle for readers of compiled programs.
"""

import collections
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

COLLECTIVES = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


def asked(jaxpr: Any, times: int = 1) -> collections.Counter[str]:
    """`flops`, and by kind the bytes of the results of collectives, on one device.

    The jaxpr is that of a function under `shard_map`. Loops that decide while running and branches
    are left out.
    """
    found: collections.Counter[str] = collections.Counter()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            found["flops"] += times * _products_of_dot(eqn)
        elif name == "ragged_dot_general":
            rows, matrices = (v.aval.shape for v in eqn.invars[:2])
            found["flops"] += times * 2 * math.prod(rows) * matrices[-1]
        elif name == "conv_general_dilated":
            found["flops"] += times * _products_of_convolution(eqn)
        elif name in COLLECTIVES:
            found[COLLECTIVES[name]] += times * sum(_bytes(v.aval) for v in eqn.outvars)
        if name in ("while", "cond"):
            continue
        turns = eqn.params.get("length", 1) if name == "scan" else 1
        for inner in _inner(eqn):
            found.update(asked(inner, times * turns))
    return found


def _inner(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                yield part


def _bytes(aval: Any) -> int:
    return int(math.prod(aval.shape) * aval.dtype.itemsize)


def _products_of_dot(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    lhs = eqn.invars[0].aval.shape
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[d] for d in contracted)


def _products_of_convolution(eqn: Any) -> int:
    """By going through each place of the result and of the kernel, dim by dim."""
    p = eqn.params
    lhs, rhs = (v.aval.shape for v in eqn.invars)
    out = eqn.outvars[0].aval.shape
    dims = p["dimension_numbers"]
    products = out[dims.out_spec[1]] * rhs[dims.rhs_spec[1]]
    products *= lhs[dims.lhs_spec[0]] // p["batch_group_count"]
    for i, (stride, (low, _)) in enumerate(zip(p["window_strides"], p["padding"], strict=True)):
        size, kernel, places = (
            lhs[dims.lhs_spec[2 + i]],
            rhs[dims.rhs_spec[2 + i]],
            out[dims.out_spec[2 + i]],
        )
        holes, kernel_holes = p["lhs_dilation"][i], p["rhs_dilation"][i]
        is_element = np.zeros((size - 1) * holes + 1, bool)
        is_element[::holes] = True
        count = 0
        for o in range(places):
            for k in range(kernel):
                at = o * stride + k * kernel_holes - low
                count += 0 <= at < len(is_element) and bool(is_element[at])
        products *= count
    return 2 * products
