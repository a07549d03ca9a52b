"""Every exception and warning that jaxdist raises.

Each exception is also a subclass of a fitting built-in exception, so `except ValueError` works::

    JaxdistError
      InvalidArgumentError     ValueError    TensorFlow's name for the next two
        ShapeError                           an array does not fit the replicas
        ArgumentError                        a value that is not valid
          RowIndexError      IndexError too  an index outside the rows of a sharded variable
      DeviceError              ValueError    devices that do not exist, repeat, or do not fit
      TopologyError            ValueError    chips, or cores of replicas, that cannot be laid out
        CoordinateError        IndexError too  a coordinate outside the topology
      NotFoundError            ValueError, RuntimeError too  TPUs or tasks that were not found
      ArgumentTypeError        TypeError     an argument of the wrong type
        CallArgumentsError     ValueError too  args is not a list, or kwargs is not a dict
      UnsupportedError         NotImplementedError  documented, but not possible here
      ReplicaValueError        ValueError    per-replica values that do not belong here
      DonationError            ValueError    one buffer donated twice
      StateDivergenceError     ValueError    state that would differ between replicas
      ShardedArrayError        ValueError    a piece used as if it were the whole array
      ContextError             RuntimeError  called inside or outside the wrong context
        MixedStrategyError                   two strategies where only one is allowed
        InputContextError    ValueError too  data read or made in the wrong function
        SeveralProcessesError ValueError too a strategy of one process in a job of several
      AxisNameError            NameError     a mesh axis that does not exist
      DivergentCollectiveError RuntimeError  a collective that some replicas may never reach
      ReplicaDriftError        RuntimeError  replicas that should hold the same bits but do not
      NoRowsError              ValueError    a mean over no rows that would reach all replicas
      NotFiniteError           FloatingPointError  a nan or inf, and JAX was configured to check
      BackendStartedError      RuntimeError  virtual devices requested after JAX had started
      ConfigError              ValueError    a configuration file or override that is not valid
      CheckpointError          RuntimeError  a checkpoint that cannot be read or written
        DamagedCheckpointError               checkpoint files that changed since they were written
        BucketError            OSError too   a bucket that cannot be listed, read or written
      NonFiniteLossError       ArithmeticError  a loss that is not finite
      OutOfRangeError          StopIteration an iterator that has no element left
      OtherProcessError        RuntimeError  another process of the job is the cause
        DeadlineExceededError  TimeoutError too  a collective that took longer than its timeout
        UnavailableError                     a process that has ended
          PSUnavailableError                 a parameter server that does not answer
          WorkerUnavailableError             a worker that was lost
        ProgramMismatchError                 processes whose programs differ
      SavedProgramError        RuntimeError  a saved program that is not for this step or device
      CancelledError           RuntimeError  a closure that will not run
      ClosureInputError        RuntimeError  a per-worker dataset that failed
      ClusterError             ValueError, RuntimeError too  a cluster that is not valid
        DuplicateTaskError   KeyError too    two processes that are the same task
      LaunchError              RuntimeError  processes that cannot be started
      UnauthenticatedError     PermissionError  a caller without the secret of a server
      UnknownError             RuntimeError  another task raised an error of another library
      MissingExtraError        ImportError   an optional package that is not installed

      MissingModuleError       ImportError    an import of a documented name that does not exist
      MissingNameError         AttributeError a documented name that jaxdist does not have

    DividedMetricWarning       UserWarning   a metric of values that were divided by all rows
    RetraceWarning             UserWarning   a function that is traced again and again
    UnevenMeanWarning          UserWarning   a mean over replicas with unequal numbers of rows
    StateDivergenceWarning     UserWarning   a result that looks like state and differs
"""

import collections.abc


class JaxdistError(Exception):
    """Base class of every error of jaxdist."""


class InvalidArgumentError(JaxdistError, ValueError):
    """Raised as a `ShapeError` or an `ArgumentError`; TensorFlow raises this class for both.

    Source:
        `tf.errors.InvalidArgumentError`.
    """


class ShapeError(InvalidArgumentError):
    """Raised when the shape of an array does not fit the replicas."""


class DeviceError(JaxdistError, ValueError):
    """Raised when devices do not exist, are listed twice, or cannot form one strategy."""


class TopologyError(JaxdistError, ValueError):
    """Raised when TPU chips, or the cores of replicas, cannot be laid out as requested."""


class CoordinateError(TopologyError, IndexError):
    """Raised when a coordinate, a replica or a logical device is outside the topology."""


class NotFoundError(JaxdistError, ValueError, RuntimeError):
    """Raised when jaxdist looks for TPUs or tasks and finds none.

    Also a `RuntimeError`, which `tf.distribute` documents for a name that cannot be resolved.

    Source:
        `tf.errors.NotFoundError`.
    """


class ArgumentError(InvalidArgumentError):
    """Raised when an argument is not one of the valid values."""


class RowIndexError(ArgumentError, IndexError):
    """Raised when an index is outside the rows of a sharded variable."""


class ArgumentTypeError(JaxdistError, TypeError):
    """Raised when an argument has the wrong type."""


class CallArgumentsError(ArgumentTypeError, ValueError):
    """Raised when `args` and `kwargs` of a call are not a list and a dict, or do not fit it.

    Also a `ValueError`, which `tf.distribute` documents.
    """


class UnsupportedError(JaxdistError, NotImplementedError):
    """Raised when an operation that is valid elsewhere is not possible here."""


class ReplicaValueError(JaxdistError, ValueError):
    """Raised when per-replica values are too few, too many, or of another strategy."""


class DonationError(JaxdistError, ValueError):
    """Raised when one buffer would be donated twice, or would be used after its donation."""


class StateDivergenceError(JaxdistError, ValueError):
    """Raised at trace time when state would differ between replicas after the step."""


class ShardedArrayError(JaxdistError, ValueError):
    """Raised at trace time when a step would use a piece of a sharded array as the whole array."""


class ContextError(JaxdistError, RuntimeError):
    """Raised when a call is made inside or outside the wrong context."""


class MixedStrategyError(ContextError):
    """Raised when a strategy is used while another one is active."""


class InputContextError(ContextError, ValueError):
    """Raised when a function reads data, or makes a variable, where this is not possible.

    A step or a traced function reads the next batch of an iterator, or a dataset function makes a
    variable.
    """


class SeveralProcessesError(ContextError, ValueError):
    """Raised when a strategy of one process is created in a job of several processes.

    Also raised when some of its devices belong to another process.

    Source:
        `tf.distribute.MirroredStrategy`: a `RuntimeError` for remote workers, a `ValueError` if
        some devices are remote.
    """


class AxisNameError(JaxdistError, NameError):
    """Raised at trace time when a step uses a mesh axis that the strategy does not have."""


class DivergentCollectiveError(JaxdistError, RuntimeError):
    """Raised at trace time when replicas may disagree on whether they reach a collective."""


class NoRowsError(JaxdistError, ValueError):
    """Raised when one replica has no rows in a step, and its empty mean would reach the others."""


class ReplicaDriftError(JaxdistError, RuntimeError):
    """Raised when replicas of one mirrored value no longer hold the same bits."""


class NotFiniteError(JaxdistError, FloatingPointError):
    """Raised when a step computes a nan or an infinity, and JAX was configured to check."""


class BackendStartedError(JaxdistError, RuntimeError):
    """Raised when virtual devices are requested after JAX has started its backend."""


class ConfigError(JaxdistError, ValueError):
    """Raised when a configuration file or an override is not valid."""


class CheckpointError(JaxdistError, RuntimeError):
    """Raised when a checkpoint cannot be read or written."""


class DamagedCheckpointError(CheckpointError):
    """Raised when the files of a checkpoint changed after they were written."""


class BucketError(CheckpointError, OSError):
    """Raised when a bucket (`gs://`, `s3://`) cannot be listed, read or written.

    Attributes:
        is_refused: Whether the credentials do not allow the access.
    """

    is_refused = False


class NonFiniteLossError(JaxdistError, ArithmeticError):
    """Raised by training when a loss is not finite."""


class OutOfRangeError(JaxdistError, StopIteration):
    """Raised by `DistributedIterator.get_next` when no element is left.

    Also a `StopIteration`, so that code written for `tf.distribute` and plain Python both catch it.

    Source:
        `tf.errors.OutOfRangeError`.
    """


class OtherProcessError(JaxdistError, RuntimeError):
    """Raised when the cause of an error is another process of the job.

    Args:
        message: The message, whose first line names exactly the processes in `processes`.
        processes: The indices of the processes that are the cause.

    Example:
        >>> error = jaxdist.errors.UnavailableError("process 1 has ended.", [1])
        >>> error.processes
        (1,)
    """

    def __init__(self, message: str = "", processes: collections.abc.Iterable[int] = ()) -> None:
        super().__init__(message)
        self.processes: tuple[int, ...] = tuple(processes)


class DeadlineExceededError(OtherProcessError, TimeoutError):
    """Raised when a collective between processes takes longer than its `timeout_seconds`.

    Source:
        `tf.errors.DeadlineExceededError`.
    """


class UnavailableError(OtherProcessError):
    """Raised when another process of the job has ended, so that a collective cannot complete.

    Source:
        `tf.errors.UnavailableError`.
    """


class PSUnavailableError(UnavailableError):
    """Raised when a parameter server does not answer, and has not restarted in time.

    `processes` has the index of the server.

    Source:
        `PSUnavailableError` in `tf.distribute`'s coordinator, a `tf.errors.UnavailableError`.
    """


class WorkerUnavailableError(UnavailableError):
    """Raised when a worker was lost; its closures run on other workers.

    `processes` has the index of the worker. `join` raises it only when all workers are lost, or
    when the same closure was running each time that a worker was lost.

    Source:
        `tf.errors.UnavailableError` whose message names a task of the job worker.
    """


class ProgramMismatchError(OtherProcessError):
    """Raised when the processes of a job do not run the same program on the same structures."""


class SavedProgramError(JaxdistError, RuntimeError):
    """Raised when a saved program is damaged, or is not for this step, device or version."""


class CancelledError(JaxdistError, RuntimeError):
    """Raised by the results of closures that were cancelled because another one had failed.

    Source:
        `tf.errors.CancelledError`.
    """


class ClosureInputError(JaxdistError, RuntimeError):
    """Raised when a scheduled function needs a per-worker dataset or value that failed.

    Args:
        message: The message.
        original_exception: The error that the dataset function raised.

    Example:
        >>> error = jaxdist.errors.ClosureInputError("no dataset", OSError("no file"))
        >>> error.original_exception
        OSError('no file')

    Source:
        `ClosureInputError` in `tf.distribute`'s coordinator.
    """

    def __init__(self, message: str = "", original_exception: BaseException | None = None) -> None:
        super().__init__(message)
        self.original_exception = original_exception


class ClusterError(JaxdistError, ValueError, RuntimeError):
    """Raised when a description of a cluster is not valid, or its processes cannot connect."""


class DuplicateTaskError(ClusterError, KeyError):
    """Raised when two processes of a job are the same task.

    Also a `KeyError`, which `tf.distribute` raises for two resolvers with the same task.
    """

    # The `str` of a KeyError is the repr of its argument.
    __str__ = Exception.__str__


class LaunchError(JaxdistError, RuntimeError):
    """Raised when the processes of a job cannot be started."""


class UnauthenticatedError(JaxdistError, PermissionError):
    """Raised when the caller of a server has no secret, or the wrong one.

    Source:
        `tf.errors.UnauthenticatedError`.
    """


class UnknownError(JaxdistError, RuntimeError):
    """Raised when another task raised an error that is not an error of jaxdist.

    Source:
        `tf.errors.UnknownError`.
    """


class MissingExtraError(JaxdistError, ImportError):
    """Raised when an optional package is needed but not installed."""


class MissingModuleError(JaxdistError, ImportError):
    """Raised when a documented name that does not exist is imported; see `MissingNameError`."""


class MissingNameError(JaxdistError, AttributeError):
    """Raised when a documented name does not exist; the message says what replaces it."""


class RetraceWarning(UserWarning):
    """Warns about a step that is traced repeatedly; `warnings.filterwarnings` silences it."""


class UnevenMeanWarning(UserWarning):
    """Warns about a mean that weights replicas equally although their numbers of rows differ.

    A division by another number, such as a dim, that equals the number of replicas may also cause
    it.
    """


class DividedMetricWarning(UserWarning):
    """Warns about a metric whose values are already divided by the rows of all replicas.

    A division by another number that equals the size of the global batch may also cause it.
    """


class StateDivergenceWarning(UserWarning):
    """Warns that a result with the structure of an argument differs between replicas."""
