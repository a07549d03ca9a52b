"""A pipeline takes as long as one written by hand, and less memory.

Claim: a step of 8 layers on 2 replicas of 4 stages, with 16 micro-batches, takes at most 1.05 times
a GPipe by hand (`shard_map`, a scan over ticks with `ppermute`, and `jax.grad` of it), and at most
0.60 of its memory for temporary values; and all come to the same loss. Two chunks and `zero_bubble`
are reported: devices that share cores do not wait for each other as chips do.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxdist
from benchmarks._bench import Bench, Race, arm
from benchmarks._lines import CountLine, Line, Need
from benchmarks._loop import Loop
from jaxdist import nn, partition

ROW = "pipeline"
REPLICAS, STAGES, LAYERS, MICRO_BATCHES = 2, 4, 8, 16
LEARNING_RATE = 1e-2
P = PartitionSpec
Params = dict[str, Any]
Batch = dict[str, np.ndarray]
DONATE = jaxdist.RunOptions(donate_argnums=(0,))


def make_mesh() -> Mesh:
    """The mesh of both programs."""
    devices = np.asarray(jax.devices()[: REPLICAS * STAGES], dtype=object)
    axes = ("data", "stage")
    return Mesh(devices.reshape(REPLICAS, STAGES), axes, axis_types=(AxisType.Auto,) * 2)


def make_model(width: int, chunks: int = 1) -> tuple[Params, Batch]:
    """Parameters, and a batch of 2 rows of 32 words for each micro-batch of a replica."""
    words = 4 * width
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[-2])).astype("float32")

    layers = {"up": normal(LAYERS, width, words), "down": normal(LAYERS, words, width)}
    if chunks > 1:
        layers = {k: w.reshape(chunks, -1, *w.shape[1:]) for k, w in layers.items()}
    params = {"embed": normal(words, width), "layers": layers, "head": normal(width, words)}
    shape = (REPLICAS * MICRO_BATCHES * 2, 32)
    return params, {k: rng.integers(0, words, shape) for k in ("tokens", "labels")}


def embed(table: jax.Array, rows: Batch) -> jax.Array:
    """The first part."""
    return table[rows["tokens"]]


def layer(w: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """One layer."""
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def head(matrix: jax.Array, x: jax.Array, rows: Batch) -> jax.Array:
    """The last part."""
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ matrix, rows["labels"])
    return jnp.mean(losses)


def make_loop(step: Callable[..., Any], compiled: Any, params: Params, *args: Any) -> Loop:
    """Training with a step that returns parameters and a loss."""
    held: dict[str, Any] = {"params": params, "loss": None}

    def run(steps: int) -> None:
        for _ in range(steps):
            held["params"], held["loss"] = step(held["params"], *args)
        jax.block_until_ready(held)

    temporary = int(compiled.memory_analysis().temp_size_in_bytes)
    return Loop(run, facts=lambda: {"loss": float(held["loss"]), "temporary": temporary})


def through_jaxdist(width: int, schedule: str, chunks: int) -> Loop:
    """The step as a user of jaxdist writes it."""
    strategy = jaxdist.MirroredStrategy(mesh=make_mesh(), replica_axes=("data",))
    params, batch = make_model(width, chunks)
    rules = partition.replicated().on_stages("layers/**", chunks=chunks)
    params = partition.place(strategy, params, rules)
    rows = jax.device_put(batch, strategy.per_replica_sharding)

    def loss_fn(params: Params, rows: Batch) -> jax.Array:
        parts = params["embed"], params["layers"], params["head"]
        options: dict[str, Any] = {"micro_batches": MICRO_BATCHES, "schedule": schedule}
        return nn.pipeline_loss(embed, layer, head, parts, rows, **options)

    def step(params: Params, rows: Batch) -> tuple[Params, jax.Array]:
        found = jax.value_and_grad(loss_fn)(params, rows)
        loss, grads = jaxdist.get_replica_context().all_reduce("mean", found)
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads), loss

    compiled = strategy.lower(step, (params, rows), options=DONATE).compile().executable

    def run(params: Params, rows: Batch) -> Any:
        return strategy.run(step, (params, rows), options=DONATE)

    return make_loop(run, compiled, params, rows)


def by_hand(width: int) -> Loop:
    """GPipe as an expert writes it: a scan over ticks, and its derivative."""
    mesh = make_mesh()
    params, batch = make_model(width)
    specs = {"embed": P(), "layers": P("stage"), "head": P()}

    def loss_fn(params: Params, rows: Batch) -> jax.Array:
        stage, last = jax.lax.axis_index("stage"), STAGES - 1
        rows = jax.tree.map(lambda x: x.reshape(MICRO_BATCHES, -1, *x.shape[1:]), rows)
        inputs = embed(params["embed"], rows)
        rest = jnp.zeros((last, *inputs.shape[1:]), inputs.dtype)

        def tick(received: jax.Array, own: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = jnp.where(stage == 0, own, received)
            x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, params["layers"])
            return jax.lax.ppermute(x, "stage", [(s, s + 1) for s in range(last)]), x

        ticks = jnp.concatenate([inputs, rest])
        _, found = jax.lax.scan(tick, jnp.zeros_like(inputs[0]), ticks)
        losses = jax.vmap(head, in_axes=(None, 0, 0))(params["head"], found[last:], rows)
        return jnp.where(stage == last, jnp.mean(losses), 0.0)

    def step(params: Params, rows: Batch) -> tuple[Params, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, rows)
        ends = {k: jax.lax.psum(grads[k], "stage") for k in ("embed", "head")}
        loss = jax.lax.psum(loss, "stage")
        loss, grads = jax.lax.pmean((loss, {**grads, **ends}), "data")
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads), loss

    program = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()), check_vma=False
        ),
        donate_argnums=0,
    )
    placed = {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in params.items()}
    rows = jax.device_put(batch, NamedSharding(mesh, P("data")))
    return make_loop(program, program.lower(placed, rows).compile(), placed, rows)


def compare_losses(race: Race, ours: str) -> CountLine:
    """Whether the losses agree to 1e-5."""
    mine, other = (float(race.facts[a]["loss"]) for a in (ours, _BY_HAND))
    wanted = f"loss {other:.6f}"
    found = wanted if abs(mine - other) <= 1e-5 * abs(other) else f"loss {mine:.6f}"
    return CountLine(race.row, race.size, ours, _BY_HAND, found, wanted)


def compare_memory(race: Race, ours: str, most: float) -> CountLine:
    """The memory of a device for temporary values, relative to the program by hand."""
    mine, other = (float(race.facts[a]["temporary"]) for a in (ours, _BY_HAND))
    wanted, share = f"<= {most:.2f}", mine / other
    found = wanted if share <= most else f"{share:.2f}"
    size = f"{race.size}: temporary values {share:.2f}"
    return CountLine(race.row, size, ours, _BY_HAND, found, wanted)


_BY_HAND = "GPipe by hand"


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    options = bench.options
    width = 8 if options.is_smoke else 128
    arms = {
        name: arm(through_jaxdist, width=width, schedule=schedule, chunks=chunks)
        for name, schedule, chunks in (
            ("1f1b", "1f1b", 1),
            ("1f1b, 2 chunks", "1f1b", 2),
            ("zero_bubble", "zero_bubble", 1),
        )
    }
    arms[_BY_HAND] = arm(by_hand, width=width)
    race = bench.race(f"width {width}, N=2 x 4", arms, options.steps(4))
    yield race.line("1f1b", _BY_HAND, Need(1.05))
    yield race.line("1f1b, 2 chunks", "1f1b", Need())
    yield race.line("zero_bubble", _BY_HAND, Need())
    for name in arms:
        if name != _BY_HAND:
            yield compare_losses(race, name)
    if not options.is_smoke:
        yield compare_memory(race, "1f1b", 0.60)
