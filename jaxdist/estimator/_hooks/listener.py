"""`CheckpointSaverListener`: functions that are called around each checkpoint."""

from jaxdist.estimator._hooks.session import Session


class CheckpointSaverListener:
    """Base class of listeners, which run before and after a checkpoint is saved.

    Only the chief calls them.

    Example:
        >>> class Tell(jaxdist.estimator.CheckpointSaverListener):
        ...     def after_save(self, session, global_step_value):
        ...         print("saved", global_step_value)

    Source:
        `tf.estimator.CheckpointSaverListener`.
    """

    def begin(self) -> None:
        """Run before the variables are restored or made."""

    def before_save(self, session: Session, global_step_value: int) -> None:
        """Run before a checkpoint is saved.

        Args:
            session: The model and the global step.
            global_step_value: The step of the checkpoint.
        """

    def after_save(self, session: Session, global_step_value: int) -> bool | None:
        """Run after a checkpoint is on disk.

        Args:
            session: The model and the global step.
            global_step_value: The step of the checkpoint.

        Returns:
            True to end the training.
        """

    def end(self, session: Session, global_step_value: int) -> None:
        """Run at the end of a training that raised nothing, after the last checkpoint.

        Args:
            session: The model and the global step.
            global_step_value: The last step.
        """
