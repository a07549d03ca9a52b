"""`WorkerExtended`: the lower-level interface of a strategy of one worker."""

import contextlib
import re
from collections.abc import Sequence
from typing import Any

from jaxdist._called import called, refuse
from jaxdist._cluster import Task
from jaxdist._collectives import ReduceOp
from jaxdist._devices import runtime
from jaxdist._parameter_server.variables.server_variable import ServerVariable
from jaxdist._strategies import StrategyExtended
from jaxdist._typing import PyTree
from jaxdist._validate import as_list, check_instance
from jaxdist._values import Variable


def name_task(task: Task) -> str:
    """Return the name of a task, as names of devices begin."""
    return f"/job:{task.job}/replica:0/task:{task.index}"


_NAME = re.compile(r"/job:(?P<job>\w+)(/replica:\d+)?(/task:(?P<task>\d+))?(/device:(?P<own>.+))?")


class WorkerExtended(StrategyExtended):
    """The lower-level interface of a strategy with parameter servers that each worker makes.

    Args:
        strategy: The strategy.
        task: This worker; None without a cluster.
    """

    __slots__ = ("_task",)

    def __init__(self, strategy: Any, task: Task | None) -> None:
        super().__init__(strategy)
        self._task = task

    # Where things are

    @property
    def worker_devices(self) -> Sequence[str]:
        """Full names of the devices of this worker, replica by replica.

        Example:
            >>> jaxdist.compat.v1.experimental.ParameterServerStrategy().extended.worker_devices
            ['/job:localhost/replica:0/task:0/device:CPU:0']
        """
        names = [runtime.device_name(d) for d in self._strategy.layout.devices]
        if self._task is None:
            return names
        return [f"{name_task(self._task)}/device:{n.partition('/device:')[2]}" for n in names]

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Names of the parameter servers; without a cluster, the device that keeps the variables.

        Example:
            >>> jaxdist.compat.v1.experimental.ParameterServerStrategy().extended.parameter_devices
            ('/job:localhost/replica:0/task:0/device:CPU:0',)
        """
        if self._task is None or self._strategy.layout.variables_on is not None:
            return super().parameter_devices
        return tuple(f"/job:ps/task:{n}" for n in range(len(self._task.servers)))

    def _place_with(self, variable: Variable) -> contextlib.AbstractContextManager[None]:
        # Without a cluster there are no servers.
        is_remote = isinstance(variable, ServerVariable)
        return variable.place_new_here() if is_remote else contextlib.nullcontext()

    @called("StrategyExtended.non_slot_devices")
    def non_slot_devices(self, var_list: Sequence[Variable]) -> Any:
        """Return the variable with the first name: its server also has the state.

        Args:
            var_list: The optimized variables.

        Raises:
            ArgumentTypeError: Something in `var_list` is not a variable.
            ArgumentError: `var_list` is empty.
        """
        remedy = "Pass for instance var_list=[variable]."
        listed = as_list("var_list", var_list, "a list of variables", remedy)
        for number, variable in enumerate(listed):
            name = f"var_list[{number}]"
            check_instance(name, variable, Variable, "a jaxdist.Variable", remedy)
        if not listed:
            raise refuse(
                "var_list=[].",
                "State that belongs to no variable is on the server of the first variable.",
                remedy,
            )
        return min(listed, key=lambda v: v.name)

    def _check_colocated(self, given: Any) -> None:
        super()._check_colocated(self._translate(given))

    # What this task does

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each worker builds its own program: True.

        Example:
            >>> strategy = jaxdist.compat.v1.experimental.ParameterServerStrategy()
            >>> strategy.extended.experimental_between_graph
            True
        """
        return True

    @property
    def experimental_should_init(self) -> bool:
        """Whether the first values of variables are those of this process: it is the chief.

        Example:
            >>> strategy = jaxdist.compat.v1.experimental.ParameterServerStrategy()
            >>> strategy.extended.experimental_should_init
            True
        """
        task = self._task
        return task is None or task.is_chief or task.job == "evaluator"

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process should write checkpoints: it is the chief.

        Example:
            >>> jaxdist.compat.v1.experimental.ParameterServerStrategy().extended.should_checkpoint
            True
        """
        return self.experimental_should_init

    # Reductions

    @called("StrategyExtended.reduce_to")
    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        destinations: Any,
        options: Any = None,
        *,
        experimental_hints: Any = None,
    ) -> PyTree:
        """Reduce over the replicas of this worker, as `StrategyExtended.reduce_to`.

        Raises:
            ArgumentError: The destination is a device of another task.
        """
        target = self._translate(destinations)
        return super().reduce_to(
            reduce_op, value, target, options, experimental_hints=experimental_hints
        )

    @called("StrategyExtended.batch_reduce_to")
    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: Any = None,
        *,
        experimental_hints: Any = None,
    ) -> list[PyTree]:
        """Reduce several values, as `StrategyExtended.batch_reduce_to`.

        Raises:
            ArgumentError: A destination is a device of another task.
        """
        pairs: Any = value_destination_pairs
        if isinstance(pairs, (list, tuple)):
            pairs = [
                (pair[0], self._translate(pair[1]))
                if isinstance(pair, tuple) and len(pair) == 2
                else pair
                for pair in pairs
            ]
        return super().batch_reduce_to(
            reduce_op, pairs, options, experimental_hints=experimental_hints
        )

    @called("StrategyExtended.broadcast_to")
    def broadcast_to(self, tensor: PyTree, destinations: Any) -> PyTree:
        """Copy one value to devices of this worker, as `StrategyExtended.broadcast_to`.

        Raises:
            ArgumentError: The destination is a device of another task.
        """
        target = self._translate(destinations)
        return super().broadcast_to(tensor, target)

    def _translate(self, destinations: Any) -> Any:
        """Return destinations with JAX's names for the devices of this task."""
        if isinstance(destinations, (list, tuple)):
            return type(destinations)(self._translate(d) for d in destinations)
        if self._task is None or not isinstance(destinations, str):
            return destinations
        found = _NAME.fullmatch(destinations)
        if found is None or found["job"] == "localhost":
            return destinations
        if (found["job"], int(found["task"] or 0)) != (self._task.job, self._task.index):
            raise refuse(
                f"the destination {destinations!r}, and this process is {name_task(self._task)}.",
                "Workers are not in step with each other, so a value of one of them stays with "
                "it. Values reach a parameter server by a change of a variable.",
                f"Pass one of {list(self.worker_devices)}, or a variable.",
            )
        return found["own"] or self.worker_devices[0].partition("/device:")[2]
