"""`PreemptionCheckpointHandler`, which saves at one step in all processes before a job ends."""

import contextlib
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

from jaxdist._called import called, refuse, refuse_type
from jaxdist._checkpoints import Restored
from jaxdist._cluster import read_task
from jaxdist._preemption.config import (
    CompleteConfig,
    ReadMetadata,
    TerminationConfig,
    complete_config,
    find_metadata_server,
)
from jaxdist._preemption.notices import Notices, Questions, Sigterm
from jaxdist._preemption.saving import Saving
from jaxdist._preemption.step_agreement import FINAL, StepAgreement
from jaxdist._processes import (
    LocalStore,
    Process,
    at_leaving,
    get_agreement,
    get_process_of_job,
    get_settings,
    get_store,
)
from jaxdist._validate import check_callable, check_instance, show
from jaxdist.cluster_resolver import ClusterResolver
from jaxdist.errors import ContextError, OtherProcessError, UnsupportedError

_LOG = logging.getLogger("jaxdist")
_CALLER = "PreemptionCheckpointHandler"
# As in TensorFlow: the processes need one or two more steps to save at the same step.
_STEPS_BEFORE_THE_END = 6
# All processes make their handlers in the same order, so their keys agree.
_numbers = itertools.count()


class PreemptionCheckpointHandler:
    """Saves a checkpoint at the same step in all processes when the job will be ended.

    The handler restores the newest checkpoint when it is made. Then `run` calls each training step.
    When a process gets a notice (SIGTERM, see `TerminationConfig`), all processes agree on a step,
    save after it, and end with an exit code that tells the platform to start the job again. Make
    the handler after the strategy, in every process, and in the main thread.

    The state consists of Flax NNX objects and variables, which are saved as they are at that step;
    a restore writes into them. For other state, pass a function that returns the number of
    completed steps and the state, and take the restored state from `handler.restored`.

    Guarantees:
        All processes save after the same number of calls of `run`.
        The checkpoint is complete before `exit_fn` is called in any process.
        A further notice, while one is handled, has no effect.

    Cost:
        Without a notice, a few microseconds for each `run`. In a job of several processes, a thread
        polls the store of the job ten times a second.

    Args:
        cluster_resolver: The resolver of the strategy, `strategy.cluster_resolver`. None, or a
            resolver without tasks, means the processes that this one has joined.
        checkpoint_or_checkpoint_manager: The state to save: `(checkpoints, state)` with a
            `training.Checkpoints`, or a state alone. The state may be a function.
        checkpoint_dir: The directory for a state alone, also `gs://` or `s3://`. One checkpoint is
            kept.
        termination_config: The notice, the exit, the grace period, and how to save.
        read_metadata: Reads a path of the metadata server of Google Compute Engine; if given, this
            machine counts as one of Compute Engine. None detects whether it is one.

    Attributes:
        restored: The checkpoint that was read (step, state and notes), or None.

    Raises:
        ArgumentError: No directory, or arrays that change with each step.
        ArgumentTypeError: An argument has the wrong type.
        UnsupportedError: The cluster has parameter servers.
        ContextError: The resolver has several tasks that this process has not joined; or SIGTERM is
            the notice, and this is not the main thread.
        CheckpointError: The checkpoint does not fit the state, or is damaged.

    Example:
        >>> import tempfile
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> handler = jaxdist.experimental.PreemptionCheckpointHandler(
        ...     None, model, checkpoint_dir=tempfile.mkdtemp()
        ... )
        >>> while handler.total_run_calls < 3:
        ...     result = handler.run(lambda: "a step")
        >>> handler.total_run_calls, result
        (3, 'a step')
        >>> handler.close()

    Source:
        `tf.distribute.experimental.PreemptionCheckpointHandler`.
    """

    @called(_CALLER)
    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_checkpoint_manager: Any,
        checkpoint_dir: Any = None,
        termination_config: TerminationConfig | None = None,
        *,
        read_metadata: ReadMetadata | None = None,
    ) -> None:
        kinds = (TerminationConfig, type(None))
        remedy = "Pass for instance TerminationConfig(grace_period=120), or leave it out."
        what = "a TerminationConfig or None"
        check_instance("termination_config", termination_config, kinds, what, remedy)
        if read_metadata is not None:
            remedy = "Leave it out: then jaxdist detects whether this is such a machine."
            check_callable(read_metadata, "read_metadata", remedy)
        members = find_members(cluster_resolver)
        self._saving = Saving(checkpoint_or_checkpoint_manager, checkpoint_dir)
        self._config: CompleteConfig = complete_config(
            termination_config, read_metadata or find_metadata_server()
        )
        self._process = members
        self.restored: Restored | None
        self.restored, self._runs = self._saving.restore()
        self._has_ended = False
        self._has_begun = False
        self._seconds_of_step = 0.0
        self._steps_timed = 0
        watch = self._config.watch
        notices: Notices = Sigterm() if watch is None else Questions(watch)
        self._agreement = StepAgreement(
            (get_store() if members.count > 1 else None) or LocalStore(),
            members,
            f"jaxdist/preemption/{next(_numbers)}",
            notices,
            self._runs,
            self._config.grace,
            get_settings().collective_seconds,
        )
        at_leaving(self._agreement.stop)
        # A deleted handler restores the previous handler of SIGTERM. At the end of the program it
        # does not: a second SIGTERM must not change the exit code.
        self._stop = cast(
            "Any", weakref.finalize(self, _stop, self._agreement, notices, self._saving)
        )
        self._stop.atexit = False

    @property
    def total_run_calls(self) -> int:
        """Number of completed calls of `run`, including those before restarts of the job."""
        return self._runs

    @called(f"{_CALLER}.run")
    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a training step; before it, save and end the job if all processes have agreed to.

        Args:
            distributed_train_function: The step, which calls `strategy.run`.
            *args: Arguments of the step.
            **kwargs: Keyword arguments of the step.

        Returns:
            The result of the step.

        Raises:
            OtherProcessError: A process that must agree has ended, or does not answer.
            CheckpointError: The checkpoint could not be written; or, at the first call, the state's
                function returned a step below that of the restored checkpoint.
            Everything that the step raises; such a call does not count.

        Example:
            >>> import tempfile
            >>> handler = jaxdist.experimental.PreemptionCheckpointHandler(
            ...     None, nnx.Linear(2, 1, rngs=nnx.Rngs(0)), tempfile.mkdtemp()
            ... )
            >>> handler.run(lambda x: x + 1, 1)
            2
            >>> handler.close()
        """
        check_callable(distributed_train_function, "distributed_train_function")
        self._check((), {})
        began = time.monotonic()
        try:
            result = distributed_train_function(*args, **kwargs)
        except BaseException:
            self._agreement.take_back()
            raise
        self._runs += 1
        self._steps_timed += 1
        seconds = time.monotonic() - began
        self._seconds_of_step += (seconds - self._seconds_of_step) / self._steps_timed
        return result

    @called(f"{_CALLER}.save_checkpoint_if_preempted")
    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Save and end the job if all processes have agreed to; call it once after each step.

        Args:
            *args: Arguments of `save_fn`; without `save_fn`, pass none.
            **kwargs: Keyword arguments of `save_fn`; without `save_fn`, `notes` of
                `Checkpoints.save`.

        Raises:
            ArgumentTypeError: Other arguments were passed without a `save_fn`.
            OtherProcessError: A process that must agree has ended, or does not answer.
            CheckpointError: The checkpoint could not be written; or, at the first call, the state's
                function returned a step below that of the restored checkpoint.

        Example:
            >>> import tempfile
            >>> handler = jaxdist.experimental.PreemptionCheckpointHandler(
            ...     None, nnx.Linear(2, 1, rngs=nnx.Rngs(0)), tempfile.mkdtemp()
            ... )
            >>> handler.save_checkpoint_if_preempted(notes={"epoch": 1})
            >>> handler.total_run_calls
            1
            >>> handler.close()
        """
        if self._config.save is None and (args or set(kwargs) - {"notes"}):
            raise refuse_type(
                f"{show(args or kwargs)}.",
                "Without save_fn, Checkpoints.save gets the state of the handler and notes=.",
                "Pass notes={...}, or TerminationConfig(save_fn=...), which gets the arguments.",
            )
        self._check(args, kwargs)
        self._runs += 1
        self._seconds_of_step, self._steps_timed = 0.0, 0

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Return a context manager for the training loop, so that a late notice is not lost.

        If a process has a notice that was not handled when the block ends, all processes save and
        end. All processes must leave the block after the same number of runs.

        Example:
            >>> import tempfile
            >>> handler = jaxdist.experimental.PreemptionCheckpointHandler(
            ...     None, nnx.Linear(2, 1, rngs=nnx.Rngs(0)), tempfile.mkdtemp()
            ... )
            >>> with handler.watch_preemption_scope():
            ...     result = handler.run(lambda: "a step")
            >>> handler.close()
        """
        yield
        if self._has_ended:
            return
        said = "1" if self._agreement.has_notice() else ""
        agreement = get_agreement() if self._process.count > 1 else None
        texts = (said,) if agreement is None else agreement.gather("preemption scope", said)
        if any(texts):
            self._save_and_exit((), {})

    def close(self) -> None:
        """Stop listening: SIGTERM has its previous effect, and `run` only calls the step.

        All processes must call it after the same run. Deleting the handler has the same effect.
        """
        self._has_ended = True
        self._stop()

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Save if all processes save now, and count the next run."""
        if not self._has_begun:
            if self._config.save is None:
                self._saving.check_first_step(self.restored)
            self._has_begun = True
        agreement = self._agreement
        if self._has_ended or not agreement.start_run():
            return
        if agreement.grace > 0 and agreement.round != FINAL:
            began = time.monotonic()
            self._save(args, kwargs)
            seconds = time.monotonic() - began
            left = agreement.grace - _STEPS_BEFORE_THE_END * self._seconds_of_step - seconds
            agreement.start_final_round(agreement.get_notice_time() + left)
            _LOG.info("Training continues until about %.0f s after the notice.", left)
            agreement.start_run()
            return
        self._save_and_exit(args, kwargs)

    def _save_and_exit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._save(args, kwargs)
        agreement = get_agreement() if self._process.count > 1 else None
        if agreement is not None:
            try:
                # No process leaves before all have saved.
                agreement.gather("preemption saved", "")
            except OtherProcessError as error:
                _LOG.warning("This process has saved and ends. %s", error)
        self._has_ended = True
        self._agreement.stop()
        self._saving.close()
        _LOG.info("The checkpoint is complete, and the job ends.")
        self._config.exit()
        # `exit_fn` has returned, so training continues.
        self.close()

    def _save(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _LOG.warning(
            "The job will be ended (%s in process %d): saving after run %d.",
            self._agreement.reason or "a notice",
            self._agreement.leader or 0,
            self._runs,
        )
        if self._config.save is not None:
            self._config.save(*args, **kwargs)
        else:
            self._saving.save(self._runs, **kwargs)


def _stop(agreement: StepAgreement, notices: Notices, saving: Saving) -> None:
    agreement.stop()
    notices.stop()
    saving.close()


def find_members(resolver: Any) -> Process:
    """Return this process among those that train together.

    Raises:
        ArgumentTypeError: `resolver` is not a resolver.
        UnsupportedError: The cluster has parameter servers.
        ContextError: The cluster has several tasks, and this process has not joined them.
        ArgumentError: The number of tasks differs from that of the joined processes.
    """
    remedy = "Pass strategy.cluster_resolver, or None for the processes that were joined."
    kinds = (ClusterResolver, type(None))
    check_instance("cluster_resolver", resolver, kinds, "a ClusterResolver", remedy)
    joined = get_process_of_job()
    task = None if resolver is None else read_task(resolver)
    counts: dict[str, int] = {} if task is None else task.counts
    if "ps" in counts:
        raise refuse(
            f"a cluster with parameter servers: {sorted(counts)}.",
            "It saves at one step of all workers, and with parameter servers each worker has its "
            "own steps.",
            "Save with training.Checkpoints from the coordinator.",
            kind=UnsupportedError,
        )
    if task is not None and task.job == "evaluator":
        return Process(0, 1)
    # Hosts of a TPU slice are joined without their addresses, and may be those of several slices.
    count = counts.get("chief", 0) + counts.get("worker", 0)
    if count > 1 and joined is None:
        raise refuse(
            f"a cluster of {count} tasks, and this process has joined no other.",
            "The processes agree over their connection.",
            "Make the strategy first: MultiWorkerMirroredStrategy(cluster_resolver=resolver).",
            kind=ContextError,
        )
    if count > 1 and joined is not None and joined.count != count:
        raise refuse(
            f"a cluster of {count} tasks, and this process has joined {joined.count}.",
            "All processes of the job save together.",
            "Pass strategy.cluster_resolver of the strategy that trains.",
        )
    return joined or Process(0, 1)
