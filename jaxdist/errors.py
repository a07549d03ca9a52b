"""Every exception and warning that jaxdist raises.

Each one is also the built-in that fits, so `except ValueError` keeps working::

    JaxdistError
      InvalidArgumentError     ValueError    as TensorFlow calls the next two
        ShapeError                           an array does not fit the replicas
        ArgumentError                        a value outside the valid ones
      DeviceError              ValueError    devices that do not exist, repeat, or do not fit
      TopologyError            ValueError    chips, or cores of replicas, that cannot be laid out
        CoordinateError        IndexError too  a place that is not there
      NotFoundError            ValueError    TPUs or tasks that were looked for and are not there
      ArgumentTypeError        TypeError     an argument of the wrong type
      UnsupportedError         NotImplementedError  documented, and not possible here
      ReplicaValueError        ValueError    per-replica values that do not belong here
      DonationError            ValueError    one buffer given away twice
      StateDivergenceError     ValueError    state that would come out different on each replica
      ShardedArrayError        ValueError    a piece taken for the array that it is a piece of
      ContextError             RuntimeError  called inside or outside the wrong context
        MixedStrategyError                   two strategies where only one can be
        InputContextError    ValueError too  data read where a function is traced
        SeveralProcessesError ValueError too a strategy of one process in a job of several
      AxisNameError            NameError     a mesh axis that is not there
      DivergentCollectiveError RuntimeError  a collective that some replicas may never reach
      ReplicaDriftError        RuntimeError  replicas that should hold the same bits and do not
      NoRowsError              ValueError    a mean over no rows that would reach all replicas
      NotFiniteError           FloatingPointError  a nan that JAX was told to look for
      BackendStartedError      RuntimeError  asked for devices after JAX had started
      ConfigError              ValueError    a configuration file or override that is not valid
      CheckpointError          RuntimeError  a checkpoint that cannot be read or written
        DamagedCheckpointError               its files are not what was written
      NonFiniteLossError       ArithmeticError  a loss that is not finite
      OutOfRangeError          StopIteration an iterator that has no element left
      DeadlineExceededError    TimeoutError  a collective that took longer than it may
      MissingExtraError        ImportError   an optional package that is not installed

      MissingNameError         AttributeError a documented name that is not there

    RetraceWarning             UserWarning   a function that is traced again and again
    UnevenMeanWarning          UserWarning   a mean over replicas with other numbers of rows
    StateDivergenceWarning     UserWarning   a result that looks like state and differs
"""

from typing import TYPE_CHECKING, NoReturn


class JaxdistError(Exception):
    """Base of every error of jaxdist."""


class InvalidArgumentError(JaxdistError, ValueError):
    """Raised as a `ShapeError` or an `ArgumentError`, where TensorFlow raises this.

    Source:
        `tf.errors.InvalidArgumentError`.
    """


class ShapeError(InvalidArgumentError):
    """Raised when an array does not fit the replicas that it is meant for."""


class DeviceError(JaxdistError, ValueError):
    """Raised when devices do not exist, are listed twice, or cannot form one strategy."""


class TopologyError(JaxdistError, ValueError):
    """Raised when TPU chips, or the cores of replicas, cannot be laid out as asked."""


class CoordinateError(TopologyError, IndexError):
    """Raised when coordinates, a replica or a logical device are outside what is there."""


class NotFoundError(JaxdistError, ValueError, RuntimeError):
    """Raised when TPUs or tasks are looked for and are not there.

    Also a `RuntimeError`: `tf.distribute` documents that one for a name that cannot be resolved.

    Source:
        `tf.errors.NotFoundError`.
    """


class ArgumentError(InvalidArgumentError):
    """Raised when an argument is not one of the valid values."""


class ArgumentTypeError(JaxdistError, TypeError):
    """Raised when an argument is of a type that the call cannot take."""


class UnsupportedError(JaxdistError, NotImplementedError):
    """Raised when something that is valid elsewhere cannot be done in this place."""


class ReplicaValueError(JaxdistError, ValueError):
    """Raised when per-replica values are too few, too many, or of another strategy."""


class DonationError(JaxdistError, ValueError):
    """Raised when one buffer would be given away twice, or given away and still used."""


class StateDivergenceError(JaxdistError, ValueError):
    """Raised at trace time when state would come out different on each replica."""


class ShardedArrayError(JaxdistError, ValueError):
    """Raised at trace time when a piece of a sharded array would be taken for the array."""


class ContextError(JaxdistError, RuntimeError):
    """Raised when a call is made inside or outside the wrong context."""


class MixedStrategyError(ContextError):
    """Raised when a strategy is used while another one is active."""


class InputContextError(ContextError, ValueError):
    """Raised when the next batch is asked for inside a step or a traced function."""


class SeveralProcessesError(ContextError, ValueError):
    """Raised when a strategy of one process is made in a job of several, or for devices of others.

    Source:
        `tf.distribute.MirroredStrategy`: a `RuntimeError` for remote workers, a `ValueError` for
        devices of which some are remote.
    """


class AxisNameError(JaxdistError, NameError):
    """Raised at trace time when a step uses a mesh axis that the strategy does not have."""


class DivergentCollectiveError(JaxdistError, RuntimeError):
    """Raised at trace time when replicas may disagree on whether they reach a collective."""


class NoRowsError(JaxdistError, ValueError):
    """Raised when a replica has no rows in a step, and a mean over none would reach the others."""


class ReplicaDriftError(JaxdistError, RuntimeError):
    """Raised when replicas of one mirrored value no longer hold the same bits."""


class NotFiniteError(JaxdistError, FloatingPointError):
    """Raised when a step makes a nan or an infinity, and JAX was told to look for them."""


class BackendStartedError(JaxdistError, RuntimeError):
    """Raised when virtual devices are asked for after JAX has started its backend."""


class ConfigError(JaxdistError, ValueError):
    """Raised when a configuration file or an override is not valid."""


class CheckpointError(JaxdistError, RuntimeError):
    """Raised when a checkpoint cannot be read or written."""


class DamagedCheckpointError(CheckpointError):
    """Raised when the files of a checkpoint are not what was written."""


class NonFiniteLossError(JaxdistError, ArithmeticError):
    """Raised by training when a loss is not finite."""


class OutOfRangeError(JaxdistError, StopIteration):
    """Raised by `DistributedIterator.get_next` when no element is left.

    Also a `StopIteration`, so that code written for `tf.distribute` and plain Python both catch it.

    Source:
        `tf.errors.OutOfRangeError`.
    """


class DeadlineExceededError(JaxdistError, TimeoutError):
    """Raised when a collective between processes takes longer than its `timeout_seconds`.

    Source:
        `tf.errors.DeadlineExceededError`.
    """


class MissingExtraError(JaxdistError, ImportError):
    """Raised when an optional package is needed and not installed."""


class MissingNameError(JaxdistError, AttributeError):
    """Raised when a documented name is read that is not there; it says what is in its place."""


class RetraceWarning(UserWarning):
    """Warns that a step is traced again and again; silence it with `warnings.filterwarnings`."""


class UnevenMeanWarning(UserWarning):
    """Warns of a mean over replicas with different numbers of rows, which counts each the same."""


class StateDivergenceWarning(UserWarning):
    """Warns that a result has the structure of an argument and differs between replicas."""


_SERVERS = "It comes with parameter servers, which are not there yet; nothing raises it before."
# Documented under `tf.errors`, and not there.
_NOT_THERE = {
    "AbortedError": _SERVERS,
    "CancelledError": _SERVERS,
    "FailedPreconditionError": (
        "What is called at the wrong time or place is errors.ContextError, a RuntimeError."
    ),
    "UnavailableError": (
        "It comes with training over several processes, which is not there yet; nothing raises it "
        "before."
    ),
    "UnknownError": _SERVERS,
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        if name in _NOT_THERE:
            text = f"jaxdist.errors.{name} is not there.\n\n{_NOT_THERE[name]}"
            raise MissingNameError(text, name=name)
        raise AttributeError(f"module 'jaxdist.errors' has no attribute {name!r}", name=name)
