"""How a run ended."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class TrainingReport:
    """How a run ended.

    Attributes:
        steps: Steps done since the first run.
        num_replicas: Replicas of this run.
        unit: What is counted: images, bytes.
        evaluation: Measures of the last evaluation, None where the run was interrupted.
        headline: The same in words, None where the run was interrupted.
        units_per_s: Units trained on in a second, without the first step (it compiles),
            evaluation and checkpoints; None where fewer than two steps were run.
        was_interrupted: Whether Ctrl-C ended it.
        next_step: Step of the checkpoint that the next run resumes from, None where there is
            none.
        was_finished: Whether it had ended before, so that nothing was done.
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
