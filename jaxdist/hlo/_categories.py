"""Finds the category of each instruction of a compiled program, for profiles."""

from jaxdist.hlo._known import KINDS, PRODUCTS
from jaxdist.hlo._text import Instruction, Module, read

PRODUCT, COLLECTIVE, COPY, COMPUTE, CONTAINER = (
    "matrix products",
    "collectives",
    "copies",
    "other compute",
    "",
)
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
        return CONTAINER
    inside = [
        module.computations.get(name, {})
        for how, name in instruction.called
        if how in ("calls", "called_computations")
    ]
    opcodes = {opcode} | {i.opcode for computation in inside for i in computation.values()}
    if any(o.removesuffix("-start").removesuffix("-done") in KINDS for o in opcodes):
        return COLLECTIVE
    # Libraries of matrix products are custom calls: cuBLAS, cuDNN, oneDNN.
    if opcodes & PRODUCTS or any(word in instruction.rest for word in ("matmul", "gemm", "$conv")):
        return PRODUCT
    return COPY if opcode in _COPIES else COMPUTE
