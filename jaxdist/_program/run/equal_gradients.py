"""Finds gradients that are reduced before `sharded_update`, which reduces them itself."""

from jaxdist._program.compile.program import Program
from jaxdist._values import Kind


def find_equal_gradients(program: Program) -> str:
    """Return the line at which all gradients that `sharded_update` gets are equal, or ''.

    A single gradient may be equal for another reason, like that of a frozen parameter. In a step
    in which nothing differs between the replicas, all of them compute the same rows.
    """
    of_updates = [c for c in program.traced_collectives if c.is_of_update]
    if not of_updates or not all(c.scatters_equal for c in of_updates):
        return ""
    line = of_updates[0].source
    has_rows = any(slot.kind is Kind.PER_REPLICA for slot in program.signature.inputs)
    return line if has_rows else ""


def describe_equal_gradients(name: str, line: str, num_replicas: int) -> str:
    """Return the log line."""
    return (
        f"strategy.run({name}): all gradients that sharded_update gets at {line} are the same on "
        "all replicas already. It reduces gradients itself, so they are reduced twice: each device "
        "sends twice the bytes, and with reduce_op='sum' the result is "
        f"{num_replicas} times too large. Pass each replica's own gradients"
    )
