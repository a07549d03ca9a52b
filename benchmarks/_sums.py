"""All-reduces of many leaves, through jaxdist and by hand: what rows 11 to 14 compare.

Every arm is given the same numbers and waits for each all-reduce. What it tells of the sums has to
be the same for all.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxdist
from benchmarks._joined import joined
from benchmarks._loop import Loop
from benchmarks._steps import strategy
from jaxdist import _mesh, cost, hlo
from jaxdist._collectives import CommunicationOptions
from jaxdist._collectives.sums.default_sum import plan_default_sum

Shapes = Sequence[Sequence[int]]
# As many as jaxdist lets a loop have by itself.
STEPS_IN_FLIGHT = 8

Summing = Callable[[list[jax.Array]], Sequence[jax.Array]]


def api(n: int, shapes: Shapes, links: str) -> Loop:
    """`all_reduce` with no options in `strategy.run`, which chooses by the links of a file."""
    jaxdist.config.links(links)
    chosen = strategy(n)
    given = [jaxdist.PerReplica.of_global(x) for x in leaves(chosen.layout, shapes)]

    return loop(lambda: chosen.run(_all_reduced, (given,)), chosen.layout)


def per_leaf(n: int, shapes: Shapes) -> Loop:
    """By hand: one `psum` of the list of leaves."""
    return _by_hand(_mesh.build(jax.devices()[:n]), shapes, psum_each)


def flat(n: int, shapes: Shapes) -> Loop:
    """By hand: all leaves as one vector."""
    return _by_hand(_mesh.build(jax.devices()[:n]), shapes, psum_flat)


def floor(n: int, shapes: Shapes) -> Loop:
    """No all-reduce: one more than every element, which reads and writes as much memory."""
    layout = _mesh.build(jax.devices()[:n])
    call = mapped(layout, lambda xs: [x + 1 for x in xs], layout.replica_spec)
    given = leaves(layout, shapes)
    return loop(lambda: call(given), layout)


def api_joined(rank: int, ports: list[int], shapes: Shapes, links: str) -> Loop:
    """What `all_reduce` does between processes."""
    jaxdist.config.links(links)
    layout = joined(rank, ports)
    sizes = [jax.ShapeDtypeStruct(tuple(s), np.float32) for s in shapes]
    _, how = plan_default_sum(sizes, layout, CommunicationOptions())
    return _by_hand(layout, shapes, how)


def per_leaf_joined(rank: int, ports: list[int], shapes: Shapes) -> Loop:
    """`per_leaf` between processes."""
    return _by_hand(joined(rank, ports), shapes, psum_each)


def collectives(n: int, shapes: Shapes, links: str) -> tuple[str, str]:
    """What `api` and `per_leaf` compile to: each collective with the bytes of its operands."""
    jaxdist.config.links(links)
    chosen = strategy(n)
    layout = chosen.layout
    given = [
        jax.ShapeDtypeStruct((n * s[0], *s[1:]), np.float32, sharding=layout.per_replica)
        for s in shapes
    ]
    ours = chosen.lower(_all_reduced, (given,)).compile().as_text()
    theirs = mapped(layout, psum_each, PartitionSpec()).lower(given).compile().as_text() or ""
    return _in_words(ours), _in_words(theirs)


def _all_reduced(values: list[jax.Array]) -> list[jax.Array]:
    sums: list[jax.Array] = jaxdist.get_replica_context().all_reduce("sum", values)
    return sums


def _in_words(text: str) -> str:
    found = [f"{c.kind}[{c.operands}] of {c.operand_bytes:,} bytes" for c in hlo.collectives(text)]
    return ", ".join(sorted(found))


def psum_each(arrays: list[jax.Array]) -> list[jax.Array]:
    """A sum for each array."""
    return list(jax.lax.psum(arrays, _mesh.REPLICA_AXIS))


def psum_flat(arrays: list[jax.Array]) -> list[jax.Array]:
    """One sum of all arrays end to end."""
    total = jax.lax.psum(jnp.concatenate([x.ravel() for x in arrays]), _mesh.REPLICA_AXIS)
    ends = np.cumsum([x.size for x in arrays])[:-1]
    parts = jnp.split(total, ends)
    return [p.reshape(x.shape) for p, x in zip(parts, arrays, strict=True)]


def mapped(layout: _mesh.ReplicaMesh, fn: Any, out_specs: Any) -> Any:
    """`jit(shard_map(fn))` over the rows of all replicas."""
    return jax.jit(
        jax.shard_map(
            fn,
            mesh=layout.mesh,
            in_specs=layout.replica_spec,
            out_specs=out_specs,
            check_vma=False,
        )
    )


def leaves(layout: _mesh.ReplicaMesh, shapes: Shapes) -> list[jax.Array]:
    """Leaf i is i + r + 1 on replica r: sums that floats hold exactly.

    Loops of one process read the same arrays: where they lie in memory makes some percent.
    """
    return _leaves(layout, tuple(tuple(s) for s in shapes))


@functools.lru_cache(maxsize=1)
def _leaves(layout: _mesh.ReplicaMesh, shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
    count = layout.num_replicas

    def made(number: int, shape: Sequence[int]) -> jax.Array:
        rows, rest = shape[0], tuple(shape[1:])

        def piece(index: Any) -> np.ndarray:
            first = index[0].start or 0
            return np.full((rows, *rest), number + first // rows + 1, np.float32)

        sharding = NamedSharding(layout.mesh, PartitionSpec(layout.replica_axes))
        return jax.make_array_from_callback((count * rows, *rest), sharding, piece)

    return [made(i, s) for i, s in enumerate(shapes)]


def expected_sum(n: int, shapes: Shapes) -> float:
    """The sum over the leaves of their first elements, all-reduced."""
    return float(sum(n * i + n * (n + 1) // 2 for i in range(len(shapes))))


def _by_hand(layout: _mesh.ReplicaMesh, shapes: Shapes, how: Summing) -> Loop:
    given = leaves(layout, shapes)
    call = mapped(layout, lambda xs: list(how(xs)), PartitionSpec())
    return loop(lambda: call(given), layout)


def loop(call: Callable[[], Any], layout: _mesh.ReplicaMesh) -> Loop:
    """One all-reduce after the other."""
    wait_every = STEPS_IN_FLIGHT if layout.is_local else 1

    told: dict[str, Any] = {}

    def run(steps: int) -> Any:
        held: Any = None
        for number in range(1, steps + 1):
            held = call()
            if number % wait_every == 0:
                jax.block_until_ready(held)
        return jax.block_until_ready(held)

    def prepare(_: int) -> None:
        # Takes back the memory that another loop of this process has used in between.
        firsts = [np.asarray(x.addressable_shards[0].data).ravel()[0] for x in run(1)]
        told["sum"] = math.fsum(map(float, firsts))

    def facts() -> dict[str, Any]:
        return {**told, "packed below": cost.pack_below(cost.links_of(layout).across)}

    return Loop(run, prepare, facts)
