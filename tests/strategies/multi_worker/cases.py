"""What each method of a strategy returns, as NumPy values: one function for each subject.

A case runs in each process of a job with `MultiWorkerMirroredStrategy`, and in one process with
`MirroredStrategy` on as many devices. Its result has to be the same. Values of single replicas are
returned as `Own`: a process has those of its own replicas only.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxdist
from jaxdist import partition

CASES: dict[str, Callable[[jaxdist.Strategy], Any]] = {}


@dataclasses.dataclass
class Own:
    """Values by the number of their replica."""

    values: dict[int, Any]


def case(fn: Callable[[jaxdist.Strategy], Any]) -> Callable[[jaxdist.Strategy], Any]:
    """Add a case."""
    CASES[fn.__name__] = fn
    return fn


def to_numpy(tree: Any) -> Any:
    """Return a tree with NumPy arrays."""
    return jax.tree.map(np.asarray, tree)


def own(strategy: jaxdist.Strategy, value: Any) -> Own:
    """Return the values of the replicas of this process."""
    local = strategy.experimental_local_results(value)
    numbers = strategy.layout.local_replicas
    if len(local) == 1 and len(numbers) > 1:
        numbers = numbers[:1]
    return Own({r: to_numpy(v) for r, v in zip(numbers, local, strict=True)})


def _context() -> Any:
    context = jaxdist.get_replica_context()
    assert context is not None
    return context


def _per_replica(strategy: jaxdist.Strategy, rows: int = 3, seed: int = 0) -> Any:
    """A value of every replica, with `rows` rows."""
    whole = np.random.default_rng(seed).normal(size=(strategy.num_replicas_in_sync, rows, 4))
    whole = whole.astype("float32")
    return strategy.experimental_distribute_values_from_function(
        lambda c: whole[c.replica_id_in_sync_group]
    )


@case
def run_with_plain_arguments(strategy: jaxdist.Strategy) -> Any:
    def step(a: Any, b: Any, c: Any) -> Any:
        i = _context().replica_id_in_sync_group
        total = _context().all_reduce("sum", a * i + b)
        return total, _context().all_reduce("mean", a + c * i), a * i

    a = np.arange(6, dtype="float32").reshape(2, 3)
    total, mean, mine = strategy.run(step, (a, 2.0, jnp.ones((1, 3))))
    again = strategy.run(step, (a + 1, 3.0, jnp.ones((1, 3)) * 2))
    return to_numpy((total, mean, again[:2])), own(strategy, mine)


@case
def reduce(strategy: jaxdist.Strategy) -> Any:
    value = _per_replica(strategy)
    large = strategy.experimental_distribute_values_from_function(
        lambda c: np.full((300, 100), c.replica_id_in_sync_group, "float32")
    )
    scalar = strategy.experimental_distribute_values_from_function(
        lambda c: np.float32(c.replica_id_in_sync_group)
    )
    numbers = strategy.experimental_distribute_values_from_function(
        lambda c: c.replica_id_in_sync_group + 1
    )
    results = [
        strategy.reduce(op, x, axis=axis)
        for op in ("sum", "mean")
        for x, axis in [(value, None), (value, 0), (value, (0, 1)), (large, None), (scalar, None)]
    ]
    results += [strategy.reduce("sum", {"a": value, "b": scalar}, axis=None)]
    results += [strategy.reduce("sum", numbers, axis=None), strategy.reduce("mean", 3.0, axis=None)]
    return to_numpy(results)


@case
def gather(strategy: jaxdist.Strategy) -> Any:
    value = _per_replica(strategy)
    keys = strategy.run(
        lambda: jax.random.split(jax.random.key(_context().replica_id_in_sync_group), 2)
    )
    gathered = strategy.gather(keys, axis=0)
    return to_numpy(
        [strategy.gather(value, axis=0), strategy.gather(value, axis=1)]
        + [jax.random.key_data(gathered)]
    )


@case
def gather_uneven(strategy: jaxdist.Strategy) -> Any:
    value = strategy.experimental_distribute_values_from_function(
        lambda c: np.full((c.replica_id_in_sync_group + 1, 2), c.replica_id_in_sync_group, "int32")
    )
    return to_numpy([strategy.gather(value, axis=0), strategy.reduce("sum", value, axis=0)])


@case
def gather_in_step(strategy: jaxdist.Strategy) -> Any:
    def step(x: Any) -> Any:
        return _context().all_gather(x, axis=0), _context().all_gather(x * 2, axis=1)

    return to_numpy(strategy.run(step, (_per_replica(strategy),)))


@case
def merge_call(strategy: jaxdist.Strategy) -> Any:
    def merged(s: Any, x: Any) -> Any:
        total = s.extended.reduce_to("sum", x, x)
        both = s.extended.batch_reduce_to("mean", [(x, x), (x, x)])
        return total, both, s.reduce("mean", x, axis=0)

    total, both, mean = strategy.run(
        lambda x: _context().merge_call(merged, args=(x,)), (_per_replica(strategy),)
    )
    return to_numpy((total, both, mean))


@case
def local_results(strategy: jaxdist.Strategy) -> Any:
    value = _per_replica(strategy)
    mirrored = jnp.arange(3.0)
    result = strategy.run(lambda x, y: (x.sum(), y * 1), (value, mirrored))
    return own(strategy, value), own(strategy, result[0]), to_numpy(result[1])


@case
def variables(strategy: jaxdist.Strategy) -> Any:
    with strategy.scope():
        total = jaxdist.Variable(
            np.zeros(3, "float32"), aggregation=jaxdist.VariableAggregation.SUM
        )
        mean = jaxdist.Variable(1.0, aggregation=jaxdist.VariableAggregation.MEAN)
        first = jaxdist.Variable(5.0, aggregation=jaxdist.VariableAggregation.ONLY_FIRST_REPLICA)
        count = jaxdist.Variable(
            np.zeros(2, "float32"),
            synchronization=jaxdist.VariableSynchronization.ON_READ,
            aggregation=jaxdist.VariableAggregation.SUM,
        )

    def step(x: Any) -> Any:
        i = _context().replica_id_in_sync_group
        total.assign_add(x[0, :3])
        mean.assign(mean + i)
        first.assign(x[0, 0])
        count.assign_add(jnp.ones(2) * (i + 1))
        return total.value().sum()

    for seed in range(3):
        result = strategy.run(step, (_per_replica(strategy, seed=seed),))
    total.assign(total.value() * 2)
    copies = own(strategy, count)
    return (
        to_numpy([total.value(), mean.value(), first.value(), count.value(), result]),
        [np.asarray(total), float(mean.numpy())],
        copies,
    )


class _Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def _train_nnx(strategy: jaxdist.Strategy, steps: int = 4, seed: int = 0) -> Any:
    with strategy.scope():
        model = _Net(nnx.Rngs(seed))
        # Adam would amplify rounding: the gradient of the bias before the batch norm is 0.
        optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
        metric = nnx.metrics.Average("loss")

    def step(model: Any, optimizer: Any, metric: Any, x: Any) -> Any:
        def loss_of(model: Any) -> Any:
            return ((model(x) - x.sum(axis=1, keepdims=True)) ** 2).mean()

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, _context().all_reduce("mean", grads))
        metric.update(loss=loss)
        return _context().all_reduce("mean", loss)

    losses = [
        strategy.run(step, (model, optimizer, metric, _per_replica(strategy, seed=s)))
        for s in range(steps)
    ]
    state = jax.tree.leaves(nnx.state(model, nnx.Param, nnx.BatchStat))
    return to_numpy([losses, metric.compute(), state])


@case
def train_an_nnx_model(strategy: jaxdist.Strategy) -> Any:
    return _train_nnx(strategy)


def _loss(w: Any, x: Any) -> Any:
    return ((x @ w["a"]) ** 2).mean() + (w["b"] ** 2).sum()


@case
def train_with_optax(strategy: jaxdist.Strategy) -> Any:
    tx = optax.adamw(1e-2)
    w = {"a": jnp.linspace(0, 1, 8).reshape(4, 2), "b": np.ones(3, "float32")}
    state = tx.init(w)

    def step(w: Any, state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(_loss)(w, x)
        grads = _context().all_reduce("mean", grads)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state, _context().all_reduce("mean", loss)

    losses = []
    for seed in range(4):
        w, state, loss = strategy.run(step, (w, state, _per_replica(strategy, seed=seed)))
        losses.append(loss)
    return to_numpy([w, losses, jax.tree.leaves(state)])


@case
def train_with_donation(strategy: jaxdist.Strategy) -> Any:
    def step(w: Any, x: Any) -> Any:
        grads = _context().all_reduce("mean", jax.grad(_loss)(w, x))
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, grads)

    w: Any = {"a": jnp.linspace(0, 1, 8).reshape(4, 2), "b": jnp.ones(3)}
    options = jaxdist.RunOptions(donate_argnums=(0,))
    for seed in range(3):
        w = strategy.run(step, (w, _per_replica(strategy, seed=seed)), options=options)
    return to_numpy(w)


def _sharded(strategy: jaxdist.Strategy, update: Callable[..., Any], **how: Any) -> Any:
    tx = update(optax.adamw(1e-2), **how)
    w: Any = {"a": jnp.linspace(0, 1, 8).reshape(4, 2), "b": jnp.linspace(1, 2, 7)}
    with strategy.scope():
        state = tx.init(w)

    def step(w: Any, state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(_loss)(w, x)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state, _context().all_reduce("mean", loss)

    losses = []
    for seed in range(4):
        w, state, loss = strategy.run(step, (w, state, _per_replica(strategy, seed=seed)))
        losses.append(loss)
    return to_numpy([w, losses])


@case
def sharded_update(strategy: jaxdist.Strategy) -> Any:
    return _sharded(strategy, jaxdist.sharded_update)


@case
def compressed_update(strategy: jaxdist.Strategy) -> Any:
    return _sharded(strategy, jaxdist.compressed_update, workers=strategy.num_replicas_in_sync)


@case
def fully_sharded(strategy: jaxdist.Strategy) -> Any:
    with strategy.scope():
        model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    partition.place(strategy, model, partition.fsdp(min_bytes=0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        def loss_of(model: Any) -> Any:
            return (model(jnp.tile(x, (1, 2))) ** 2).mean()

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, _context().all_reduce("mean", grads))
        return _context().all_reduce("mean", loss)

    losses = [
        strategy.run(step, (model, optimizer, _per_replica(strategy, seed=s))) for s in range(3)
    ]
    return to_numpy(losses)


@case
def uneven_values(strategy: jaxdist.Strategy) -> Any:
    count = strategy.num_replicas_in_sync
    whole = np.random.default_rng(0).normal(size=(count, 4, 3)).astype("float32")
    values = strategy.experimental_distribute_values_from_function(
        lambda c: whole[c.replica_id_in_sync_group, : 1 + c.replica_id_in_sync_group % 3]
    )

    def step(x: Any) -> Any:
        rows = _context().all_reduce("sum", x.shape[0])
        return _context().all_reduce("sum", x.sum()) / rows, x.sum(axis=0), x * 2

    mean, sums, same = strategy.run(step, (values,))
    return to_numpy(mean), own(strategy, sums), own(strategy, same)


@case
def function_with_variables(strategy: jaxdist.Strategy) -> Any:
    with strategy.scope():
        v = jaxdist.Variable(np.ones(2, "float32"), aggregation=jaxdist.VariableAggregation.MEAN)

    @jaxdist.function
    def train(x: Any) -> Any:
        def step(x: Any) -> Any:
            v.assign_add(x[0, :2])
            return _context().all_reduce("sum", x)

        for _ in range(2):
            result = strategy.run(step, (x,))
        return result

    return to_numpy([train(_per_replica(strategy)), v.value()])


@case
def run_inside_scan(strategy: jaxdist.Strategy) -> Any:
    x = _per_replica(strategy)

    @jax.jit
    def train(w: Any, x: Any) -> Any:
        def body(w: Any, _: Any) -> Any:
            new = strategy.run(
                lambda w, x: w - 0.1 * _context().all_reduce("mean", (w[None] * x).sum(0)), (w, x)
            )
            return new, new.sum()

        return jax.lax.scan(body, w, None, length=3)

    w = jax.device_put(np.ones(4, "float32"))
    return to_numpy(strategy.run(lambda w: w, (w,))), to_numpy(
        train(strategy.run(lambda w: w, (w,)), x)
    )


@case
def algorithms(strategy: jaxdist.Strategy) -> Any:
    Options, Implementation = (
        jaxdist.experimental.CommunicationOptions,
        jaxdist.experimental.CommunicationImplementation,
    )
    x = _per_replica(strategy)
    results = []
    for options in (
        Options(implementation=Implementation.RING),
        Options(implementation=Implementation.NCCL),
        Options(bytes_per_pack=16),
    ):
        results.append(
            strategy.run(
                lambda x, o=options: _context().all_reduce("sum", [x, x * 2], options=o), (x,)
            )
        )
    return to_numpy(results)


@case
def extended(strategy: jaxdist.Strategy) -> Any:
    x = _per_replica(strategy)
    e = strategy.extended
    return to_numpy([e.reduce_to("sum", x, x), e.broadcast_to(np.ones(2, "float32"), x)])


@case
def random_keys(strategy: jaxdist.Strategy) -> Any:
    def step(key: Any, x: Any) -> Any:
        own = jax.random.fold_in(key, _context().replica_id_in_sync_group)
        return x + jax.random.normal(own, x.shape)

    value = strategy.run(step, (jax.random.key(3), _per_replica(strategy)))
    return to_numpy(strategy.gather(value, axis=0))


@case
def returned_keys(strategy: jaxdist.Strategy) -> Any:
    # A process waits for its last results before it leaves.
    keys = strategy.run(lambda key: jax.random.fold_in(key, 5), (jax.random.key(3),))
    return to_numpy(jax.random.key_data(strategy.experimental_local_results(keys)[0]))


@case
def check_replicas(strategy: jaxdist.Strategy) -> Any:
    w = strategy.run(lambda: jnp.ones(3) * 2)
    strategy.check_replicas({"w": w})
    return to_numpy(w)


@case
def lower(strategy: jaxdist.Strategy) -> Any:
    program = strategy.lower(lambda x: _context().all_reduce("sum", x), (_per_replica(strategy),))
    compiled = program.compile()
    return [str(i) for i in program.inputs], len(program.collectives), compiled is not None


@case
def indexed_slices(strategy: jaxdist.Strategy) -> Any:
    def rows_of(x: Any) -> Any:
        indices = jnp.arange(3) + _context().replica_id_in_sync_group
        return jaxdist.IndexedSlices(x, indices, (8, 4))

    def step(rows: Any) -> Any:
        total = _context().all_reduce("sum", rows)
        return total.to_dense(), rows.with_parts(rows.values * 2, rows.indices)

    def scale(rows: Any) -> Any:
        return jax.tree.map(lambda x: x * 2, rows)

    rows = strategy.run(rows_of, (_per_replica(strategy),))
    total, doubled = strategy.run(step, (rows,))
    refused = 0
    for way in (scale, lambda rows: strategy.run(scale, (rows,))):
        try:
            way(rows)
        except jaxdist.errors.UnsupportedError:
            refused += 1
    parts = own(strategy, (doubled.values, doubled.indices))
    return (
        np.asarray(total),
        parts,
        np.asarray(strategy.reduce("sum", rows, axis=None).to_dense()),
        refused,
    )
