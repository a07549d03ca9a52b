"""The end of the data, for callers that ask with `get_next`."""

from jaxdist.errors import JaxdistError


class OutOfRangeError(JaxdistError, StopIteration):
    """Raised by `DistributedIterator.get_next` when no element is left.

    Also a `StopIteration`, so that both `tf.distribute` and plain Python code can catch it.

    Source:
        `tf.errors.OutOfRangeError`.
    """
