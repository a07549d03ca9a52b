"""Whether JAX asks for the leaves of a value to take a Jacobian with respect to it."""

import sys

_FRAMES = 4  # from the flattening function of a node up to that of the Jacobian


def jacobian_that_asks() -> str | None:
    """`jacrev` or `jacfwd`, where one of them flattens its arguments; called by the node.

    Both put arrays into the structure of the arguments, and then expect nodes of the same type.
    Waits for JAX to say so in an error of its own.
    """
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        found = frame.f_back
        if found is None:
            return None
        frame = found
        if frame.f_code.co_name == "jacfun":
            return frame.f_code.co_qualname.partition(".")[0]
    return None
