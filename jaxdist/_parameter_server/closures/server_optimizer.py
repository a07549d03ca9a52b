"""`ServerOptimizer`: an optax transformation that servers apply to plain variables."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import optax

from jaxdist._called import called, refuse, refuse_type
from jaxdist._parameter_server.closures.cut import VariableUpdate, cut_update
from jaxdist._parameter_server.protocol import Read
from jaxdist._parameter_server.variables.make_shards import keep_array
from jaxdist._parameter_server.variables.server_variable import ServerVariable
from jaxdist._parameter_server.variables.sharded import ShardedVariable, list_shards
from jaxdist._validate import show
from jaxdist._values import DistributedValues, IndexedSlices
from jaxdist.errors import (
    MixedStrategyError,
    ReplicaValueError,
    ShapeError,
    UnsupportedError,
)

_CALLER = "ServerOptimizer"
_APPLY = f"{_CALLER}.apply_gradients"
_PAIRS = "optimizer.apply_gradients(zip(grads, variables))"
_NUMBERS = itertools.count()


def apply_updates(variable: Any, ops: Mapping[str, str], gradient: Any, what: str) -> None:
    """Let the servers apply the update program of each shard of a variable to its rows.

    Args:
        variable: The variable.
        ops: The operation of the server that updates a shard, by the name of the shard there.
        gradient: Its operand, in the shape and dtype of the variable.
        what: What the change is called in messages.
    """
    start, shards = 0, list_shards(variable)
    for shard in shards:
        own = gradient
        if len(shards) > 1:
            own = gradient[start : start + int(shard.shape[0])]
            start += int(shard.shape[0])
        shard.apply_update(ops[shard.remote_name], own, what)


class ServerOptimizer:
    """An optax transformation that the parameter servers apply to variables.

    A function on a worker sends gradients, and each server updates the variables that it has, from
    the value and the state that it has at that moment. `nnx.Optimizer` needs none of this: its
    `update` in a scheduled function does the same for NNX modules.

    Cost:
        For each variable one gradient of its size from the worker to its server.

    Args:
        tx: The transformation. It updates each variable from its own gradient alone.
        variables: The variables of one `ParameterServerStrategy`, whole or in shards.

    Raises:
        ArgumentTypeError: `tx` is not a transformation, or `variables` is not a list of
            variables on servers.
        ArgumentError: A variable is listed twice.
        MixedStrategyError: The variables are of several strategies.
        UnsupportedError: The update of one variable needs others, as that of
            `optax.clip_by_global_norm` does.
        MissingExtraError: flatbuffers is not installed.

    Example:
        >>> from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
        >>> cluster = ClusterSpec({"worker": ["w:1"], "ps": ["p:1", "p:2"]})
        >>> resolver = SimpleClusterResolver(cluster, rpc_layer="local")
        >>> strategy = jaxdist.ParameterServerStrategy(resolver)
        >>> coordinator = jaxdist.coordinator.ClusterCoordinator(strategy)
        >>> with strategy.scope():
        ...     w = jaxdist.Variable([1.0, 2.0])
        >>> optimizer = jaxdist.coordinator.ServerOptimizer(optax.sgd(0.5), [w])
        >>> def step(x):
        ...     loss, grad = jax.value_and_grad(lambda w: jnp.dot(w, x))(w.value())
        ...     optimizer.apply_gradients([(grad, w)])
        ...     return loss
        >>> coordinator.schedule(step, (np.float32([2, 4]),)).fetch()
        array(10., dtype=float32)
        >>> w.numpy()
        array([0., 0.], dtype=float32)
    """

    @called(_CALLER)
    def __init__(self, tx: optax.GradientTransformation, variables: Iterable[Any]) -> None:
        if not isinstance(tx, optax.GradientTransformation):
            raise refuse_type(
                f"tx={show(tx)}.",
                "tx is an optax.GradientTransformation.",
                "Pass for instance optax.adam(1e-3).",
            )
        given = _check_variables(variables)
        self._strategy = list_shards(given[0])[0].distribute_strategy
        self._slots: dict[str, ServerVariable] = {}
        # The operation of the server that updates a variable, by its name there.
        self._ops: dict[str, str] = {}
        prefix = f"server_optimizer_{next(_NUMBERS)}"
        params = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in given]
        sharded = {
            str(n): [int(shard.shape[0]) for shard in v.variables]
            for n, v in enumerate(given)
            if isinstance(v, ShardedVariable)
        }
        labels = [getattr(v, "remote_name", v.label) for v in given]
        updates = cut_update(tx, params, sharded, labels, keeps_unneeded=True)
        for variable, update in zip(given, updates, strict=True):
            for shard in list_shards(variable):
                self._register(shard, update, prefix)

    def _register(self, variable: ServerVariable, update: VariableUpdate, prefix: str) -> None:
        """Give the update of one variable, or of one shard, to its server."""
        found = update.by_shape[variable.shape]
        name = variable.remote_name
        first = None if update.slots else []
        request = found.make_request(prefix, name, len(update.slots), first, prefix)
        servers = self._strategy.storage
        place = servers.find_server(name)
        made = servers.register(place, request)
        values = servers.links[place].call(Read(made)).values if made else {}
        for slot in made:
            value = values[slot]
            self._slots[slot] = ServerVariable.connect(
                self._strategy, [slot], value.shape, value.dtype
            )
        self._ops[name] = f"program:{request.key}"

    @property
    def slots(self) -> dict[str, Any]:
        """The state on the servers, as variables by their names there: for checkpoints."""
        return dict(self._slots)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> None:
        """Send gradients to the servers, which update the variables.

        In a scheduled function they are sent when the whole function has run, so it reads
        variables before this call, not after it. Gradients that differ between replicas are
        all-reduced before: `get_replica_context().all_reduce("mean", grads)`.

        Args:
            grads_and_vars: Pairs of a gradient and its variable. A gradient None changes nothing.

        Raises:
            ArgumentTypeError: It is not a list of pairs.
            ArgumentError: A variable is not one of those that the optimizer was made for, or is
                listed twice.
            ShapeError: A gradient does not have the shape of its variable.
            UnsupportedError: A gradient is sparse.

        Source:
            `tf.keras.optimizers.Optimizer.apply_gradients`.
        """
        for gradient, variable in self._check_pairs(grads_and_vars):
            apply_updates(variable, self._ops, gradient, _APPLY)

    @called(_APPLY)
    def _check_pairs(self, given: Any) -> list[tuple[Any, Any]]:
        try:
            pairs = [(gradient, variable) for gradient, variable in given]
        except (TypeError, ValueError):
            raise refuse_type(
                f"grads_and_vars={show(given)}.",
                "It takes pairs of a gradient and its variable.",
                f"Call {_PAIRS}.",
            ) from None
        checked = []
        seen: set[int] = set()
        for gradient, variable in pairs:
            is_own = all(map(self._is_own, list_shards(variable)))
            if not is_own or id(variable) in seen:
                what = "twice" if is_own else "which is not one of its variables"
                raise refuse(
                    f"a gradient of {show(variable)} in grads_and_vars, {what}.",
                    f"The optimizer updates each of the {len(self._ops)} variable(s) or shard(s) "
                    "that it was made for, once for each call.",
                    f"Call {_PAIRS}, with the variables that were given to {_CALLER}.",
                )
            seen.add(id(variable))
            if gradient is not None:
                checked.append((_check_gradient(gradient, variable), variable))
        return checked

    def _is_own(self, variable: Any) -> bool:
        return (
            isinstance(variable, ServerVariable)
            and variable.distribute_strategy is self._strategy
            and variable.remote_name in self._ops
        )

    def __repr__(self) -> str:
        return f"ServerOptimizer(variables={sorted(self._ops)})"


def _check_gradient(gradient: Any, variable: Any) -> Any:
    name = variable.label
    if isinstance(gradient, IndexedSlices):
        raise refuse(
            f"IndexedSlices as the gradient of {name!r}.",
            "A transformation of optax updates all rows of a variable.",
            "Subtract the rows: variable.scatter_sub(slices); or pass a dense gradient.",
            kind=UnsupportedError,
        )
    if isinstance(gradient, DistributedValues):
        raise refuse(
            f"{show(gradient)} as the gradient of {name!r}.",
            "A variable has one gradient.",
            "Combine the values first: strategy.reduce('MEAN', gradient, axis=None).",
            kind=ReplicaValueError,
        )
    array = keep_array("grads_and_vars", gradient)
    if tuple(array.shape) != tuple(variable.shape):
        raise refuse(
            f"a gradient of shape {list(array.shape)} for {name!r}, whose shape is "
            f"{list(variable.shape)}, in grads_and_vars.",
            "A gradient has the shape of its variable.",
            f"Call {_PAIRS}, with gradients in the order of the variables.",
            kind=ShapeError,
        )
    return array.astype(variable.dtype)


def _check_variables(variables: Any) -> list[Any]:
    """Return variables of one strategy with servers, each of them once."""
    is_one = isinstance(variables, ServerVariable | ShardedVariable)
    try:
        given: list[Any] = [] if is_one else list(variables)
    except TypeError:
        given = list[Any]()
    shards = [shard for v in given for shard in list_shards(v)]
    wrong = [s for s in shards if not isinstance(s, ServerVariable)]
    if not given or wrong:
        found = f"{show(wrong[0])} in variables" if wrong else f"variables={show(variables)}"
        raise refuse_type(
            f"{found}.",
            "It updates variables that are on parameter servers.",
            "Pass a list of variables that were made in the scope of a ParameterServerStrategy.",
        )
    if len(set(map(id, shards))) < len(shards):
        raise refuse(
            f"{len(given)} variables, and one of them more than once.",
            "The state of an optimizer belongs to one variable.",
            "Pass each variable once.",
        )
    if len({id(s.distribute_strategy) for s in shards}) > 1:
        raise refuse(
            "variables of several strategies.",
            "The servers of one strategy hold the state beside their variables.",
            "Make an optimizer for the variables of each strategy.",
            kind=MixedStrategyError,
        )
    return given
