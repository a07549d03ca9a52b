"""Keeps a moving average of parameters in the state of an optimizer, and evaluates with it."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxdist import _compat
from jaxdist._called import called, refuse, refuse_type
from jaxdist._typing import PyTree
from jaxdist._validate import as_number, check_instance, show
from jaxdist._values import Sharded, is_sharded, whole_array, wide_dtype
from jaxdist.errors import ArgumentError, ContextError

# The optimizers whose averages the models have, in blocks of `use_average`.
_SHOWN: ContextVar[tuple[Any, ...]] = ContextVar("jaxdist_shown_averages", default=())


class AverageState(NamedTuple):
    """The state of `moving_average`.

    Attributes:
        average: The average of each parameter, in float32 or more.
        inner: The state of the transformation whose parameters are averaged.
    """

    average: PyTree
    inner: PyTree


@called("training.moving_average")
def moving_average(
    tx: optax.GradientTransformation, decay: float = 0.999
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that also keeps an exponential moving average of the parameters.

    The average begins with the first parameters. After each update it is
    `decay * average + (1 - decay) * parameters`. It is a part of the optimizer's state, so it is
    computed in the compiled step, sharded as the parameters are, and saved with the optimizer.
    `use_average` evaluates with it, as does `fit.SwapEMAWeights`. In loops without NNX,
    `optax.tree.get(state, "average")` returns it.

    Shapes:
        The average of a parameter `[...]` is `[...]`, in float32 for parameters of lower precision.

    Cost:
        One more copy of the parameters, and a pass over them in each update.

    Args:
        tx: The transformation whose parameters are averaged, with everything that changes its
            updates. `optax.MultiSteps` and `sharded_update` go around this one:
            `sharded_update(moving_average(optax.adam(1e-3)))`.
        decay: The weight of the earlier average, from 0 to below 1.

    Raises:
        ArgumentTypeError: `tx` is not a transformation of optax, or `decay` is not a number.
        ArgumentError: `decay` is not between 0 and 1, or `tx` is an `optax.MultiSteps`, whose steps
            without an update would count.

    Example:
        >>> tx = training.moving_average(optax.sgd(1.0), decay=0.75)
        >>> state = tx.init(jnp.zeros(1))
        >>> updates, state = tx.update(-jnp.ones(1), state, jnp.zeros(1))
        >>> optax.tree.get(state, "average").tolist()
        [0.25]

    Source:
        `tf.train.ExponentialMovingAverage`, `use_ema` of Keras; the law of
        `optax.incremental_update`.
    """
    if isinstance(tx, optax.MultiSteps) or _is_of_several_steps(tx):
        raise _refuse_several_steps()
    if not isinstance(tx, optax.GradientTransformation):
        raise refuse_type(
            f"tx={show(tx)}.",
            "tx is a transformation of optax.",
            "Pass for instance training.moving_average(optax.adam(1e-3)).",
        )
    weight = as_number("decay", decay, least=0.0, example=0.999)
    if weight >= 1:
        raise refuse(
            f"decay={show(decay)}.",
            "It is the weight of the earlier average, below 1.",
            "Pass for instance decay=0.999.",
        )
    inner = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> AverageState:
        # Copies: a step may reuse the memory of the parameters and of the state.
        state = inner.init(params)
        parts = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, optax.MultiStepsState))
        if any(isinstance(part, optax.MultiStepsState) for part in parts):
            raise _refuse_several_steps()
        # With 8 bits of precision, an average would not move: 0.999 rounds to 1.
        copies = jax.tree.map(lambda p: jnp.array(p, wide_dtype(p.dtype), copy=True), params)
        return AverageState(copies, state)

    @called("training.moving_average: update")
    def update(
        updates: PyTree, state: AverageState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, AverageState]:
        if params is None:
            raise refuse_type(
                "params=None.",
                "It averages the parameters.",
                "Call tx.update(grads, state, params).",
            )
        updates, after = inner.update(updates, state.inner, params, **extra)
        new = jax.tree.map(
            lambda p: p.astype(wide_dtype(p.dtype)), optax.apply_updates(params, updates)
        )
        average = optax.incremental_update(new, state.average, 1.0 - weight)
        return updates, AverageState(average, after)

    # The types of optax have no default for the parameters.
    return optax.GradientTransformationExtraArgs(init, cast(Any, update))


@called("training.moving_average")
def _refuse_several_steps() -> ArgumentError:
    return refuse(
        "tx with optax.MultiSteps(...).",
        "It updates the parameters once in several steps, and the average would count each of "
        "these steps.",
        "Put it outside: optax.MultiSteps(training.moving_average(tx), every_k_schedule=k).",
    )


def _is_of_several_steps(tx: Any) -> bool:
    """Whether a transformation is that of an `optax.MultiSteps`."""
    return isinstance(getattr(getattr(tx, "update", None), "__self__", None), optax.MultiSteps)


@contextlib.contextmanager
@called("training.use_average")
def use_average(model: nnx.Module, optimizer: "nnx.Optimizer[Any]") -> Iterator[None]:
    """Let a model have the average of its parameters in a block.

    Model and average exchange their arrays, and get them back at the end of the block, also after
    an error. Statistics, such as those of BatchNorm, are not averaged and stay as they are.
    Evaluate, predict or export weights in the block; do not train, and save checkpoints outside.
    With parameter servers, the servers have the average in the block, so no worker may train
    meanwhile.

    Cost:
        Nothing is copied, unless parameters are whole and their averages in pieces
        (`sharded_update`): then the averages are gathered.

    Args:
        model: The module that the optimizer was created for.
        optimizer: An `nnx.Optimizer` of a `moving_average`, which may be inside other
            transformations.

    Raises:
        ArgumentTypeError: `model` is not an NNX module, or `optimizer` not an `nnx.Optimizer`.
        ArgumentError: The optimizer keeps no average, or that of another model.
        ContextError: The optimizer was updated in the block. The model has what it computed.

    Example:
        >>> model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
        >>> tx = training.moving_average(optax.sgd(1.0), decay=0.5)
        >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        >>> before = float(model.kernel[0, 0])
        >>> grads = nnx.grad(lambda m: -m(jnp.ones((1, 1))).sum())(model)
        >>> _ = optimizer.update(model, grads)
        >>> with training.use_average(model, optimizer):
        ...     averaged = float(model.kernel[0, 0])
        >>> round(float(model.kernel[0, 0]) - before, 4), round(averaged - before, 4)
        (1.0, 0.5)

    Source:
        `keras.callbacks.SwapEMAWeights`.
    """
    pairs = _find_pairs(model, optimizer)
    if is_average_shown(optimizer):
        # A second exchange would give the parameters back.
        yield
        return
    exchanged = [
        (_OnServers if _compat.is_distant(_compat.get_held(own)) else _Here)(own, average)
        for own, average in pairs
    ]
    with contextlib.ExitStack() as stack:
        for one in exchanged:
            # Before the exchange: Ctrl-C may stop it anywhere.
            stack.callback(one.restore)
            one.show()
        with _compat.set_in_block(_SHOWN, (*_SHOWN.get(), optimizer)):
            yield
        if any(one.is_updated for one in exchanged):
            raise ContextError(
                "training.use_average: the optimizer was updated in the block.\n\n"
                "There the model has the average, and the optimizer keeps the parameters, so an "
                "update would mix them.\n\n"
                "Train outside of the block. Restore the model from its last checkpoint."
            )


def is_average_shown(optimizer: Any) -> bool:
    """Whether the model of an optimizer has the average, in a block of `use_average`."""
    return any(other is optimizer for other in _SHOWN.get())


def keeps_average(optimizer: Any) -> bool:
    """Whether the state of an optimizer has an average of the parameters."""
    return any(True for _ in _find_averages(optimizer.opt_state))


class _Here:
    """A parameter and its average in this process, which exchange what they hold."""

    def __init__(self, parameter: Any, average: Any) -> None:
        self._parameter, self._average = parameter, average
        self._own, self._other = _compat.get_held(parameter), _compat.get_held(average)
        self._shown = self._other
        if is_sharded(self._other) and not is_sharded(self._own):
            self._shown = jax.device_put(whole_array(self._other), self._own.sharding)
        if self._shown.dtype != self._own.dtype:
            self._shown = jax.tree.map(lambda x: x.astype(self._own.dtype), self._shown)

    @property
    def is_updated(self) -> bool:
        """Whether the optimizer has computed another average meanwhile."""
        now = _compat.get_held(self._average)
        return now is not self._own and now is not self._other

    def show(self) -> None:
        """Let the parameter have the average."""
        # An exchange: a step that reuses the memory of its arguments must not get an array twice.
        _compat.set_held(self._parameter, self._shown)
        _compat.set_held(self._average, self._own)

    def restore(self) -> None:
        """Undo it; what was assigned to the parameter meanwhile was assigned to the average."""
        now = _compat.get_held(self._parameter)
        if now is self._own:  # It was not shown yet.
            return
        if self.is_updated:  # The parameters that the optimizer kept may be deleted.
            self._own = _compat.get_held(self._average)
        _compat.set_held(self._parameter, self._own)
        if now is self._shown:
            now = self._other
        elif is_sharded(self._other) and not is_sharded(now):
            # The next step cuts and places it.
            now = Sharded(np.asarray(now), *self._other.cut)
        _compat.set_held(self._average, now)


class _OnServers:
    """A parameter and its average on parameter servers, which the next call of a worker writes."""

    def __init__(self, parameter: Any, average: Any) -> None:
        self._parameter, self._average = parameter, average
        self._there = _compat.get_held(parameter)
        self._own = parameter.get_value()
        self._shown = average.get_value().astype(self._own.dtype)

    @property
    def is_updated(self) -> bool:
        """Whether the optimizer has computed another average: it does so on the servers."""
        return False

    def show(self) -> None:
        """Let the parameter have the average."""
        _compat.set_held(self._parameter, self._shown)

    def restore(self) -> None:
        """Undo it; what was assigned to the parameter meanwhile was assigned to the average."""
        if _compat.get_held(self._parameter) is self._shown:  # No call has written it.
            _compat.set_held(self._parameter, self._there)
            return
        # A call that has written it leaves what was held before, so only the values tell.
        value = self._parameter.get_value()
        if _are_same(value, self._own):  # It was not shown yet.
            return
        if not _are_same(value, self._shown):
            _compat.set_held(self._average, value.astype(self._average.get_value().dtype))
        _compat.set_held(self._parameter, self._own)


def _are_same(one: Any, other: Any) -> bool:
    """Whether two arrays have the same bits, also where these are nan."""
    return one.shape == other.shape and np.asarray(one).tobytes() == np.asarray(other).tobytes()


def _find_pairs(model: Any, optimizer: Any) -> list[tuple[Any, Any]]:
    """Return the variables of the parameters, each with that of its average."""
    what, remedy = "a Flax NNX module", "Pass the module that the optimizer was created for."
    check_instance("model", model, nnx.Module, what, remedy)
    remedy = "Pass nnx.Optimizer(model, training.moving_average(optax.adam(1e-3)), wrt=nnx.Param)."
    check_instance("optimizer", optimizer, nnx.Optimizer, "an nnx.Optimizer", remedy)
    found = list(_find_averages(optimizer.opt_state))
    if len(found) != 1:
        raise refuse(
            f"an optimizer whose state has {len(found)} averages of the parameters.",
            "training.moving_average keeps the average in the state of the optimizer.",
            "Create the optimizer with training.moving_average(optax.adam(1e-3), decay=0.999).",
        )
    averages = dict(nnx.to_flat_state(found[0]))
    is_parameter = nnx.filterlib.to_predicate(optimizer.wrt)
    parameters = {
        path: node
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Variable) and is_parameter(path, node)
    }
    held = {path: _compat.get_held(node) for path, node in averages.items()}
    shapes = {path: getattr(_compat.get_held(x), "shape", None) for path, x in parameters.items()}
    # Transformations such as `optax.multi_transform` leave out parameters that are not trained.
    masked = {path for path, value in held.items() if isinstance(value, optax.MaskedNode)}
    other = {p: x.shape for p, x in held.items() if p not in masked}
    if shapes.keys() != held.keys() or any(shapes[p] != shape for p, shape in other.items()):
        raise refuse(
            f"a model with {len(parameters)} parameters, and an average of {len(averages)} of "
            "other paths or shapes.",
            "The average is that of the model that the optimizer was created for.",
            "Pass this model.",
            kind=ArgumentError,
        )
    return [(parameters[path], averages[path]) for path in other]


def _find_averages(state: Any) -> Iterator[Any]:
    """Yield the averages in the state of an optimizer."""
    if isinstance(state, AverageState):
        yield state.average
    elif isinstance(state, (tuple, list)):
        for part in state:
            yield from _find_averages(part)
    elif isinstance(state, dict):
        for part in state.values():
            yield from _find_averages(part)
