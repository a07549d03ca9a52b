"""The report of a run."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class TrainingReport:
    """The report of a run.

    Attributes:
        steps: The completed steps of all runs together.
        num_replicas: The replicas of this run.
        unit: The unit of throughput, such as images or bytes.
        evaluation: The measures of the last evaluation; None if the run was interrupted.
        headline: A sentence about the evaluation; None if the run was interrupted.
        units_per_s: Units of training data per second, without the first step (it compiles),
            evaluation and checkpoints; None if the run had fewer than two steps.
        was_interrupted: Whether Ctrl-C ended the run.
        next_step: The step of the checkpoint from which the next run resumes; None if there is no
            checkpoint.
        was_finished: Whether an earlier run was finished, so that this one did nothing.
    """

    steps: int
    num_replicas: int
    unit: str
    evaluation: dict[str, float] | None
    headline: str | None
    units_per_s: float | None
    was_interrupted: bool
    next_step: int | None
    was_finished: bool = False
