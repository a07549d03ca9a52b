"""The protocol of a job, which can be planned without its data."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from jaxdist._program import RunOptions
from jaxdist._strategies import Strategy


@dataclasses.dataclass(frozen=True)
class JobStep:
    """A train step and its arguments, for `strategy.lower(fn, args, options=options)`.

    Attributes:
        fn: The step that the job runs.
        args: Its arguments: NNX objects from `nnx.eval_shape`, `jax.ShapeDtypeStruct`s, and
            `PerReplica.of_global` of these for values of which each replica has a part.
        options: The options that the job passes to `run`.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    options: RunOptions | None = None


class Job(Protocol):
    """A training job that can be planned. `jobs.load_job` makes one from a configuration.

    A job reads no data, makes no array and writes no file. Its strategy may be one that can only
    compile.
    """

    @property
    def name(self) -> str:
        """What the job trains, in a word or two."""
        ...

    @property
    def rows_per_replica(self) -> int:
        """The configured rows of a batch for each replica."""
        ...

    @property
    def logical_devices(self) -> int | str:
        """The configured devices of a replica: their number, or a shape such as `"2x2"`."""
        ...

    @property
    def rules(self) -> tuple[str, ...]:
        """The names of the rules by which its state can be placed, the configured one first.

        The names are `"replicated"`, `"sharded_update"`, `"fsdp"`, `"tensor_parallel"` and
        `"fsdp_tensor_parallel"`; the tensor-parallel ones need more than one logical device. For
        `"fsdp_in_slice"` and `"fsdp_in_slice_tensor_parallel"` the strategy has the replica axes
        `("slice", "replica")`: state is sharded over the second, and replicated over the first.
        """
        ...

    def step(self, strategy: Strategy, rows: int, rules: str) -> JobStep:
        """Return the train step for a strategy.

        Args:
            strategy: The strategy whose replicas run the step.
            rows: The rows of a batch for each replica.
            rules: One of `rules`.
        """
        ...
