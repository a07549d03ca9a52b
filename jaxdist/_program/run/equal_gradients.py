"""A line of log for `sharded_update` with gradients that the replicas have reduced already."""

from jaxdist._program.compile.program import Program
from jaxdist._values import Kind


def find_equal_gradients(program: Program) -> str:
    """Return the line at which `sharded_update` gets gradients that are equal, or ''.

    In a step in which nothing differs between the replicas, gradients are equal for another reason:
    all replicas compute the same rows.
    """
    lines = (c.source for c in program.traced_collectives if c.of_equal_gradients)
    line = next(lines, "")
    if not line:
        return ""
    has_rows = any(slot.kind is Kind.PER_REPLICA for slot in program.signature.inputs)
    return line if has_rows else ""


def describe_equal_gradients(name: str, line: str, num_replicas: int) -> str:
    """Return the text of the log."""
    return (
        f"strategy.run({name}): the gradients that sharded_update gets at {line} are the same on "
        "all replicas already. It reduces the gradients of the replicas itself, so this is done "
        "twice: a device sends twice the bytes, and with reduce_op='sum' they are multiplied by "
        f"{num_replicas}. Pass the gradients of the replica, without an all-reduce before"
    )
