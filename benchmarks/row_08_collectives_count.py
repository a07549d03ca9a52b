"""The compiled step holds the collectives of the hand-written one, and no more.

Claim: the optimized HLO of a step through the API has collective operations of the same kinds as
the hand-written `jit(shard_map)`, no more of them, and with no more operands together (small leaves
share one): for the models of row 6 (loss and
gradients ride in one all-reduce), for 50 and 400 gradients (XLA:CPU puts at most 256 into one
operation), and for an NNX model with BatchNorm, whose statistics ride along.
What the compiled program reports as its collectives is what is in its text.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

import jaxdist
from benchmarks._bench import Bench
from benchmarks._lines import CountLine, Line
from benchmarks._models import model, sgd
from benchmarks._steps import AXIS, DONATE, P, api_step, hand_step, mesh, per_replica, strategy

ROW = "8"


# Read here and not with jaxdist's own reader, which is one of the things that are checked.
_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|"
    r"collective-broadcast|ragged-all-to-all)(?:-start)?\(([^)]*)\)"
)


def counted(text: str) -> str:
    """Collectives in optimized HLO, with their numbers of operands: `all-reduce[7]`."""
    pairs = [(kind, operands.count("%")) for kind, operands in _COLLECTIVE.findall(text)]
    return _in_words(pairs)


def _in_words(pairs: Iterable[tuple[str, int]]) -> str:
    return " ".join(sorted(f"{kind}[{operands}]" for kind, operands in pairs)) or "none"


def is_no_more(ours: str, theirs: str) -> bool:
    """Whether `ours` has the kinds of `theirs`, no more operations and no more operands."""
    mine, other = _totals(ours), _totals(theirs)
    return mine.keys() == other.keys() and all(
        a <= b for kind in mine for a, b in zip(mine[kind], other[kind], strict=True)
    )


def _totals(words: str) -> dict[str, tuple[int, int]]:
    """Operations and operands of each kind."""
    found: dict[str, tuple[int, int]] = {}
    for kind, operands in re.findall(r"([a-z-]+)\[(\d+)\]", words):
        count, total = found.get(kind, (0, 0))
        found[kind] = (count + 1, total + int(operands))
    return found


def _compared(ours: jaxdist.Program, theirs: jax.stages.Compiled) -> tuple[str, str, str]:
    """Counts: of the API's program, of the hand-written one, and as jaxdist reports its own."""
    compiled = ours.compile()
    reported = _in_words((c.kind, c.operands) for c in compiled.collectives)
    return counted(compiled.as_text()), counted(theirs.as_text() or ""), reported


def model_step(name: str, n: int) -> tuple[str, str, str]:
    """A training step: through the API, by hand."""
    params, batch, loss_fn = model(name)
    split = jax.tree.map(lambda x: per_replica(n, x), batch)
    chosen = strategy(n)
    ours = chosen.lower(api_step(loss_fn), (params, split), options=DONATE)
    params = jax.device_put(params, NamedSharding(mesh(n), P()))
    batch = jax.device_put(batch, NamedSharding(mesh(n), P(AXIS)))
    theirs = hand_step(loss_fn, n).lower(params, batch).compile()
    return _compared(ours, theirs)


def many_leaves(count: int, n: int) -> tuple[str, str, str]:
    """An SGD step on `count` small parameters: through the API, by hand."""
    params = {f"leaf{i}": np.zeros(4, "float32") for i in range(count)}
    x = np.ones((n, 4), "float32")

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        total = jnp.zeros(())
        for leaf in params.values():
            total += jnp.mean(jnp.square(leaf - x))
        return total

    def api(params: Any, x: jax.Array) -> Any:
        grads = jax.grad(loss_fn)(params, x)
        return sgd(params, jaxdist.get_replica_context().all_reduce("mean", grads))

    def hand(params: Any, x: jax.Array) -> Any:
        return sgd(params, jax.lax.pmean(jax.grad(loss_fn)(params, x), AXIS))

    ours = strategy(n).lower(api, (params, per_replica(n, x)))
    theirs = _by_hand(hand, n, (P(), P(AXIS)), P()).lower(params, x).compile()
    return _compared(ours, theirs)


class Normalised(nnx.Module):
    """Two layers with a BatchNorm between them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.second = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The output of the net."""
        return self.second(jax.nn.relu(self.norm(self.first(x))))


def _squared(net: Normalised, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(net(x)))


def _updated(net: Normalised, grads: Any) -> None:
    nnx.update(net, sgd(nnx.state(net, nnx.Param), grads))


def batch_norm(n: int) -> tuple[str, str, str]:
    """A step on an NNX model with batch statistics: through the API, by hand."""
    net = Normalised(nnx.Rngs(0))
    x = np.ones((4 * n, 8), "float32")

    def api(net: Normalised, x: jax.Array) -> jax.Array:
        found = nnx.value_and_grad(_squared)(net, x)
        loss, grads = jaxdist.get_replica_context().all_reduce("mean", found)
        _updated(net, grads)
        return loss

    graph, state = nnx.split(net)

    def hand(state: Any, x: jax.Array) -> Any:
        net = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(_squared)(net, x)
        statistics = nnx.state(net, nnx.BatchStat)
        loss, grads, statistics = jax.lax.pmean((loss, grads, statistics), AXIS)
        nnx.update(net, statistics)
        _updated(net, grads)
        return nnx.state(net), loss

    theirs = _by_hand(hand, n, (P(), P(AXIS)), P()).lower(state, x).compile()
    ours = strategy(n).lower(api, (net, per_replica(n, x)))
    return _compared(ours, theirs)


def _by_hand(step: Callable[..., Any], n: int, in_specs: Any, out_specs: Any) -> Any:
    return jax.jit(
        jax.shard_map(step, mesh=mesh(n), in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )


def run(bench: Bench) -> Iterator[Line]:
    """Count."""
    options = bench.options
    work: list[tuple[str, Callable[..., Any], dict[str, Any]]] = []
    for n in options.sizes(2, 8):
        for name in ("tiny",) if options.is_smoke else ("mlp", "transformer"):
            work.append((f"{name}, N={n}", model_step, {"name": name, "n": n}))
        counts = (50,) if options.is_smoke else (50, 400, 600) if options.is_full else (50, 400)
        for count in counts:
            work.append((f"{count} leaves, N={n}", many_leaves, {"count": count, "n": n}))
        work.append((f"BatchNorm, N={n}", batch_norm, {"n": n}))
    for size, function, params in work:
        options.report(f"row {ROW}: {size}")
        ours, theirs, reported = bench.process("0").call(function, **params)
        # Nothing found in the hand-written program would make the comparison an empty one.
        theirs = "some" if theirs == "none" else theirs
        within = ours if is_no_more(ours, theirs) else theirs
        yield CountLine(ROW, f"{size}, of {theirs}", "run", "jit(shard_map)", ours, within)
        yield CountLine(ROW, size, ".collectives", "HLO text", reported, ours)
