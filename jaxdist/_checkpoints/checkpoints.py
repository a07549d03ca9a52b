"""`Checkpoints`: numbered checkpoints on Orbax, each complete or absent, with checksums."""

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Self, overload

from jax.sharding import Sharding

from jaxdist._buckets import Place, as_place
from jaxdist._called import called, refuse, refuse_type
from jaxdist._checkpoints.errors import describe_steps, make_directory_error, make_step_error
from jaxdist._checkpoints.leaves import (
    check_leaves,
    gather_whole_arrays,
    name_leaves,
    put_into,
    to_plain,
)
from jaxdist._checkpoints.opening import open_storage
from jaxdist._checkpoints.restore import Restored, restore_newest, restore_step
from jaxdist._checkpoints.save import Writer
from jaxdist._checkpoints.stacks import check_stacks
from jaxdist._checkpoints.survivors import Survivor, add_survivor, remove_survivor
from jaxdist._typing import PyTree
from jaxdist._validate import (
    ErrorNote,
    as_flag,
    as_integer,
    as_number,
    check_callable,
    check_instance,
    show,
)
from jaxdist.errors import ArgumentError, BucketError, CheckpointError, OtherProcessError

_LOG = logging.getLogger("jaxdist")
_NOTHING: Any = object()
_LAST_STEP = (1 << 63) - 1


class Checkpoints:
    """Numbered checkpoints in one directory: `save(step, (model, optimizer))` and `restore`.

    The state is any pytree of arrays, Flax NNX objects and variables. Notes are saved with it, as
    JSON. `restore((model, optimizer))` writes the newest checkpoint into these same objects.

    Guarantees:
        A checkpoint is complete or absent, even after SIGKILL, a full disk, or Ctrl-C.
        Changes after `save` (donated arrays, updated objects) do not affect the checkpoint.
        If a write fails in the background, the next call raises its error; so does `close`.
        A process that ends without `close` completes its checkpoint first.
        Ctrl-C in a call that waits takes effect after the checkpoint is written.
        `restore` returns bit for bit what `save` received. Otherwise it raises an error and
        leaves the objects unchanged.
        One job writes at a time: after its first `save`, a `save` of another job raises an error.
        In a job of several processes, all processes make the same calls. Each writes its own
        shards, and a checkpoint is complete when all shards are written.
        No code from the files is run, and no pickle is read.

    Cost:
        `save` waits for the previous checkpoint, copies the arrays to the host, shard by shard,
        and returns; threads write the files. All other methods except `path`, `on_failure` and
        `is_saving_in_progress` wait for them, and `close` leaves no thread behind. `restore` reads
        the files twice, once to compare them with their manifest.

    Args:
        directory: The directory, which is created if it does not exist; or `gs://BUCKET/FOLDER` or
            `s3://BUCKET/FOLDER`. The bucket must exist.
        keep: How many of the newest checkpoints to keep; older ones are deleted.
        timeout_seconds: How long `save` and `restore` wait for other processes; None means
            `JAXDIST_COLLECTIVE_SECONDS`.

    Raises:
        CheckpointError: The directory cannot be created or read.

    Example:
        >>> import tempfile
        >>> with Checkpoints(tempfile.mkdtemp(), keep=2) as checkpoints:
        ...     for step in 1, 2, 3:
        ...         checkpoints.save(step, {"w": jnp.full(3, step)}, {"epoch": 0})
        ...     kept = checkpoints.steps()
        ...     restored = checkpoints.restore({"w": jnp.zeros(3, int)})
        >>> kept, restored.state["w"].tolist(), restored.notes
        ((2, 3), [3, 3, 3], {'epoch': 0})

        In a training loop:

        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        >>> with Checkpoints(tempfile.mkdtemp()) as checkpoints:
        ...     restored = checkpoints.restore((model, optimizer))
        ...     first_step = 0 if restored is None else restored.step
        ...     checkpoints.save(first_step + 100, (model, optimizer))

    Source:
        Replaces `tf.train.CheckpointManager`. Orbax writes and reads the files.
    """

    @called("training.Checkpoints")
    def __init__(
        self, directory: str | Place, *, keep: int = 3, timeout_seconds: float | None = None
    ) -> None:
        self.directory = as_place("directory", directory, "runs/job")
        keep = as_integer("keep", keep, least=1)
        seconds = _as_seconds(timeout_seconds)
        self._storage = open_storage(self.directory)
        try:
            self._storage.make()
        except BucketError:
            raise
        except OSError as error:
            raise make_directory_error(self.directory, error) from error
        # The first `save` takes the lock, so that a process that only reads blocks no job.
        self._writer = Writer(self._storage, keep, seconds)
        self._keep = keep
        self._survivor: Survivor | None = None

    def steps(self) -> tuple[int, ...]:
        """Return the steps of the complete checkpoints, oldest first.

        Raises:
            CheckpointError: A checkpoint could not be written.
        """
        self._writer.wait()
        return self._storage.list_steps()

    @called("Checkpoints.path")
    def path(self, step: int) -> Place:
        """Return the directory of a checkpoint."""
        step = as_integer("step", step, least=0)
        return self.directory / str(step)

    @called("Checkpoints.save")
    def save(self, step: int, state: PyTree, notes: Mapping[str, Any] | None = None) -> None:
        """Start to write a checkpoint; `wait_until_finished` and `close` wait for it.

        Args:
            step: The number of completed steps. It names the checkpoint, and must be above the
                steps of all others; `discard_after` deletes later ones.
            state: Pytree of arrays, numbers, Flax NNX objects (modules, optimizers, metrics, keys)
                and variables.
            notes: A dict that JSON can represent.

        Raises:
            CheckpointError: A checkpoint of this or a later step exists; this or the previous
                checkpoint cannot be written; another job writes checkpoints here; or processes use
                different folders.
            OtherProcessError: Another process did not make the call in time, or has ended.
            ArgumentTypeError: A leaf is neither an array nor a number. The error names its path.
            ArgumentError: A variable has a value on each replica, and no aggregation that combines
                these values.

        Example:
            >>> import tempfile
            >>> with Checkpoints(tempfile.mkdtemp()) as checkpoints:
            ...     checkpoints.save(7, (nnx.Linear(2, 1, rngs=nnx.Rngs(0)), {"w": jnp.zeros(3)}))
            ...     checkpoints.steps()
            (7,)
        """
        step = as_integer("step", step, least=0, most=_LAST_STEP)
        if notes is not None and not isinstance(notes, Mapping):
            raise refuse_type(
                f"notes={show(notes)}.",
                "notes are a dict that JSON can represent, or None.",
                "Pass for instance notes={'epoch': 1}.",
            )
        with self._writer.calls:
            # This raises the error of the previous `save`, if it failed.
            steps = self._writer.read_steps("save", step)
            if steps and step <= steps[-1]:
                resume = f"Resume from step {steps[-1]}"
                raise make_step_error("step", step, self.directory, steps, resume)
            # Check all arguments first: a rejected call must not take the lock.
            written = _to_plain_json(notes or {})
            state = gather_whole_arrays(to_plain(state))
            check_leaves(state)
            self._writer.write(step, name_leaves(state), written)

    @called("Checkpoints.discard_after")
    def discard_after(self, step: int) -> tuple[int, ...]:
        """Delete the checkpoints of later steps, so that `save` can continue from `step`.

        Call it to train again from an older checkpoint. It waits for a checkpoint that is being
        written, and deletes this too if its step is later. If it deletes any, other jobs can no
        longer write into the directory, as after `save`.

        Cost:
            The newest checkpoint is deleted first. If the process is killed in between, the older
            ones remain, and `restore` takes the newest of these. In a job of several processes,
            all processes call it with the same step, and process 0 deletes.

        Args:
            step: The last step to keep; -1 deletes all checkpoints. A checkpoint of this step need
                not exist.

        Returns:
            The steps of the deleted checkpoints, oldest first, which are also logged.

        Raises:
            CheckpointError: The last checkpoint could not be written, one cannot be deleted, or
                another job writes checkpoints here.
            OtherProcessError: Another process did not make the call in time, has ended, or passed
                another step.

        Example:
            >>> import tempfile
            >>> with Checkpoints(tempfile.mkdtemp()) as checkpoints:
            ...     for step in 4, 5, 6:
            ...         checkpoints.save(step, {"w": jnp.full(3, step)})
            ...     restored = checkpoints.restore({"w": jnp.zeros(3, int)}, step=4)
            ...     discarded = checkpoints.discard_after(4)
            ...     checkpoints.save(5, restored.state)
            ...     checkpoints.steps()
            (4, 5)
            >>> discarded
            (5, 6)
        """
        step = as_integer("step", step, least=-1, most=_LAST_STEP)
        with self._writer.calls:
            deleted = self._writer.delete_after(step)
        if deleted:
            _LOG.info("Deleted %s in %s.", describe_steps(deleted), self.directory)
        return deleted

    def wait_until_finished(self) -> None:
        """Wait until the checkpoints of all calls of `save` are on disk.

        Raises:
            CheckpointError: A checkpoint could not be written.

        Example:
            >>> import tempfile
            >>> with Checkpoints(tempfile.mkdtemp()) as checkpoints:
            ...     checkpoints.save(7, {"w": jnp.zeros(3)})
            ...     checkpoints.wait_until_finished()
            ...     (checkpoints.path(7) / "state").is_dir()
            True
        """
        self._writer.wait()

    def is_saving_in_progress(self) -> bool:
        """Return whether a checkpoint is being written in the background.

        Example:
            >>> import tempfile
            >>> with Checkpoints(tempfile.mkdtemp()) as checkpoints:
            ...     checkpoints.is_saving_in_progress()
            False
        """
        return self._writer.is_writing()

    @overload
    def restore(
        self,
        state: PyTree,
        *,
        step: int | None = None,
        sharding: Sharding | None = None,
        skip_damaged: bool = False,
        stacks: str | None = None,
    ) -> Restored | None: ...

    @overload
    def restore(
        self,
        state: int,
        *,
        like: PyTree,
        sharding: Sharding | None = None,
        stacks: str | None = None,
    ) -> Restored: ...

    @called("Checkpoints.restore")
    def restore(
        self,
        state: PyTree,
        *,
        step: int | None = None,
        like: PyTree = _NOTHING,
        sharding: Sharding | None = None,
        skip_damaged: bool = False,
        stacks: str | None = None,
    ) -> Restored | None:
        """Read a checkpoint back into the objects that were saved.

        Shapes:
            Every leaf is global, as in `state`. The number of devices may differ from that at the
            time of `save`.

        Args:
            state: A state like the one that `save` received. NNX objects and variables in it are
                updated in place; arrays are returned as new arrays. With `like`, pass the step to
                read instead; then nothing is updated.
            step: One of `steps()`; None takes the newest.
            like: As in `restore_latest`.
            sharding: The sharding of every leaf, such as `strategy.replicated_sharding`; None takes
                the sharding of each leaf of the state.
            skip_damaged: As in `restore_latest`.
            stacks: As in `restore_latest`.

        Returns:
            The step, the state with the same objects, and the notes; None if the directory has no
            checkpoint.

        Raises:
            DamagedCheckpointError: Files differ from what was written. The error names them.
            CheckpointError: No checkpoint of this step exists, or it is of another model. The error
                lists the leaves that differ, with both shapes. Any error leaves the objects
                unchanged.
            OtherProcessError: Another process did not make the call in time, or has ended.

        Example:
            >>> import tempfile
            >>> model, other = (nnx.Linear(2, 1, rngs=nnx.Rngs(seed)) for seed in (0, 1))
            >>> with Checkpoints(tempfile.mkdtemp()) as checkpoints:
            ...     checkpoints.save(7, {"model": model, "epoch": jnp.array(3)})
            ...     restored = checkpoints.restore({"model": other, "epoch": jnp.array(0)})
            >>> restored.step, restored.state["epoch"].item(), restored.state["model"] is other
            (7, 3, True)
            >>> (model.kernel[...] == other.kernel[...]).all().item()
            True

        Source:
            The `restore` of `tf.train.Checkpoint`.
        """
        caller = "Checkpoints.restore"
        _check_sharding(sharding)
        as_flag("skip_damaged", skip_damaged)
        if like is not _NOTHING:
            if step is not None or isinstance(state, bool) or not isinstance(state, int):
                found = f"state={show(state)}" if step is None else f"step={show(step)}"
                raise refuse(
                    f"like=, and {found}.",
                    "With like, state is the number of the checkpoint, and step is left out.",
                    "Call restore(state, step=7) to update objects in place, or restore(7, "
                    "like=state) for new ones.",
                )
            if skip_damaged:
                raise _make_skip_error(state)
            with ErrorNote(f"It was raised by {caller}(like=...)."):
                return self._read(state, like, sharding, stacks=stacks)
        if step is not None:
            step = as_integer("step", step, least=0)
            if skip_damaged:
                raise _make_skip_error(step)
        # Update the objects at the very end: until then the restore can still fail.
        shapes = to_plain(state)
        with ErrorNote(f"It was raised by {caller}(state, step={step})."):
            read = self._read(step, shapes, sharding, skip_damaged, stacks)
        if read is None:
            return None
        return dataclasses.replace(read, state=put_into(state, read.state))

    @called("Checkpoints.restore_latest")
    def restore_latest(
        self,
        *,
        like: PyTree,
        sharding: Sharding | None = None,
        skip_damaged: bool = False,
        stacks: str | None = None,
    ) -> Restored | None:
        """Read the newest checkpoint, or the newest that is not damaged, as a new pytree.

        Args:
            like: A pytree of arrays, `jax.ShapeDtypeStruct`s and NNX objects, which gives
                structure, shapes and dtypes. It is not updated: the result has new NNX objects.
            sharding: As in `restore`.
            skip_damaged: If the newest checkpoint is damaged, restore the previous one, and move
                the damaged one into `damaged/`. Nothing is moved if all are damaged.
            stacks: A pattern as in `partition.Rules`, such as `"layers/**"`, of stacked layers
                that may have been saved in another number of chunks (`partition.Stage`): `[layers,
                ...]` and `[chunks, layers / chunks, ...]` are reshaped into each other, in the
                order of the model. The state of the optimizer has such paths too. A process reads
                as many layers as it has, and gets its own from the other processes.

        Returns:
            The restored checkpoint; None if the directory has no checkpoint.

        Raises:
            DamagedCheckpointError: The newest checkpoint is damaged; with `skip_damaged`, all are.
            CheckpointError: The checkpoint is of another model.
            ArgumentError: `stacks` matches no leaf.
            ArgumentTypeError: `stacks` is not a pattern.

        Example:
            >>> import tempfile
            >>> with Checkpoints(tempfile.mkdtemp()) as checkpoints:
            ...     print(checkpoints.restore_latest(like={"w": jnp.zeros(3)}))
            None
        """
        caller = "Checkpoints.restore_latest"
        _check_sharding(sharding)
        as_flag("skip_damaged", skip_damaged)
        with ErrorNote(f"It was raised by {caller}(like=...)."):
            return self._read(None, like, sharding, skip_damaged, stacks)

    def _read(
        self,
        step: int | None,
        like: PyTree,
        sharding: Sharding | None,
        skip_damaged: bool = False,
        stacks: str | None = None,
    ) -> Restored | None:
        """Return the checkpoint of a step, or the newest one, as new objects."""
        check_stacks(stacks)
        self._writer.wait()
        group = self._writer.find_group()
        if step is None:
            return restore_newest(self._storage, like, sharding, skip_damaged, group, stacks)
        return restore_step(self._storage, step, like, sharding, group, stacks)

    @called("Checkpoints.on_failure")
    def on_failure(self, callback: Callable[[], Any] | None) -> None:
        """Set the state to save when a step fails because of another process.

        When `run`, `reduce` or `gather` of a strategy over several processes raises an
        `OtherProcessError`, one of the surviving processes first saves the last complete step. It
        needs a full copy of the state on its own devices, and no collective. State in pieces (FSDP,
        `sharded_update`), variables with `ON_READ`, and state whose memory a step has taken
        (`donate_argnums`) cannot be saved in this way; then the last checkpoint counts. The error
        message names the checkpoint.

        Cost:
            The callback is called before each step. The state before a step stays in memory until
            a later state is computed: on GPU and TPU up to two more states, on CPU up to nine.

        Args:
            callback: A function that returns the number of completed steps and the state, as for
                `save`, and optionally notes, or a function that returns notes. It is called before
                each step, and must not change anything; in a job of one process it is never called.
                None removes it.

        Raises:
            ArgumentTypeError: `callback` is not callable.

        Example:
            >>> import tempfile
            >>> step, state = 0, {"w": jnp.zeros(3)}
            >>> with Checkpoints(tempfile.mkdtemp()) as checkpoints:
            ...     checkpoints.on_failure(lambda: (step, state))
        """
        if callback is not None:
            remedy = "Pass for instance lambda: (step, (model, optimizer))."
            check_callable(callback, "callback", remedy)
        if self._survivor is not None:
            remove_survivor(self._survivor)
            self._survivor = None
        if callback is not None:
            prepare = self._writer.prepare_alone
            self._survivor = Survivor(self._storage, self._keep, prepare, callback)
            add_survivor(self._survivor)

    def close(self) -> None:
        """Wait until the checkpoints are written, and release the lock of the directory.

        Raises:
            CheckpointError: A checkpoint could not be written.
        """
        self.on_failure(None)
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except (CheckpointError, OtherProcessError) as failure:
            if error is None:
                raise
            # The caller needs the error of the body, so this failure becomes a note on it.
            error.add_note(str(failure))


def _make_skip_error(step: int) -> ArgumentError:
    return refuse(
        f"skip_damaged=True, and the step {step}.",
        "skip_damaged looks for the newest good checkpoint, and step names one checkpoint.",
        "Leave the step out, or skip_damaged.",
    )


def _as_seconds(seconds: float | None) -> float | None:
    if seconds is None:
        return None
    seconds = as_number("timeout_seconds", seconds)
    if not seconds > 0:
        raise refuse(
            f"timeout_seconds={seconds!r}.",
            "It is a time in seconds, above 0.",
            "Pass for instance timeout_seconds=300, or leave it out.",
        )
    return seconds


def _check_sharding(sharding: Any) -> None:
    what = "a jax.sharding.Sharding, or None for the layout of each leaf"
    remedy = "Pass for instance sharding=strategy.replicated_sharding."
    check_instance("sharding", sharding, (Sharding, type(None)), what, remedy)


def _to_plain_json(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notes as `restore` will return them: tuples as lists, keys as strings."""
    try:
        text = json.dumps(dict(notes))
    except (TypeError, ValueError) as error:
        raise refuse_type(
            f"notes={show(notes)}: {error}.",
            "notes hold only values that JSON can represent.",
            "Turn arrays into lists or numbers, or put them in the state.",
        ) from error
    return json.loads(text, object_pairs_hook=_read_object)


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise refuse(
            f"notes with a dict of which two keys are the same string in JSON: {twice!r}.",
            "JSON has only strings as keys, so 1 and '1' are one key, and one value would be lost.",
            "Use strings as keys.",
        )
    return found
