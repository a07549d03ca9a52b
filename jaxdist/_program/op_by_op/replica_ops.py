"""The operations of one replica of a step that runs op by op."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.extend.core.primitives import all_gather_p
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxdist import _compat
from jaxdist._called import called, name_call
from jaxdist._collectives import UNEVEN_ALL_GATHER, GatherLog, shared_trace_key
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.arguments import explain_ref
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.control_flow import Scan, While, keep_finished_rows
from jaxdist._program.jaxprs.subprograms import iterate_equations, iterate_programs, open_jaxpr
from jaxdist._program.op_by_op.invalid_numbers import not_finite_error
from jaxdist._program.op_by_op.rendezvous import Collective, NumRows
from jaxdist._program.op_by_op.tape import Tape
from jaxdist._program.op_by_op.thread_scheduler import ThreadScheduler
from jaxdist._program.proof.replication import get_named_axes
from jaxdist._program.state.no_rows import place_of
from jaxdist._program.trace.axis_errors import check_names, unbound_axis_error
from jaxdist._program.trace.step_errors import check_operands
from jaxdist._values import OPEN, PIECE, Cut, pad_dim, take_mean
from jaxdist.errors import ContextError

# They change only layouts. Op by op, each replica has whole arrays on one device.
_LAYOUT_ONLY = known.LAYOUT_ONLY | {"jaxdist_logical_layout", "jaxdist_logical_device"}


class ReplicaOps:
    """The evaluator of operations on one replica; it meets the other replicas at collectives.

    Args:
        number: The number of the replica.
        layout: The layout of the strategy.
        device: The device of the replica.
    """

    def __init__(self, number: int, layout: ReplicaMesh, device: jax.Device) -> None:
        self.tape = Tape()
        # It gets the sizes of gathers from the other replicas.
        self.log: GatherLog = _ExchangedSizes(self, layout.num_replicas)
        self.scheduler: ThreadScheduler | None = None
        self.trace: Any = None
        self._number = number
        self._layout = layout
        # A sharding, not the device: `device_put` to a device keeps the axes of the old mesh.
        self._to = SingleDeviceSharding(device)
        self._device = device
        self._indices = place_of(number, layout)
        # The user's line of the current all-reduce, if it consists of several operations.
        self._line = ""
        # Copies of closed-over arrays by id. The original is kept too, so that its id stays taken.
        self._copies: dict[int, tuple[Any, Any]] = {}

    def add_input(self, value: Any, *, is_metric: bool = False) -> Any:
        """Return the tracer of an input of the step."""
        own = _compat.call_outside_traces(jax.device_put, value, self._to)
        mark = self.tape.add_input(jax.typeof(own))
        if is_metric:
            mark.from_zero = _compat.call_outside_traces(jnp.zeros_like, own)
        return _compat.HeldTracer(self.trace, own, mark)

    def stage(self, value: Any) -> Any:
        """Return the tracer of a Python value that the step turns into an array."""
        own = _compat.call_outside_traces(jax.device_put, value, self._to)
        return _compat.HeldTracer(self.trace, own, self.tape.add_constant(value))

    def __call__(self, primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
        """Evaluate one operation; JAX calls this."""
        name = primitive.name
        here = [self._get_array(a) for a in args]
        # Run called functions operation by operation, so that collectives in them meet, and errors
        # name the operation.
        if name in known.CALLS and known.CALLS[name] in params and name != "shard_map":
            around = self._line
            if "plan" in params:
                self._line = around or _compat.find_callers_line()
            try:
                return self._call(params[known.CALLS[name]], args)
            finally:
                self._line = around
        self._check_axes(name, args, params)
        axes = frozenset(get_named_axes(params)) & frozenset(self._layout.replica_axes)
        if axes and name in known.COLLECTIVES:
            return self._meet(primitive, args, params)
        if name == "axis_index" and axes:
            return self._record(primitive, params, args, self._get_index(params))
        if primitive is PIECE:
            return self._gather_declared(args, params)
        if primitive is OPEN:
            return self._record(primitive, params, args, self._cut_piece(here[0], params["cut"]))
        if name in _LAYOUT_ONLY or (name == "device_put" and _is_layout_of_mesh(args, params)):
            return list(args) if primitive.multiple_results else args[0]
        if name == "shard_map":
            raise ContextError(_explain_shard_map())
        if self._has_communication(params):
            return self._run_control_flow(name, args, params)
        with shared_trace_key():
            try:
                out = _compat.evaluate(primitive, here, params)
                # JAX itself checks only in threads that have the setting.
                _compat.check_numbers(name, out if primitive.multiple_results else [out])
            except (FloatingPointError, _compat.InvalidNumberError) as error:
                line = _compat.find_callers_line()
                where = f"on replica {self._number}"
                raise not_finite_error(error, name, line, where, here) from error
            results = self._record(primitive, params, args, out)
            self._evaluate_from_zero(primitive, params, args, here, results)
        return results

    def _evaluate_from_zero(
        self,
        primitive: Any,
        params: dict[str, Any],
        args: Sequence[Any],
        here: list[Any],
        results: Any,
    ) -> None:
        """Evaluate an operation on a metric again, as if the metric were zero before the step."""
        marks = [getattr(a, "mark", None) for a in args]
        others = [None if m is None else m.from_zero for m in marks]
        if all(x is None for x in others):
            return
        given = [h if x is None else x for h, x in zip(here, others, strict=True)]
        out = _compat.evaluate(primitive, given, params)
        many = isinstance(out, (list, tuple))
        made = zip(results if many else [results], out if many else [out], strict=True)
        for tracer, value in made:
            tracer.mark.from_zero = value

    def _record(self, primitive: Any, params: dict[str, Any], args: Sequence[Any], out: Any) -> Any:
        many = isinstance(out, (list, tuple))
        results = out if many else [out]
        avals = [jax.typeof(x) for x in results]
        marks = self.tape.record(primitive, params, args, avals, self._line)
        made = [_compat.HeldTracer(self.trace, x, m) for x, m in zip(results, marks, strict=True)]
        return made if many else made[0]

    def _get_array(self, value: Any) -> Any:
        """Return the array of an operand, on the device of this replica."""
        if isinstance(value, _compat.HeldTracer):
            if not value.is_of(self.trace):
                raise ContextError(_explain_other_step(value))
            return value.held
        if not isinstance(value, jax.core.Tracer) and _compat.is_mutable(value):
            raise ContextError(explain_ref("The step closes over a jax.Ref"))
        if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
            return value
        if value.sharding.device_set == {self._device}:
            return value
        known_here = self._copies.get(id(value))
        # A step may use a closed-over array in many operations: copy it once.
        if known_here is None:
            moved = jax.device_put(value, self._to)
            known_here = self._copies[id(value)] = (value, moved)
        return known_here[1]

    # Collectives

    @called("strategy.run")
    def _check_axes(self, name: str, args: Sequence[Any], params: dict[str, Any]) -> None:
        """Raise for a collective over an axis that does not exist, or with indices of slices."""
        if name not in known.COLLECTIVES and name != "axis_index":
            return
        find_line = _compat.find_callers_line
        check_names(name, params, find_line, self._layout)
        check_operands(name, args, find_line)
        strange = [a for a in get_named_axes(params) if a not in self._layout.replica_axes]
        if strange:
            raise unbound_axis_error(f"{name_call()}, at {find_line()},", strange[0], self._layout)

    def _meet(self, primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
        operands = tuple(jnp.asarray(self._get_array(x)) for x in args)
        is_gather = _compat.is_called_from_folder("_values/sharded/")
        line = _compat.find_callers_of_library() if is_gather else _compat.find_callers_line()
        request = Collective(primitive, params, operands, self._line or line, is_gather)
        result = self.meet(request)
        # The analysis of the tape knows `all_gather`: its result is equal on all replicas.
        if primitive is UNEVEN_ALL_GATHER:
            gather = {"axis_name": params["axis_name"], "axis_index_groups": None}
            return self._record(all_gather_p, gather, args, result)
        return self._record(primitive, params, args, result)

    def meet(self, request: Any) -> Any:
        """Wait for the other replicas; return the answer of the rendezvous for this replica."""
        if self.scheduler is None:
            raise ContextError(
                "A collective was called on a replica that is not running.\n\n"
                "The replicas of a step meet in its collectives while the step runs.\n\n"
                "Return the value from the step, and use what strategy.run returns."
            )
        return self.scheduler.meet(self._number, request)

    def _get_index(self, params: dict[str, Any]) -> Any:
        index = 0
        for axis in get_named_axes(params):
            index = index * self._layout.mesh.shape[axis] + self._indices[axis]
        return jax.device_put(np.int32(index), self._to)

    # Arrays in pieces. Here every replica has the whole array, so operations on it are correct
    # however it is cut. The proof on the tape finds steps that would fail when compiled.

    def _gather_declared(self, args: Sequence[Any], params: dict[str, Any]) -> Any:
        cut = params["cut"]
        mean = functools.partial(take_mean, divisor=params["divisor"], others=params["others"])
        gather = functools.partial(
            jax.lax.all_gather, axis_name=cut.over(self._layout), axis=cut.dim, tiled=True
        )
        piece = _compat.call_in_trace(self.trace, mean, args[0])
        padded = self._get_array(_compat.call_in_trace(self.trace, gather, piece))
        whole = jax.lax.slice_in_dim(padded, 0, cut.size, axis=cut.dim)
        # The tape already has the operations of the mean; the parameters mark them as a mean.
        return self._record(PIECE, params, [piece], whole)

    def _cut_piece(self, whole: Any, cut: Cut) -> Any:
        count = cut.pieces(self._layout)
        rows = cut.rows(count)
        place = int(self._get_index({"axes": cut.over(self._layout)}))
        padded = pad_dim(jnp.asarray(whole), cut.dim, cut.padding(count))
        return jax.lax.slice_in_dim(padded, place * rows, (place + 1) * rows, axis=cut.dim)

    # Programs inside operations. JAX evaluates those without collectives as a whole.

    def _has_communication(self, params: dict[str, Any]) -> bool:
        ours = frozenset(self._layout.replica_axes)
        return any(
            ours & frozenset(get_named_axes(eqn.params)) or eqn.primitive in (PIECE, OPEN)
            for program in iterate_programs(list(params.values()))
            for eqn in iterate_equations(program)
        )

    def _call(self, program: Any, args: Sequence[Any]) -> list[Any]:
        closed = program if hasattr(program, "consts") else ClosedJaxpr(program, ())
        return _compat.call_in_trace(self.trace, jaxpr_as_fun(closed), *args)

    @called("strategy.run")
    def _run_control_flow(
        self, name: str, args: Sequence[Any], params: dict[str, Any]
    ) -> list[Any]:
        if name == "cond":
            branches = params["branches"]
            chosen = min(max(int(self._get_array(args[0])), 0), len(branches) - 1)
            return self._call(branches[chosen], args[1:])
        if name == "while":
            return self._run_while(list(args), params)
        if name == "scan":
            return self._run_scan(list(args), params)
        raise ContextError(
            f"{name_call()} cannot run {name} op by op: there is a collective inside it, at "
            f"{_compat.find_callers_line()}.\n\n"
            "Op by op a collective may be in a function, jax.checkpoint, cond, while or scan.\n\n"
            "Run this step compiled (jaxdist.config.run_eagerly(False)), or move the collective "
            f"out of the {name}."
        )

    def _run_while(self, args: list[Any], params: dict[str, Any]) -> list[Any]:
        loop = While.of(params)
        of_cond, of_body, state = loop.split(args)
        while True:
            [goes_on] = self._call(loop.condition, of_cond + state)
            if not np.any(self._get_array(goes_on)):
                return state
            after = self._call(loop.body, of_body + state)
            # Under `vmap` the condition has many values: keep the state where it is False.
            state = _compat.call_in_trace(self.trace, keep_finished_rows, goes_on, after, state)

    def _run_scan(self, args: list[Any], params: dict[str, Any]) -> list[Any]:
        loop = Scan.of(params)
        held, state, rows = loop.split(args)
        length, program, carry = loop.length, loop.program, loop.num_carry
        order = range(length - 1, -1, -1) if params["reverse"] else range(length)
        made: list[Any] = [None] * length
        for i in order:
            row = [
                _compat.call_in_trace(self.trace, jax.lax.index_in_dim, x, i, 0, False)
                for x in rows
            ]
            out = self._call(program, [*held, *state, *row])
            state, made[i] = out[:carry], out[carry:]
        if not length:
            avals = [v.aval for v in open_jaxpr(program).outvars[carry:]]
            return [*state, *(jnp.zeros((0, *a.shape), a.dtype) for a in avals)]
        columns = zip(*made, strict=True)
        return [*state, *(_compat.call_in_trace(self.trace, jnp.stack, list(c)) for c in columns)]


class _ExchangedSizes(GatherLog):
    """Sizes of gathers that each replica gets from the other replicas."""

    def __init__(self, ops: ReplicaOps, num_replicas: int) -> None:
        super().__init__((), num_replicas)
        self._ops = ops

    def next(self, rows: int) -> tuple[int, ...]:
        return self._ops.meet(NumRows(rows, _compat.find_callers_line()))


def _is_layout_of_mesh(args: Sequence[Any], params: dict[str, Any]) -> bool:
    """Whether a `device_put` of the step only lays values out over a mesh."""
    is_of_step = all(isinstance(a, _compat.HeldTracer) for a in args)
    return is_of_step and all(isinstance(d, NamedSharding) for d in params["devices"])


@called("strategy.run")
def _explain_shard_map() -> str:
    return (
        f"{name_call()} cannot run a jax.shard_map op by op, at {_compat.find_callers_line()}.\n\n"
        "Op by op every replica has whole arrays on one device, and there is nothing to map "
        "over.\n\nRun this step compiled: jaxdist.config.run_eagerly(False)."
    )


def _explain_other_step(value: Any) -> str:
    return (
        "A value of an earlier step, or of another replica, was used at "
        f"{_compat.find_callers_line()}: {value!r}.\n\n"
        "Values that a step computes belong to it; only its results leave it.\n\n"
        "Return the value from the step, or keep a copy: np.asarray(value)."
    )
