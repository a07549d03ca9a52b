"""What a configuration tells of its training, so that it can be planned without data."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from jaxdist._program import RunOptions
from jaxdist._strategies import Strategy


@dataclasses.dataclass(frozen=True)
class JobStep:
    """A train step and its arguments, as `strategy.lower(fn, args, options=options)` takes them.

    Attributes:
        fn: The step, as the job runs it.
        args: Its arguments: NNX objects of `nnx.eval_shape`, `jax.ShapeDtypeStruct`s, and
            `PerReplica.of_global` of them for what each replica has a part of.
        options: What the job gives to `run` beside them.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    options: RunOptions | None = None


class Job(Protocol):
    """A training job that can be planned: `jobs.load_job` makes one of a configuration.

    Nothing of it reads data, makes an array or writes a file. The strategy may be one that only
    compiles.
    """

    @property
    def name(self) -> str:
        """What it trains, in a word or two."""
        ...

    @property
    def rows_per_replica(self) -> int:
        """Rows of a batch that one replica gets, as configured."""
        ...

    @property
    def logical_devices(self) -> int | str:
        """Devices of a replica, as configured: their number, or a shape such as `"2x2"`."""
        ...

    @property
    def rules(self) -> tuple[str, ...]:
        """Ways to lay out its state that it knows, the configured one first.

        Names are `"replicated"`, `"sharded_update"`, `"fsdp"`, `"tensor_parallel"` and
        `"fsdp_tensor_parallel"`; the tensor-parallel ones need more than one logical device. For
        `"fsdp_in_slice"` and `"fsdp_in_slice_tensor_parallel"` the strategy has the replica axes
        `("slice", "replica")`: state is cut over the second, and whole in each slice.
        """
        ...

    def step(self, strategy: Strategy, rows: int, rules: str) -> JobStep:
        """The train step for a strategy.

        Args:
            strategy: Whose replicas run it.
            rows: Rows of a batch that each replica gets.
            rules: One of `rules`.
        """
        ...
