"""Lists the instructions of HLO, and the library calls of compilers, that this room knows.

# Note [Unknown instructions]
Compilers add instructions and library calls with every version. A reader that skipped an unknown
one would report too few collectives or too little work, and nobody would notice. So every
instruction is in a list here, or reports name it as unknown.
"""

import enum
import re
from collections.abc import Iterator, Mapping

from jaxdist.hlo._text import Instruction, Module, read

# Opcodes of XLA (hlo_opcode.h) that read operands and write results, without a matrix product.
_MOVE = frozenset(
    """
    abs acos acosh add add-dependency after-all and asin asinh atan2 atanh batch-norm-grad
    batch-norm-inference batch-norm-training bitcast bitcast-convert broadcast call cbrt ceil clamp
    compare complex concatenate conditional constant convert copy cosh cosine
    count-leading-zeros divide domain dynamic-reshape dynamic-slice dynamic-update-slice erf
    exponential exponential-minus-one fft floor gather get-dimension-size get-tuple-element imag
    infeed iota is-finite log log-plus-one logistic map maximum minimum mulhi multiply negate not
    opt-barrier or outfeed pad parameter partition-id popcnt power real recv reduce
    reduce-precision reduce-window remainder replica-id reshape reverse rng rng-bit-generator
    rng-get-and-update-state round-nearest-afz round-nearest-even rsqrt scatter select
    select-and-scatter send set-dimension-size shift-left shift-right-arithmetic
    shift-right-logical sign sine sinh slice sort sqrt stochastic-convert subtract tan tanh topk
    transpose tuple while xor
    """.split()
)
# Collectives.
KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
EXCHANGES = ("all-to-all", "ragged-all-to-all")  # each device sends another part to each
PRODUCTS = frozenset({"convolution", "dot", "ragged-dot", "scaled-dot"})
# Opcodes with matrix products that no reader here counts.
_SOLVERS = frozenset({"cholesky", "triangular-solve"})
_KNOWN = _MOVE.union(KINDS) | PRODUCTS | _SOLVERS | {"async", "custom-call", "fusion"}
_ASYNC = re.compile(r"-(start|update|done)$")
_OTHER_CORE = 'async_execution_thread="'
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# Kernels that send nothing to other devices: by the estimate of the author, or, for kernels of JAX
# without one, by name.
_SENDS_NOTHING = re.compile(r'"remote_bytes_transferred": ?"?0\b')
_ATTENTION = ("flash_mha_bwd_", "splash_mha_", "splash_mqa_")


class Call(enum.Enum):
    """The kind of a custom call, by its target."""

    PRODUCT = "product"  # of matrices: cuBLAS
    SCALED = "scaled product"  # of matrices whose blocks have scales: MXFP8, NVFP4
    CONVOLUTION = "convolution"  # cuDNN
    ATTENTION = "attention"  # cuDNN
    MOVE = "move"  # reads its operands and writes its results
    NAME = "name"  # an alias of its operand, or a buffer for a later result
    SOLVE = "solve"  # on one device, with operations that are not counted
    UNKNOWN = "unknown"


# Beginnings of targets. The first match counts, so `__cudnn$convReorderFilter` comes before
# `__cudnn$conv`.
_CALLS = (
    ("__cublas$lt$grouped", Call.SOLVE),
    ("__cublas$gemm", Call.PRODUCT),
    ("__cublas$lt$matmul", Call.PRODUCT),
    ("__cudnn$convReorderFilter", Call.MOVE),
    ("__cudnn$conv", Call.CONVOLUTION),
    ("__cudnn$norm", Call.MOVE),
    ("__cudnn$fmha", Call.ATTENTION),
    ("__cudnn$blockScaledDot", Call.SCALED),
    ("__op$block_scaled_dot", Call.SCALED),
    ("__cub$", Call.MOVE),
    ("__gpu$TopK", Call.MOVE),
    ("TopK", Call.MOVE),
    ("__gpu$xla.gpu.triton", Call.SOLVE),  # a kernel, which has no way to other devices
    ("cu_threefry2x32", Call.MOVE),
    ("cu_lu_pivots_to_permutation", Call.MOVE),
    ("cu_cholesky_update", Call.SOLVE),
    ("cu_tridiagonal_solve", Call.SOLVE),
    ("cudnn_rnn", Call.SOLVE),
    ("cuhybrid_", Call.SOLVE),
    ("AssumeGatherIndicesInBound", Call.MOVE),
    ("GatherScatterIndicesBitpacked", Call.MOVE),
    ("MoveToHost", Call.MOVE),
    ("MoveToDevice", Call.MOVE),
    ("AllocateBuffer", Call.NAME),
    ("AsyncCollective", Call.NAME),  # the text also has the collective itself
    ("ConcatBitcast", Call.NAME),
    ("SliceId", Call.NAME),
    ("ZeroCrop", Call.MOVE),
    ("annotate_device_placement", Call.NAME),
    ("Sharding", Call.NAME),
    ("SPMDFullToShardShape", Call.NAME),
    ("SPMDShardToFullShape", Call.NAME),
    ("__cublas$triangularSolve", Call.SOLVE),
    ("cublas_", Call.SOLVE),
    ("cusolver_", Call.SOLVE),
    ("cusparse_", Call.SOLVE),
    ("hipsolver_", Call.SOLVE),
    ("lapack_", Call.SOLVE),
    ("blas_", Call.SOLVE),
    ("xla_ffi_python_", Call.SOLVE),  # a callback on the host
)


def find_target(i: Instruction) -> str:
    """Return the target of a custom call."""
    found = _TARGET.search(i.rest)
    return found[1] if found else ""


def find_call(i: Instruction) -> Call:
    """Return the kind of a custom call."""
    target = find_target(i)
    return next((kind for start, kind in _CALLS if target.startswith(start)), Call.UNKNOWN)


def runs_on_other_core(i: Instruction) -> bool:
    """Whether an instruction runs a computation of the text on another core of the device.

    TPUs have SparseCores for gathers, which run beside the TensorCore.
    """
    return i.opcode.startswith("custom-call") and bool(
        _OTHER_CORE in i.rest and any(how == "called_computations" for how, _ in i.called)
    )


def name_if_uncounted(i: Instruction) -> str:
    """Return the name of an instruction whose products are not counted, or ""."""
    opcode = _ASYNC.sub("", i.opcode)
    # Their start has been checked.
    if i.opcode in ("custom-call-update", "custom-call-done") or runs_on_other_core(i):
        return ""
    if opcode == "custom-call" and find_call(i) in (Call.SOLVE, Call.UNKNOWN):
        return f"custom-call to {find_target(i) or 'nothing named'}"
    return opcode if opcode in _SOLVERS or opcode not in _KNOWN else ""


def unknown(text: str) -> tuple[str, ...]:
    """Return everything in optimized HLO text that may communicate and is unknown.

    This includes instructions, calls, lines, computations that the text lacks, and collectives with
    a start but no done. A call to a solver or to Python does not communicate with other devices, so
    it is not included. See Note [Unknown instructions].

    Args:
        text: The result of `jax.stages.Compiled.as_text`.

    Example:
        >>> from jaxdist import hlo
        >>> hlo.unknown('%x = f32[4] custom-call(%y), custom_call_target="my_kernel"')
        ('custom-call to my_kernel',)
    """
    module = read(text)
    found = dict.fromkeys(describe_line(line) for line in module.unread)
    for place, computation in module.computations.items():
        for i in computation.values():
            found |= dict.fromkeys(map(describe_computation, find_missing(module, i)))
            opcode = _ASYNC.sub("", i.opcode)
            if opcode == "custom-call" and (find_call(i) is not Call.UNKNOWN or _is_local(i)):
                continue
            # `name_if_uncounted` also names solvers, which run on one device.
            if opcode not in _SOLVERS and (name := name_if_uncounted(i)):
                found[name] = None
        if place:  # lines outside of computations come from a partial text
            found |= dict.fromkeys(_find_halves(computation))
    return tuple(found)


def find_missing(module: Module, i: Instruction) -> list[str]:
    """Return the computations that an instruction runs and that the text lacks."""
    # No reader looks into the computation that an all-reduce sums with.
    return [
        name
        for how, name in i.called
        if name not in module.computations and (how != "to_apply" or i.opcode == "call")
    ]


def _find_halves(computation: Mapping[str, Instruction]) -> Iterator[str]:
    """Yield the starts of collectives without exactly one done, and dones without a start."""
    first = {i.name: _find_first(computation, i) for i in computation.values()}
    for i in computation.values():
        kind, _, half = i.opcode.rpartition("-")
        if kind in KINDS and half == "start":
            ends = [j for j in computation.values() if j.opcode == f"{kind}-done"]
            if sum(first[j.name] == i.name for j in ends) != 1:
                yield f"{i.opcode} without its done"
        if kind in KINDS and half == "done" and first[i.name] == i.name:
            yield f"{i.opcode} without its start"


def _find_first(computation: Mapping[str, Instruction], i: Instruction) -> str:
    """Return the name of the start of a done, following its updates; or its own name."""
    found = i
    while found.opcode.endswith(("-update", "-done")) and found.operands:
        before = computation.get(found.operands[0])
        if before is None or not before.opcode.endswith(("-start", "-update")):
            return i.name
        found = before
    return found.name


def _is_local(i: Instruction) -> bool:
    """Whether a kernel of Pallas is known to send nothing to other devices."""
    return bool(_SENDS_NOTHING.search(unescape(i.rest))) or i.name.startswith(_ATTENTION)


def unescape(config: str) -> str:
    """Return the configuration of a call with plain quotes, which some versions escape."""
    return config.replace('\\"', '"').replace("\\22", '"')


def describe_computation(name: str) -> str:
    """Return the name that reports use for a computation that the text lacks."""
    return f"the computation {name!r}, which is missing"


def describe_line(line: str) -> str:
    """Return the name that reports use for a line that is not an instruction."""
    return f"the line {line[:60]!r}"


_COPIES = frozenset({"copy", "transpose", "bitcast", "copy-start", "copy-done"})
# These run other instructions, which a profile lists themselves.
_CONTAINERS = frozenset({"while", "conditional", "call"})


def categories(text: str) -> dict[str, str]:
    """Return the category of each instruction by its name.

    Args:
        text: The result of `jax.stages.Compiled.as_text`.

    Returns:
        `"matrix products"`, `"collectives"`, `"copies"`, `"other compute"`, or `""` for
        instructions that only run others.

    Example:
        >>> from jaxdist import hlo
        >>> text = jax.jit(lambda x: x @ x).lower(jnp.ones((64, 64))).compile().as_text()
        >>> "matrix products" in hlo.categories(text).values()
        True
    """
    module = read(text)
    return {
        name: _categorize(module, instruction)
        for computation in module.computations.values()
        for name, instruction in computation.items()
    }


def _categorize(module: Module, instruction: Instruction) -> str:
    opcode = instruction.opcode
    if opcode in _CONTAINERS:
        return ""
    inside = [
        module.computations.get(name, {})
        for how, name in instruction.called
        if how in ("calls", "called_computations")
    ]
    opcodes = {opcode} | {i.opcode for computation in inside for i in computation.values()}
    if any(o.removesuffix("-start").removesuffix("-done") in KINDS for o in opcodes):
        return "collectives"
    # Libraries of matrix products are custom calls: cuBLAS, cuDNN, oneDNN.
    if opcodes & PRODUCTS or any(word in instruction.rest for word in ("matmul", "gemm", "$conv")):
        return "matrix products"
    return "copies" if opcode in _COPIES else "other compute"
