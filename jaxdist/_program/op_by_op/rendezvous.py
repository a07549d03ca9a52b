"""The computation of collectives when all replicas of a step op by op have arrived."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxdist import _compat
from jaxdist._called import called, name_call, refuse
from jaxdist._collectives import UNEVEN_ALL_GATHER
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.jaxprs.extremes import EXTREMES, compute_extreme
from jaxdist._program.op_by_op.invalid_numbers import not_finite_error
from jaxdist._program.op_by_op.merge_once import MergeAnswer, MergeCall
from jaxdist._program.op_by_op.thread_scheduler import Finished
from jaxdist._program.proof.replication import get_named_axes
from jaxdist._values import suggest_cast
from jaxdist.errors import DivergentCollectiveError, ShapeError

_MEMBERS = "jaxdist_members"


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective as one replica reaches it: the operation, its operands, and the line.

    `is_of_pieces` is true for the gather of an array in pieces, and the scatter of its gradient.
    """

    primitive: Any
    params: dict[str, Any]
    operands: tuple[Any, ...]
    source: str
    is_of_pieces: bool = False

    def __str__(self) -> str:
        listed = ", ".join(f"{x.dtype}{list(x.shape)}" for x in self.operands)
        return f"{listed} in {_get_name(self.primitive)} at {self.source}"


@dataclasses.dataclass(frozen=True)
class NumRows:
    """The number of rows of one replica in a gather; each replica gets the numbers of all."""

    rows: int
    source: str

    def __str__(self) -> str:
        return f"{self.rows} rows in all_gather at {self.source}"


class Rendezvous:
    """The meeting point of the replicas of one step.

    Args:
        layout: The layout of the strategy.
        devices: The device of each replica.
    """

    def __init__(self, layout: ReplicaMesh, devices: Sequence[jax.Device]) -> None:
        self._layout = layout
        self._devices = devices

    def settle(self, requests: list[Any]) -> list[Any]:
        """Compute one meeting; return the answer for each replica.

        Args:
            requests: The request of each replica: a collective, sizes, or a merge call.

        Raises:
            DivergentCollectiveError: Not all replicas are at the same collective.
            ShapeError: The operands have different shapes or dtypes.
        """
        first = requests[0]
        if any(type(b) is not type(first) for b in requests):
            raise _make_divergence_error(requests)
        if isinstance(first, NumRows):
            return [tuple(b.rows for b in requests)] * len(requests)
        if isinstance(first, MergeCall):
            return [all(map(first.is_like, requests))] * len(requests)
        if isinstance(first, MergeAnswer):
            return [first.done] * len(requests)
        if any(b.primitive is not first.primitive for b in requests):
            raise _make_divergence_error(requests)
        # Before the check of `params`: a gather on another dim has an error of its own.
        if first.primitive is UNEVEN_ALL_GATHER:
            return self._concatenate(requests)
        if any(b.params != first.params for b in requests):
            raise _make_divergence_error(requests)
        _check_shapes(requests)
        try:
            results = self._communicate(requests)
            _compat.check_numbers(_get_name(first.primitive), jax.tree.leaves(results))
            return results
        except (FloatingPointError, _compat.InvalidNumberError) as error:
            operands = [x for b in requests for x in b.operands]
            name = _get_name(first.primitive)
            where = "on all replicas"
            raise not_finite_error(error, name, first.source, where, operands) from error
        except Exception as error:
            error.add_note(f"Raised in {first}, on all replicas.")
            raise

    @called("strategy.run")
    def _concatenate(self, requests: Sequence[Collective]) -> list[Any]:
        dim = requests[0].params["dim"]
        rest = {(*x.shape[:dim], *x.shape[dim + 1 :]) for b in requests for x in b.operands}
        if len(rest) > 1 or any(b.params["dim"] != dim for b in requests):
            raise ShapeError(
                f"{name_call()}: an all_gather on dim {dim} joins arrays that differ in another "
                f"dim.\n{_describe_by_replica(requests)}\n\n"
                "All dims but the one that is concatenated must be the same on every replica.\n\n"
                "Gather on the dim that differs, or pad the others first."
            )
        parts = [self._to_first(b.operands[0]) for b in requests]
        whole = jnp.concatenate(parts, axis=dim)
        return [jax.device_put(whole, SingleDeviceSharding(d)) for d in self._devices]

    def _communicate(self, requests: Sequence[Collective]) -> list[Any]:
        first = requests[0]
        results: list[Any] = [None] * len(requests)
        for members in self._list_groups(get_named_axes(first.params), first.params):
            own = self._communicate_in_group(members, [requests[m] for m in members])
            for member, result in zip(members, own, strict=True):
                to = SingleDeviceSharding(self._devices[member])
                results[member] = jax.tree.map(lambda x, to=to: jax.device_put(x, to), result)
        return results

    def _list_groups(self, axes: tuple[str, ...], params: dict[str, Any]) -> list[list[int]]:
        """Return the groups of replicas that communicate, each in the order of the axes."""
        names = self._layout.replica_axes
        sizes = [self._layout.mesh.shape[a] for a in names]
        grid = np.arange(math.prod(sizes)).reshape(sizes)
        last = range(-len(axes), 0)
        lines = np.moveaxis(grid, [names.index(a) for a in axes], last)
        rows = lines.reshape(-1, math.prod(self._layout.mesh.shape[a] for a in axes)).tolist()
        groups = params.get("axis_index_groups")
        if groups is None:
            return rows
        return [[row[i] for i in group] for row in rows for group in groups]

    def _communicate_in_group(
        self, members: Sequence[int], requests: Sequence[Collective]
    ) -> list[Any]:
        """Return the results for one group of replicas."""
        # `jax.vmap` has a rule for every collective. The two exceptions follow first.
        first = requests[0]
        if first.primitive.name == "ppermute":
            return self._permute(requests)
        columns = list(zip(*(b.operands for b in requests), strict=True))
        if first.primitive.name in EXTREMES and all(
            isinstance(a, str) for a in first.params["axes"]
        ):
            placed = [[self._to_first(x) for x in column] for column in columns]
            found = [compute_extreme(first.primitive.name, rows) for rows in placed]
            return [found if first.primitive.multiple_results else found[0]] * len(members)
        params = move_to_one_axis(first.params, len(members), _MEMBERS)
        stacked = [jnp.stack([self._to_first(x) for x in column]) for column in columns]
        whole = jax.vmap(lambda *x: first.primitive.bind(*x, **params), axis_name=_MEMBERS)(
            *stacked
        )
        return [jax.tree.map(lambda x, i=i: x[i], whole) for i in range(len(members))]

    def _permute(self, requests: Sequence[Collective]) -> list[Any]:
        """Return the results of `ppermute`; replicas without a source get zeros."""
        # `jax.vmap` accepts only permutations of all members.
        sources = {to: source for source, to in requests[0].params["perm"]}
        nothing = [jnp.zeros_like(self._to_first(x)) for x in requests[0].operands]
        many = requests[0].primitive.multiple_results
        rows = [
            [self._to_first(x) for x in requests[sources[i]].operands] if i in sources else nothing
            for i in range(len(requests))
        ]
        return [row if many else row[0] for row in rows]

    def _to_first(self, value: Any) -> Any:
        return jax.device_put(value, SingleDeviceSharding(self._devices[0]))


def move_to_one_axis(params: dict[str, Any], size: int, name: str) -> dict[str, Any]:
    """Return the parameters of the same collective over one axis, without groups."""
    changed = dict(params)
    if "axes" in params:
        unnamed = [a for a in params["axes"] if not isinstance(a, str)]
        changed["axes"] = (*unnamed, name)
    else:
        many = isinstance(params["axis_name"], (tuple, list))
        changed["axis_name"] = (name,) if many else name
    if "axis_index_groups" in params:
        changed["axis_index_groups"] = None
    if "axis_size" in params:
        changed["axis_size"] = size
    return changed


@called("strategy.run: a collective")
def _check_shapes(requests: Sequence[Collective]) -> None:
    kinds = {tuple((x.dtype, x.shape) for x in b.operands) for b in requests}
    if len(kinds) > 1:
        raise refuse(
            f"different shapes or dtypes on different replicas.\n{_describe_by_replica(requests)}",
            "This collective needs one shape and one dtype on all replicas.",
            _suggest_one_kind(requests),
            kind=ShapeError,
        )


def _suggest_one_kind(requests: Sequence[Collective]) -> str:
    if len({tuple(x.shape for x in b.operands) for b in requests}) == 1:
        return suggest_cast("value", (x.dtype for b in requests for x in b.operands))
    return (
        "Reduce over the rows first (value.sum(axis=0)), or use all_gather, which takes different "
        "numbers of rows."
    )


_SAME_CONDITION = (
    "Make the condition that decides about it the same everywhere (flag = "
    "get_replica_context().all_reduce('sum', flag) > 0), or move the collective out of the branch."
)
_GATHER_BEFORE = (
    "A parameter in pieces is gathered where it is used: gather it before the branch or loop that "
    "differs, model = jaxdist.partition.gather(model), and use the result inside."
)


@called("strategy.run")
def _make_divergence_error(requests: Sequence[Any]) -> DivergentCollectiveError:
    is_of_pieces = any(getattr(request, "is_of_pieces", False) for request in requests)
    return DivergentCollectiveError(
        f"{name_call()}: the replicas did not reach the same collective.\n"
        f"{_describe_by_replica(requests)}\n\n"
        "A collective waits for all replicas, so all of them must reach it, in the same order.\n\n"
        f"{_GATHER_BEFORE if is_of_pieces else _SAME_CONDITION}"
    )


def _describe_by_replica(requests: Sequence[Any]) -> str:
    lines: dict[str, list[int]] = {}
    for number, what in enumerate(requests):
        text = "returned" if isinstance(what, Finished) else str(what)
        lines.setdefault(text, []).append(number)
    return "\n".join(f"replicas {numbers}: {text}" for text, numbers in lines.items())


def _get_name(primitive: Any) -> str:
    return "all_gather" if primitive is UNEVEN_ALL_GATHER else str(primitive.name)
