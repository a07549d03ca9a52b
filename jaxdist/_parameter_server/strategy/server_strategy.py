"""`ServerStrategy`: what both strategies with parameter servers share."""

import functools
import inspect
import itertools
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import _compat
from jaxdist._called import call_as, called
from jaxdist._mesh import ReplicaMesh
from jaxdist._parameter_server.closures.adopted import Adopted
from jaxdist._parameter_server.closures.traced import Recent
from jaxdist._parameter_server.strategy.links import LocalWorkerLink, Note
from jaxdist._parameter_server.strategy.prepare import Prepared, Preparer
from jaxdist._parameter_server.variables.make_shards import make_shards
from jaxdist._parameter_server.variables.server_variable import ServerVariable
from jaxdist._parameter_server.variables.servers import Servers
from jaxdist._parameter_server.variables.sharded import ShardedVariable
from jaxdist._parameter_server.worker.worker import Worker
from jaxdist._program import RunOptions, check_options, function
from jaxdist._strategies import Strategy
from jaxdist._validate import check_call_arguments, check_callable
from jaxdist._values import Variable, current_binding, get_call_context
from jaxdist.errors import ContextError
from jaxdist.training import require_extra

_SIGNATURE = inspect.signature(Variable.__init__)


class ServerStrategy(Strategy):
    """A strategy whose variables are on servers, and whose steps run here or on workers."""

    storage: Servers
    _has_servers = True

    @property
    def worker_number(self) -> int:
        """The number of this worker, where each worker makes a strategy; else 0."""
        return 0

    def _set_up_servers(
        self,
        layout: ReplicaMesh,
        storage: Servers,
        partitioner: Callable[..., Sequence[int]] | None = None,
        max_staleness: int | None = None,
    ) -> None:
        """Prepare the strategy.

        Args:
            layout: The replicas of one worker.
            storage: The servers.
            partitioner: Which variables are cut into shards.
            max_staleness: The bound of the servers.
        """
        # Functions are exported for the workers, also where these are in this process.
        require_extra("grpcio", "export the functions that workers run")
        self._set_up(layout)
        self.storage = storage
        self._fence = storage.fence
        self.adopted = Adopted()
        _compat.show_as_array(ServerVariable)
        self._partitioner = partitioner
        self._preparer_here = call_as("strategy.run", Preparer, self, is_for_workers=False)
        # Steps that run in this process have numbers of their own.
        worker = Worker(storage, layout, max_staleness)
        client = secrets.token_hex(8)
        self._here = LocalWorkerLink(-1, worker, client, self._make_note(client))
        self._numbers = itertools.count(1)
        self._steps: Recent[Any, Callable[..., Any]] = Recent(64)
        # The worker keeps values between its steps, and runs one at a time.
        self._lock = threading.RLock()

    # Variables

    def _create_variable(self, args: Any, kwargs: Any) -> Any:
        if self._partitioner is None:
            return object.__new__(ServerVariable)
        given = _SIGNATURE.bind(None, *args, **kwargs)
        given.apply_defaults()
        own = dict(given.arguments)
        del own["self"]
        name = own["name"] or "Variable"
        shards = make_shards(
            own["shape"], own["dtype"], self._partitioner, own.pop("initial_value"), name
        )
        if len(shards) == 1:
            return ServerVariable(shards[0].make_value, **own)
        parts = []
        for n, shard in enumerate(shards):
            given = {**own, "shape": shard.shape, "name": f"{name}/part_{n}"}
            parts.append(ServerVariable(shard.make_value, **given))
        return ShardedVariable(parts, name=name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        raise ContextError(
            f"copy.deepcopy was called on a {type(self).__name__}.\n\n"
            "The variables are on its servers, and a copy would share them.\n\n"
            f"Make a second {type(self).__name__} of the same cluster."
        )

    # Running here

    @called("strategy.run")
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
        *more: Any,
    ) -> Any:
        """Run `fn` on the replicas of the worker that runs the scheduled function around it.

        Outside of a scheduled function it runs in this process: it reads variables of the servers
        and sends its changes, as a worker does. This is logged once.

        Args:
            fn: As for `Strategy.run`.
            args: As for `Strategy.run`.
            kwargs: As for `Strategy.run`.
            options: As for `Strategy.run`.
            *more: As for `Strategy.run`.

        Source:
            `tf.distribute.ParameterServerStrategy.run`.
        """
        if current_binding() is not None or get_call_context().in_step is not None:
            return super().run(fn, args, kwargs, options, *more)
        check_call_arguments(args, kwargs, (options, *more) if more else ())
        check_callable(fn)
        options = None if options is None else check_options(options)
        self._before_run_here()

        def make_step() -> Callable[..., Any]:
            def step(*args: Any, **kwargs: Any) -> Any:
                return super(ServerStrategy, self).run(fn, args, kwargs, options)

            step.__name__ = getattr(fn, "__name__", "function")
            if options is None or not options.static_argnames:
                return step
            # The names are those of the parameters of `fn`.
            return function(functools.wraps(fn)(step), static_argnames=options.static_argnames)

        with self._lock, self.scope():
            step = self._steps.find((fn, options), make_step)
            prepared = self._preparer_here.prepare(step, tuple(args), dict(kwargs or {}))
            number = next(self._numbers)
            result = self._run_here(prepared, number)
        return jax.tree.map(lambda x: jnp.asarray(x) if type(x) is np.ndarray else x, result)

    @property
    def _unwraps(self) -> bool:
        return self.layout.num_replicas == 1

    def _make_note(self, client: str) -> Note:
        """Return what is called with the servers that have counted a step that ran here."""
        return lambda number, counted, read: None

    def _run_here(self, prepared: Prepared, number: int) -> Any:
        """Run a prepared step in this process; return its results."""
        self.storage.save_new()
        return self._here.run(prepared, number, self._fence.value, number)

    def _before_run_here(self) -> None:
        """Do what comes before a step that runs in this process."""
