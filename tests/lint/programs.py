"""Small programs, and where each rule finds something: in the lines that end with `# JD001`."""

HEAD = "import jax\nimport jax.numpy as jnp\nimport jaxdist\nfrom jax import lax\n"
STRATEGY = f"{HEAD}strategy = jaxdist.MirroredStrategy()\nx, state = 1.0, 2.0\n"
DATA = f"""{STRATEGY}import optax
from flax import nnx
data = strategy.experimental_distribute_dataset(jaxdist.data.batches(images, 32))
"""

DOUBLE_REDUCTION = {
    "all_reduce twice": f"""{STRATEGY}
def step(x):
    context = jaxdist.get_replica_context()
    grads = jax.grad(loss)(x)
    grads = context.all_reduce("mean", grads)
    return context.all_reduce(jaxdist.ReduceOp.SUM, grads)  # JD001
""",
    "pmean of pmean": f"""{HEAD}
def step(grads):
    return lax.pmean(lax.pmean(grads, "replica"), axis_name="replica")  # JD001
""",
    "psum of each leaf, twice": f"""{HEAD}
def step(grads):
    grads = jax.tree.map(lambda g: jax.lax.psum(g, "data"), grads)
    return jax.tree.map(lambda g: jax.lax.psum(g, "data"), grads)  # JD001
""",
    "in the step and outside": f"""{STRATEGY}
def step(x):
    loss, grads = jax.value_and_grad(f)(x)
    return loss, jaxdist.get_replica_context().all_reduce("mean", grads)

loss, grads = strategy.run(step, (x,))
strategy.reduce("mean", loss, axis=None)
strategy.reduce("mean", grads, axis=None)  # JD001
""",
    "one of several parts": f"""{STRATEGY}
def step(x):
    context = jaxdist.get_replica_context()
    total = context.all_reduce("sum", x)
    return context.all_reduce("sum", {{"total": total, "own": x}})  # JD001
""",
    "an axis that is a name": f"""{HEAD}
AXIS = "data"
def step(grads):
    grads = lax.psum(grads, AXIS)
    return lax.psum(grads, AXIS)  # JD001
""",
    "a loss that is averaged": f"""{STRATEGY}
def step(x):
    losses = (x - 1) ** 2
    loss = jaxdist.nn.compute_average_loss(losses, global_batch_size=32)
    return jaxdist.get_replica_context().all_reduce("mean", loss)  # JD001
""",
    "gradients of a loss that is averaged": f"""{STRATEGY}
from jaxdist import nn
def step(params, x):
    def loss_fn(params):
        losses = (params * x) ** 2
        return nn.compute_average_loss(losses) + nn.scale_regularization_loss(params), losses
    (loss, losses), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return loss, lax.pmean(grads, "replica")  # JD001
""",
    "a function with a decorator": f"""{STRATEGY}
import functools
@functools.partial(jax.value_and_grad, has_aux=True)
def loss_fn(params, x):
    return jaxdist.nn.compute_average_loss(params * x), x
def step(params, x):
    (loss, _), grads = loss_fn(params, x)
    return jaxdist.get_replica_context().all_reduce("mean", grads)  # JD001
""",
    "a loss that is averaged, and reduced outside": f"""{STRATEGY}
def step(x):
    return jaxdist.nn.compute_average_loss(x)
print(strategy.reduce(jaxdist.ReduceOp.MEAN, strategy.run(step, args=(x,)), axis=None))  # JD001
""",
    "a sharded update": f"""{STRATEGY}import optax
tx = jaxdist.sharded_update(optax.adam(1e-3))
def step(params, state, x):
    grads = jax.grad(loss)(params, x)
    grads = jaxdist.get_replica_context().all_reduce("mean", grads)
    return tx.update(grads, state, params)  # JD001
""",
    "a compressed update of an averaged loss, in nnx": f"""{STRATEGY}import optax
from flax import nnx
optimizer = nnx.Optimizer(model, jaxdist.compressed_update(optax.sgd(1.0), "int8"), wrt=nnx.Param)
def step(model, optimizer, x):
    grads = nnx.grad(lambda m: jaxdist.nn.compute_average_loss(m(x)))(model)
    optimizer.update(model, grads)  # JD001
strategy.run(step, (model, optimizer, x))
""",
    "in a class": f"""{HEAD}
class Trainer:
    def __init__(self):
        self.strategy = jaxdist.MirroredStrategy()
    def step(self, x):
        return jaxdist.get_replica_context().all_reduce("sum", x)
    def train(self, x):
        loss = self.strategy.run(self.step, args=(x,))
        return self.strategy.reduce("sum", loss, axis=None)  # JD001
""",
    "of TensorFlow": """import tensorflow as tf
strategy = tf.distribute.MirroredStrategy()  # JD006
def step(x):
    loss = tf.nn.compute_average_loss(x)  # JD006
    return loss
strategy.reduce("mean", strategy.run(step, (x,)), axis=None)  # JD001
""",
}
ONE_REDUCTION = {
    "once": f"""{STRATEGY}
def step(x):
    grads = jaxdist.get_replica_context().all_reduce("mean", jax.grad(loss)(x))
    return grads
strategy.run(step, (x,))
""",
    "a mean and a variance": f"""{HEAD}
def step(x):
    mean = lax.pmean(x.mean(), "replica")
    return lax.pmean(((x - mean) ** 2).mean(), "replica")
""",
    "over two axes": f"""{HEAD}
def step(x):
    return lax.psum(lax.psum(x, "data"), "model")
""",
    "in one branch or the other": f"""{HEAD}
def step(x, is_sum):
    if is_sum:
        x = lax.psum(x, "data")
    else:
        x = lax.pmean(x, "data")
    return x
""",
    "a function that is called for two axes": f"""{HEAD}
def reduce_over(x, axis):
    return lax.psum(x, axis)
def step(x):
    return reduce_over(reduce_over(x, "data"), "model")
""",
    "an averaged loss that is summed": f"""{STRATEGY}
def step(params, x):
    loss_fn = lambda p: jaxdist.nn.compute_average_loss(p * x)
    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jaxdist.get_replica_context().all_reduce("sum", (loss, grads))
strategy.run(step, (1.0, x))
""",
    "an averaged loss that is scaled back": f"""{STRATEGY}
def step(x):
    context = jaxdist.get_replica_context()
    loss = jaxdist.nn.compute_average_loss(x) * context.num_replicas_in_sync
    return context.all_reduce("mean", loss)
""",
    "an averaged loss over an axis for the model": f"""{STRATEGY}
def step(x):
    return lax.pmean(jaxdist.nn.compute_average_loss(x), "model")
""",
    "a name with another value": f"""{STRATEGY}
def step(x):
    context = jaxdist.get_replica_context()
    total = context.all_reduce("sum", x)
    total = x / total
    return context.all_reduce("sum", total)
""",
    "a sharded update that reduces alone": f"""{STRATEGY}import optax
tx = jaxdist.sharded_update(optax.adam(1e-3), reduce_op="sum")
def step(params, state, x):
    grads = jax.grad(lambda p: jaxdist.nn.compute_average_loss(p * x))(params)
    return tx.update(grads, state, params)
""",
    "an ordinary optimizer": f"""{STRATEGY}import optax
tx = optax.adam(1e-3)
def step(params, state, x):
    grads = jaxdist.get_replica_context().all_reduce("mean", jax.grad(loss)(params, x))
    return tx.update(grads, state, params)
""",
    "the gradient of a reduced loss": f"""{HEAD}
def step(params, x):
    grads = jax.grad(lambda p: lax.pmean((p * x).mean(), "data"))(params)
    return lax.pmean(grads, "data")
""",
    "rows of what was reduced": f"""{STRATEGY}
def step(x):
    return jaxdist.get_replica_context().all_reduce("sum", x)
strategy.reduce("mean", strategy.run(step, (x,)), axis=0)
""",
    "a function of another library": """import functools
import jax.lax
functools.reduce(lambda a, b: a + b, functools.reduce(max, values))
torch.distributed.all_reduce(torch.distributed.all_reduce(x))
""",
    "a step on its own result": f"""{STRATEGY}
def step(x):
    return jaxdist.get_replica_context().all_reduce("sum", x)
x = strategy.run(step, (x,))
x = strategy.run(step, (x,))
""",
    "a gradient in a loop": f"""{HEAD}
def step(grads):
    for axis in ("data", "model"):
        grads = lax.psum(grads, axis)
    return grads
""",
}

UNEVEN_MEAN = {
    "a metric": f"""{DATA}
def step(batch):
    losses = optax.l2_loss(batch["x"], batch["y"])
    return jaxdist.get_replica_context().all_reduce("mean", jnp.mean(losses))  # JD002
for batch in data:
    strategy.run(step, (batch,))
""",
    "gradients": f"""{DATA}
def train_step(model, optimizer, batch):
    def loss_fn(model):
        logits = model(batch["image"])
        return optax.softmax_cross_entropy(logits, batch["label"]).mean()
    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, lax.pmean(grads, "replica"))  # JD002
    return loss
for number, batch in enumerate(data):
    loss = strategy.run(train_step, args=(model, optimizer, batch))
    print(strategy.reduce(jaxdist.ReduceOp.MEAN, loss, axis=None))  # JD002
""",
    "a sum that is divided by the rows here": f"""{DATA}
def step(batch):
    return jnp.sum(batch["x"]) / batch["x"].shape[0]
strategy.reduce("mean", strategy.run(step, (next(iter(data)),)), axis=None)  # JD002
""",
    "through functions": f"""{HEAD}
def mean_loss(rows):
    return rows.mean()
def step(state, rows):
    return state, jaxdist.get_replica_context().all_reduce("mean", mean_loss(rows))  # JD002
@jaxdist.function
def train_step(strategy, state, iterator):
    return strategy.run(step, (state, next(iterator)))
def main(strategy, source):
    batches = strategy.experimental_distribute_dataset(source.shuffle(100).batch(32))
    iterator = iter(batches)
    for _ in range(100):
        train_step(strategy, 0, iterator)
main(jaxdist.MirroredStrategy(), load())
""",
    "a batch that is the tuple of arguments": f"""{DATA}
def step(x, y):
    return jaxdist.get_replica_context().all_reduce("mean", jnp.mean((x - y) ** 2))  # JD002
for batch in data:
    strategy.run(step, batch)
    strategy.run(step, args=batch)
    strategy.run(lambda x, y: lax.pmean(x.mean(), "replica"), batch)  # JD002
    strategy.run(lambda w, x: lax.pmean(x.mean(), "replica"), (1, *batch))  # JD002
""",
    "an update that reduces": f"""{DATA}
tx = jaxdist.sharded_update(optax.adam(1e-3))
def step(params, state, batch):
    grads = jax.grad(lambda p: jnp.mean(p * batch["x"]))(params)
    return tx.update(grads, state, params)  # JD002
for batch in data:
    strategy.run(step, (params, state, batch))
""",
}
RIGHT_MEAN = {
    "equal batches": f"""{STRATEGY}
data = strategy.experimental_distribute_dataset(
    jaxdist.data.batches(images, 32, drop_remainder=True))
def step(batch):
    return jaxdist.get_replica_context().all_reduce("mean", jnp.mean(batch["x"]))
for batch in data:
    strategy.run(step, (batch,))
""",
    "batches that are dropped": f"""{STRATEGY}
options = jaxdist.InputOptions(partial_batch=jaxdist.PartialBatch.DROP)
data = strategy.experimental_distribute_dataset(
    jaxdist.data.batches(images, 32), jaxdist.InputOptions(partial_batch=jaxdist.PartialBatch.DROP))
def step(batch):
    return jaxdist.get_replica_context().all_reduce("mean", jnp.mean(batch["x"]))
for batch in data:
    strategy.run(step, (batch,))
""",
    "options in a variable": f"""{STRATEGY}
options = jaxdist.InputOptions(partial_batch=jaxdist.PartialBatch.DROP)
data = strategy.experimental_distribute_dataset(jaxdist.data.batches(images, 32), options)
def step(batch):
    return jaxdist.get_replica_context().all_reduce("mean", jnp.mean(batch["x"]))
for batch in data:
    strategy.run(step, (batch,))
""",
    "an endless dataset": f"""{STRATEGY}
source = load().shuffle(100).repeat()
data = strategy.experimental_distribute_dataset(source.batch(32))
def step(batch):
    return jaxdist.get_replica_context().all_reduce("mean", jnp.mean(batch["x"]))
for batch in data:
    strategy.run(step, (batch,))
""",
    "rows that the batch divides": f"""{STRATEGY}
import numpy as np
data = strategy.experimental_distribute_dataset(jaxdist.data.batches(np.ones((64, 3)), 16))
for batch in data:
    strategy.run(lambda b: lax.pmean(b.mean(), "replica"), (batch,))
""",
    "a dataset of which nothing is known": f"""{STRATEGY}
data = strategy.experimental_distribute_dataset(load())
for batch in data:
    strategy.run(lambda b: lax.pmean(b.mean(), "replica"), (batch,))
""",
    "an array that is split evenly": f"""{DATA}
x = jax.device_put(x, strategy.per_replica_sharding)
strategy.run(lambda b: lax.pmean(b.mean(), "replica"), (x,))
""",
    "an average over all rows": f"""{DATA}
def step(batch):
    context = jaxdist.get_replica_context()
    size = context.all_reduce("sum", batch["x"].shape[0])
    losses = batch["x"].mean(axis=-1)
    loss = jaxdist.nn.compute_average_loss(losses, global_batch_size=size)
    return context.all_reduce("sum", loss)
for batch in data:
    strategy.run(step, (batch,))
""",
    "a mean of parameters": f"""{DATA}
def step(params, batch):
    return lax.pmean(jnp.mean(params ** 2), "replica"), batch
for batch in data:
    strategy.run(step, (params, batch))
""",
    "a mean of parameters before the batch": f"""{DATA}
def step(params, x, y):
    return lax.pmean(jnp.mean(params ** 2), "replica"), x
for batch in data:
    strategy.run(step, (params, *batch))
""",
    "sums": f"""{DATA}
def step(batch):
    context = jaxdist.get_replica_context()
    total, rows = context.all_reduce("sum", (batch["x"].sum(), batch["x"].shape[0]))
    return total / rows
for batch in data:
    strategy.run(step, (batch,))
""",
}

FIRST_REPLICA = {
    "unreplicate": """from flax import jax_utils
state = jax_utils.unreplicate(state)  # JD003
""",
    "unreplicate by its name": """from flax.jax_utils import unreplicate
save(unreplicate(state).params)  # JD003
""",
    "the first of each leaf": f"""{STRATEGY}
params = jax.tree.map(lambda x: x[0], state.params)  # JD003
opt_state = jax.tree_util.tree_map(lambda leaf: leaf[0], opt_state)  # JD003
""",
}
NO_FIRST_REPLICA = {
    "an example": f"""{STRATEGY}
example = jax.tree.map(lambda x: x[0], batch)
""",
    "members of an ensemble": f"""{STRATEGY}
params = jax.vmap(init)(keys)
first = jax.tree.map(lambda x: x[0], params)
""",
    "without jaxdist": """import jax
first = jax.tree.map(lambda x: x[0], params)
""",
    "the last": f"""{STRATEGY}
params = jax.tree.map(lambda x: x[-1], params)
""",
}

PMAP = {
    "a decorator": """import jax
@jax.pmap  # JD004
def step(x):
    return x
""",
    "with an axis": """import functools
import jax
@functools.partial(jax.pmap, axis_name="batch", donate_argnums=(0,))  # JD004
def step(x):
    return jax.lax.pmean(x, axis_name="batch")
""",
    "an import": """from jax import pmap, device_put_replicated
step = pmap(lambda x: x)  # JD004
state = device_put_replicated(state, devices)  # JD004
""",
    "jax_utils": """import jax
from flax import jax_utils
from flax.training.common_utils import shard
state = jax_utils.replicate(state)  # JD004
it = jax_utils.prefetch_to_device(map(shard, it), 2)  # JD004 JD004
x = jax.device_put_sharded(xs, jax.devices())  # JD004
""",
    "an axis that is gone": f"""{STRATEGY}
def step(x):
    index = lax.axis_index("batch")  # JD004
    return jax.lax.pmean(x, axis_name="batch") + index  # JD004
strategy.run(step, (x,))
""",
}
NO_PMAP = {
    "a mesh of the program": f"""{HEAD}
mesh = jax.make_mesh((8,), ("batch",))
strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("batch",))
strategy.run(lambda x: lax.pmean(x, "batch"), (1.0,))
""",
    "the axis of a vmap": f"""{STRATEGY}
def step(x):
    return jax.vmap(lambda v: lax.psum(v, "rows"), axis_name="rows")(x)
strategy.run(step, (x,))
""",
    "the axis of the strategy": f"""{STRATEGY}
strategy.run(lambda x: lax.pmean(x, "replica") + lax.axis_index("replica"), (x,))
""",
    "a name of the program": """def pmap(f):
    return f
step = pmap(lambda x: x)
""",
}

WORKERS = f"{HEAD}strategy = jaxdist.MultiWorkerMirroredStrategy()\n"
ONE_PROCESS = {
    "run": f"""{WORKERS}
if jax.process_index() == 0:
    loss = strategy.run(step, (x,))  # JD005
    print(strategy.reduce("mean", loss, axis=None))  # JD005
""",
    "a checkpoint": f"""{WORKERS}
checkpoints = jaxdist.training.Checkpoints("runs")
is_first = jax.process_index() == 0
for step in range(10):
    if is_first and step % 5 == 0:
        checkpoints.save(step, state)  # JD005
""",
    "the number of a task": """import jaxdist
def train(strategy, resolver):
    if resolver.task_id == 0:
        return strategy.gather(x, axis=0)  # JD005
    return None
""",
    "others leave": f"""{WORKERS}
from jax.experimental import multihost_utils
def report(loss):
    if jax.process_index() != 0:
        return
    print(strategy.reduce("sum", loss, axis=None))  # JD005
    if not is_chief():
        pass
    else:
        multihost_utils.sync_global_devices("end")  # JD005
""",
    "a function that runs steps": f"""{WORKERS}
def evaluate(state):
    return strategy.run(step, (state,))
if jax.process_index() == 0:
    print(evaluate(state))  # JD005
""",
    "in a step": f"""{WORKERS}
def step(x):
    if jax.process_index() == 0:
        x = jaxdist.get_replica_context().all_reduce("sum", x)  # JD005
        y = lax.psum(x * 2, "replica")  # JD005
    return x
""",
}
ALL_PROCESSES = {
    "printing": f"""{WORKERS}
loss = strategy.reduce("mean", strategy.run(step, (x,)), axis=None)
if jax.process_index() == 0:
    print(loss, strategy.num_replicas_in_sync, strategy.experimental_local_results(loss))
""",
    "both branches": f"""{WORKERS}
if jax.process_index() == 0:
    result = strategy.run(step, (x,))
else:
    result = strategy.run(step, (y,))
""",
    "a strategy of one process": f"""{WORKERS}
one = jaxdist.OneDeviceStrategy("cpu:0")
local = jaxdist.MirroredStrategy(jax.local_devices())
if jax.process_index() == 0:
    one.run(step, (x,))
    local.run(step, (x,))
""",
    "parameter servers": """import jaxdist
if resolver.task_id == 0:
    strategy = jaxdist.ParameterServerStrategy(resolver)
    strategy.run(step)
""",
    "other conditions": f"""{WORKERS}
if step == 0:
    strategy.run(step, (x,))
if jax.process_count() == 1:
    strategy.run(step, (x,))
if x.rank == 0:
    strategy.run(step, (x,))
""",
    "a function that is defined there": f"""{WORKERS}
if jax.process_index() == 0:
    def later():
        return strategy.run(step, (x,))
""",
    "other objects": """import subprocess
if rank == 0:
    subprocess.run(["ls"])
    functools.reduce(max, values)
    model.save("file")
    strategy.run(backtest)
""",
}

VALUE_IN_IF = {
    "a variable": f"""{STRATEGY}
with strategy.scope():
    count = jaxdist.Variable(0)
def step(x):
    if count > 10:  # JD007
        return x
    while not count.value() == 3:  # JD007
        pass
    return x if x is None or count.numpy() else -x  # JD007
strategy.run(step, (x,))
""",
    "a total": f"""{STRATEGY}
def step(x):
    total = jaxdist.get_replica_context().all_reduce("sum", x)
    assert total > 0  # JD007
    return total
strategy.run(step, (x,))
""",
}
NO_VALUE_IN_IF = {
    "what is known": f"""{STRATEGY}
count = jaxdist.Variable(jnp.zeros(3))
def step(x, is_training):
    total = jaxdist.get_replica_context().all_reduce("sum", x)
    if count.shape[0] > 1 and count is not None and is_training and total.ndim == 0:
        return total
    return jnp.where(count.value() > 3, x, 0)
strategy.run(step, (x, True))
""",
    "outside of a step": f"""{STRATEGY}
count = jaxdist.Variable(0)
if count > 3:
    print(count)
def step(x):
    return jaxdist.get_replica_context().all_reduce("sum", x)
if strategy.run(step, (x,)) > 3:
    pass
""",
    "op by op": f"""{STRATEGY}
count = jaxdist.Variable(0)
def step(x):
    return x if count > 3 else -x
with jaxdist.config.run_eagerly():
    strategy.run(step, (x,))
""",
}

SIDE_EFFECT = {
    "print": f"""{STRATEGY}
def step(x):
    y = x + 1
    print("value", y)  # JD008
    return y
strategy.run(step, (x,))
""",
    "a list": f"""{STRATEGY}
losses = []
def step(x):
    loss = x.mean()
    losses.append(float(loss))  # JD008
    return loss
strategy.run(step, (x,))
""",
    "a counter": f"""{STRATEGY}
count = 0
def step(x):
    global count
    count += 1  # JD008
    return x
strategy.run(step, (x,))
""",
    "clocks and random numbers": f"""{STRATEGY}
import random
import time
import numpy as np
def step(x):
    start = time.perf_counter()  # JD008
    return x + np.random.normal() + random.random() + start  # JD008 JD008
strategy.run(step, (x,))
""",
    "a layer of a pipeline": f"""{STRATEGY}
from jaxdist import nn
seen = []
def layer(w, x):
    seen.append(x)  # JD008
    return x @ w
def step(params, rows):
    def head(w, x, rows):
        print(x)  # JD008
        return x.mean()
    parts = None, params, None
    return nn.pipeline_loss(lambda w, x: x, layer, head, parts, rows, micro_batches=4)
strategy.run(step, (w, x))
""",
    "an expert": f"""{STRATEGY}
import jaxdist.nn
def expert(w, rows):
    print(rows)  # JD008
    return rows @ w
def step(router, weights, x):
    return jaxdist.nn.experts(expert, router, weights, x, top_k=2)
""",
}
NO_SIDE_EFFECT = {
    "a layer that says its shapes": f"""{STRATEGY}
from jaxdist import nn
def layer(w, x):
    print("traced", x.shape)
    return x @ w
def step(params, rows):
    parts = None, params, None
    return nn.pipeline_loss(embed, layer, head, parts, rows, micro_batches=4)
strategy.run(step, (w, x))
""",
    "a message": f"""{STRATEGY}
def step(x):
    print("traced", x.shape)
    return x
strategy.run(step, (x,))
""",
    "a list of the step": f"""{STRATEGY}
def step(xs):
    found = []
    for x in xs:
        found.append(x)
    return found
strategy.run(step, (x,))
""",
    "a count of traces": f"""{STRATEGY}
traces = []
def step(x):
    traces.append(1)
    return x
strategy.run(step, (x,))
""",
    "callbacks": f"""{STRATEGY}
def show(v):
    print(v)
def step(x):
    def shown(v):
        print(v)
    jax.debug.print("{{}}", x)
    jax.debug.callback(lambda v: print(v), x)
    jax.debug.callback(shown, x)
    jax.debug.callback(show, x)
    return x
strategy.run(step, (x,))
""",
    "a variable of the step": f"""{STRATEGY}
def step(x):
    total = 0
    def add(v):
        nonlocal total
        total += v
    add(x)
    return total
strategy.run(step, (x,))
""",
    "no step": f"""{STRATEGY}
def show(x):
    print(x)
subprocess.run(show)
def main(argv):
    print(argv)
app.run(main)
""",
    "op by op": f"""{STRATEGY}
def step(x):
    print(x)
with jaxdist.config.run_eagerly():
    strategy.run(step, (x,))
""",
    "keys of JAX": f"""{STRATEGY}
from jax import random
def step(key):
    return random.normal(key)
strategy.run(step, (x,))
""",
}

SQUARE_UNDER_FSDP = {
    "tree": """
import jax
import jax.numpy as jnp
import jaxdist
from jaxdist import partition
strategy = jaxdist.MirroredStrategy()
rules = partition.fsdp()
def step(params, x):
    grads = jax.grad(lambda p: (p * x).mean())(params)
    replica = jaxdist.get_replica_context()
    return replica.all_reduce("mean", jax.tree.map(jnp.square, grads))  # JD009
strategy.run(step, (1.0, 2.0))
""",
    "power": """
import jax
import jaxdist
strategy = jaxdist.MirroredStrategy()
rules = jaxdist.partition.fsdp()
def step(params, x):
    grad = jax.grad(lambda p: (p * x).mean())(params)
    return jax.lax.pmean(grad**2, "replica")  # JD009
strategy.run(step, (1.0, 2.0))
""",
}
NO_SQUARE_UNDER_FSDP = {
    "gathered": """
import jax
import jaxdist
from jaxdist import partition
strategy = jaxdist.MirroredStrategy()
rules = partition.fsdp()
def step(params, x):
    grad = jax.grad(lambda p: (p * x).mean())(partition.gather(params))
    return jax.lax.pmean(grad**2, "replica")
strategy.run(step, (1.0, 2.0))
""",
    "replicated": """
import jax
import jaxdist
strategy = jaxdist.MirroredStrategy()
def step(params, x):
    grad = jax.grad(lambda p: (p * x).mean())(params)
    return jax.lax.pmean(grad**2, "replica")
strategy.run(step, (1.0, 2.0))
""",
    "linear": """
import jax
import jaxdist
from jaxdist import partition
strategy = jaxdist.MirroredStrategy()
rules = partition.fsdp()
def step(params, x):
    grad = jax.grad(lambda p: (p * x).mean())(params)
    return jaxdist.get_replica_context().all_reduce("mean", grad / 2)
strategy.run(step, (1.0, 2.0))
""",
}

DIVIDED_METRIC = {
    "of a loss": f"""{STRATEGY}
from flax import nnx
metric = nnx.metrics.Average("loss")
def step(metric, x):
    loss = jaxdist.nn.compute_average_loss(x)
    metric.update(loss=loss)  # JD010
strategy.run(step, (metric, x))
""",
    "of value_and_grad, by the name of the argument": f"""{STRATEGY}
def step(model, metrics, x):
    loss, grads = jax.value_and_grad(lambda w: jaxdist.nn.compute_average_loss(w * x))(model)
    metrics.update(loss=loss, logits=x)  # JD010
    return get_replica_context().all_reduce("sum", grads)
strategy.run(step, (model, metrics, x))
""",
    "of Keras": f"""{STRATEGY}
import keras
mean = keras.metrics.Mean()
def step(x):
    mean.update_state(jaxdist.nn.compute_average_loss(x, global_batch_size=8))  # JD010
strategy.run(step, (x,))
""",
}

NO_DIVIDED_METRIC = {
    "losses of the rows, and sums of the shares": f"""{STRATEGY}
from flax import nnx
metric = nnx.metrics.Average("loss")
def step(metric, x):
    loss = jaxdist.nn.compute_average_loss(x)
    metric.update(loss=x)
    metric.update(loss=get_replica_context().all_reduce("sum", loss))
    metric.update(loss=loss * get_replica_context().num_replicas_in_sync)
strategy.run(step, (metric, x))
""",
    "a dict": f"""{STRATEGY}
def step(x):
    logs = dict()
    logs.update(loss=jaxdist.nn.compute_average_loss(x))
    return logs
strategy.run(step, (x,))
""",
}

FOUND = {
    "JD001": DOUBLE_REDUCTION,
    "JD002": UNEVEN_MEAN,
    "JD003": FIRST_REPLICA,
    "JD004": PMAP,
    "JD005": ONE_PROCESS,
    "JD007": VALUE_IN_IF,
    "JD008": SIDE_EFFECT,
    "JD009": SQUARE_UNDER_FSDP,
    "JD010": DIVIDED_METRIC,
}
NOT_FOUND = {
    "JD001": ONE_REDUCTION,
    "JD002": RIGHT_MEAN,
    "JD003": NO_FIRST_REPLICA,
    "JD004": NO_PMAP,
    "JD005": ALL_PROCESSES,
    "JD007": NO_VALUE_IN_IF,
    "JD008": NO_SIDE_EFFECT,
    "JD009": NO_SQUARE_UNDER_FSDP,
    "JD010": NO_DIVIDED_METRIC,
}
