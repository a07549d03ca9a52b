"""The one file that knows which JAX is installed; every use of private JAX or Flax is here.

Each entry says what it waits for. Works with JAX 0.10.2 to 0.12.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax._src import config as _config
from jax._src import core as _core
from jax._src import linear_util as _linear_util
from jax._src import mesh as _mesh
from jax._src import shard_map as _shard_map
from jax._src import source_info_util as _source_info
from jax._src import tree_util as _tree_util
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import _jax
from jax._src.lib import xla_client as _xla_client
from jax._src.lib.mlir.dialects import sdy as _sdy
from jax._src.state.types import AbstractRef as _AbstractRef
from jax.experimental import compute_on as _compute_on
from jax.extend.core import ClosedJaxpr

Miss = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any]]


def make_dispatcher(
    name: str,
    miss: Miss,
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
) -> Callable[..., Any]:
    """JAX's C++ call path with our own handler for every signature that it has not seen.

    A signature is the pytree structure and, for each leaf, dtype, shape, weak type, sharding and
    whether it is committed, so everything that decides which program runs is checked in C++ and
    costs no Python. `miss(args, kwargs)` returns the outputs and either what
    `fast_call_record` made, to be used for this signature from now on, or None. Under
    `jax.disable_jit()` every call is a miss.

    Waits for a public way to dispatch one function to several compiled programs.
    """

    def cache_miss(*args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        outputs, record = miss(args, kwargs)
        return outputs, record, False

    def without_jit(*args: Any, **kwargs: Any) -> Any:
        return miss(args, kwargs)[0]

    return _jax.pjit(
        name,
        without_jit,
        cache_miss,
        list(static_argnums),
        list(static_argnames),
        _pxla.JitGlobalCppCacheKeys(),
        _tree_util.dispatch_registry,
        _pxla.cc_shard_arg,
    )


def fast_call_record(
    compiled: jax.stages.Compiled, num_arguments: int, outputs: Sequence[Any], template: Any
) -> Any | None:
    """What the C++ call path needs to run `compiled`, or None where it cannot.

    Args:
        compiled: A compiled function of flat arguments and flat results.
        num_arguments: How many arguments it takes.
        outputs: The flat results of one call of it.
        template: The pytree that the flat results fill, with one leaf for each.
    """
    executable = compiled._executable
    if not isinstance(executable, _pxla.MeshExecutable) or executable._mut:
        return None
    call = executable.unsafe_call
    if not isinstance(call, _pxla.ExecuteReplicated):
        return None
    if call.ordered_effects or call.has_unordered_effects or call.has_host_callbacks:
        return None
    if not all(isinstance(x, _xla_client.ArrayImpl) for x in outputs):
        return None
    const_args = executable.shard_const_args(compiled._params.const_args)
    # One bit for each argument that is passed, also for those that the program does not use.
    kept = [i in executable._kept_var_idx for i in range(len(const_args) + num_arguments)]
    pairs = functools.partial(zip, strict=True)
    _, out_tree = _tree_util.dispatch_registry.flatten(template, None)
    return _pxla.MeshExecutableFastpathData(
        executable.xla_executable,
        out_tree,
        [_physical(s, a) for s, a in pairs(executable._in_shardings, executable.in_avals)],
        [_physical(s, a) for s, a in pairs(executable._out_shardings, executable.out_avals)],
        [o.aval for o in outputs],
        [o._committed for o in outputs],
        kept,
        executable._dispatch_in_layouts,
        const_args,
    )


def _physical(sharding: Any, aval: Any) -> Any:
    """The sharding of the raw bits; it differs for typed random keys."""
    if aval is _core.abstract_token or not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return sharding
    return _pxla.sharding_impls.physical_sharding(aval, sharding)


def inside_trace() -> bool:
    """Whether a JAX transformation is tracing the caller. Waits for a public name."""
    return not _core.trace_state_clean()


# Before 0.11 XLA's CPU compiler drops optimization barriers before it puts all-reduces together.
BARRIERS_HOLD = tuple(int(n) for n in jax.__version__.split(".")[:2]) >= (0, 11)


# JAX 0.10 on several CPU devices starts a program before it looks whether its buffers are there.
DELETED_ARE_REFUSED = tuple(int(n) for n in jax.__version__.split(".")[:2]) >= (0, 11)


def any_deleted(leaves: Sequence[Any]) -> bool:
    """Whether one of these is an array whose buffer is gone; 60 ns an array."""
    try:
        return any(map(_is_deleted, leaves))
    except TypeError:
        return any(isinstance(x, _xla_client.ArrayImpl) and x.is_deleted() for x in leaves)


_is_deleted: Callable[[Any], bool] = _xla_client.ArrayImpl.is_deleted


# What keeps barriers until everything is fused, and loops out of nested functions, where JAX 0.10
# cannot emit a barrier.
_BARRIERS_ON_OLD_CPU = {
    "xla_disable_hlo_passes": "cse_barrier_expander,small-while-loop-hoisting",
}


def exact_options(platform: str) -> dict[str, bool | str]:
    """Compile options of programs that have to compute the same bits in other surroundings.

    JAX 0.10 on CPU drops optimization barriers before it fuses; GPUs may choose algorithms that
    add in any order. Waits for the end of JAX 0.10, and for a way to ask for determinism.
    """
    if platform == "gpu":
        return {"xla_gpu_deterministic_ops": True}
    return {} if BARRIERS_HOLD or platform != "cpu" else dict(_BARRIERS_ON_OLD_CPU)


def are_set_by_flags(options: dict[str, Any]) -> bool:
    """Whether compile options hold for every program of this process, by `XLA_FLAGS`."""
    given = os.environ.get("XLA_FLAGS", "").lower().split()
    return all(
        f"--{name}={value}".lower() in given or (value is True and f"--{name}" in given)
        for name, value in options.items()
    )


def must_interpret() -> bool:
    """Whether nothing compiled can be called here: inside a trace, or without `jit`."""
    return inside_trace() or is_disabled_jit()


_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


def source_of(eqn: Any) -> str:
    """`file:line (function)` of the user's line that made an equation."""
    for frame in _source_info.user_frames(eqn.source_info.traceback):
        if not frame.file_name.startswith(_OURS):
            return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
    return str(_source_info.summarize(eqn.source_info))


def is_transposed(eqn: Any) -> bool:
    """Whether an operation was made when a gradient went backwards through another one."""
    return "transpose(" in str(eqn.source_info.name_stack)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a `scan` are constants, and how many are carried.

    JAX 0.12 has them as a tree of trees; 0.10 as two numbers. Goes when 0.10 goes.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


# Calls of one sub-program with the operands as they are, and the parameter that holds it; by the
# names of all versions.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}


def is_committed(array: jax.Array) -> bool:
    """Whether the array is tied to its devices. Waits for JAX to make `committed` public API."""
    committed: Any = array
    return bool(committed._committed)


def as_uncommitted(array: jax.Array) -> jax.Array:
    """The same single-device buffer, free to follow the arrays that it is combined with."""
    buffers = [array.addressable_data(0)]
    return _xla_client.ArrayImpl(array.aval, array.sharding, buffers, committed=False)


def put_uncommitted(array: np.ndarray) -> jax.Array:
    """A host array on the default device, tied to none; a sixth of the time of `device_put`.

    The array must not be written to afterwards: the CPU backend may use its memory as it is.
    """
    config: Any = jax.config
    device = config.jax_default_device or jax.local_devices()[0]
    if isinstance(device, str):
        return jax.device_put(array)
    aval, layout = _on_one_device(array.shape, array.dtype, device)
    placed: jax.Array = _pxla.batched_device_put(aval, layout, [array], [device], committed=False)
    return placed


def pieces_of(array: jax.Array) -> list[Any]:
    """The single-device pieces of an array of this process, in the order of its devices.

    `addressable_data(i)` gives them one by one, each with checks that cost more than the reading.
    """
    if array.is_deleted():
        raise RuntimeError(f"Array has been deleted with shape={array.dtype}{list(array.shape)}.")
    held: Any = array
    return list(held._arrays)


@functools.lru_cache(maxsize=256)
def _on_one_device(shape: tuple[int, ...], dtype: Any, device: jax.Device) -> tuple[Any, Any]:
    return _core.ShapedArray(shape, dtype), jax.sharding.SingleDeviceSharding(device)


def call_traced(
    closed: Any,
    params: dict[str, Any],
    parts: Sequence[tuple[int, int]],
    arguments: Sequence[Any],
) -> list[Any]:
    """Stage a traced program, with other parameters of its last equation, without tracing it.

    Binding the equation would trace its body again: a third of the time of tracing and lowering.
    A jitted call carries its program along as it is. Waits for a `shard_map` whose `out_specs`
    may depend on its body.

    Args:
        closed: A program that ends in a `shard_map` and returns its results.
        params: New parameters of that `shard_map`.
        parts: For each result, on which dim how many local ones lie one after the other.
        arguments: What to call it with.
    """
    eqn = closed.jaxpr.eqns[-1]
    results = []
    for var, (dim, count) in zip(eqn.outvars, parts, strict=True):
        local = var.aval
        shape = tuple(n * count if d == dim else n for d, n in enumerate(local.shape))
        results.append(_core.Var(local.update(shape=shape)))
    last = eqn.replace(params=params, outvars=results)
    jaxpr = closed.jaxpr.replace(eqns=[*closed.jaxpr.eqns[:-1], last], outvars=results)
    # JAX 0.12 has one class for open and closed programs.
    program = jaxpr if closed.jaxpr is closed else closed.replace(jaxpr=jaxpr)
    bound = _jitted_params(program, len(arguments), len(results))
    return list(_jit_equation().primitive.bind(*arguments, **bound))


@functools.cache
def _jit_equation() -> Any:
    return jax.make_jaxpr(jax.jit(lambda x: x + 1))(0).jaxpr.eqns[-1]


def _jitted_params(program: Any, num_arguments: int, num_results: int) -> dict[str, Any]:
    params = dict(_jit_equation().params, jaxpr=program, name="step")
    for name, value in params.items():
        if isinstance(value, tuple) and len(value) == 1:
            params[name] = value * (num_results if name.startswith("out_") else num_arguments)
    return params


def set_variables(variables: Sequence[nnx.Variable[Any]], values: Sequence[Any]) -> None:
    """Give NNX variables new values, a tenth of the time of `set_raw_value` on each.

    `set_raw_value` compares the trace of the caller with that of the variable every time; one
    variable is checked here for all. Waits for a way to set many variables at once.
    """
    plain = nnx.Variable.set_raw_value
    checked = False
    for variable, value in zip(variables, values, strict=True):
        if checked and type(variable).set_raw_value is plain:
            object.__setattr__(variable, "_raw_value", value)
        else:
            variable.set_raw_value(value)
            checked = True


def rewritten_derivatives(
    params: dict[str, Any], rewrite: Callable[[Any, Sequence[Any]], Any], traced_in: Any = None
) -> dict[str, Any]:
    """Parameters of a custom derivative's call in which its forward rule is rewritten too.

    The rule is traced when the call is differentiated; over the mesh of the equation
    `traced_in`, where that is another one than the caller's. The backward rule of a `custom_vjp`
    is left as it is.
    """
    changed = dict(params)
    mesh = None if traced_in is None else traced_in.ctx.cur_abstract_mesh
    for name in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk"):
        if name in params:
            changed[name] = _rewritten_rule(params[name], rewrite, mesh)
    return changed


def _rewritten_rule(rule: Any, rewrite: Callable[[Any, Sequence[Any]], Any], mesh: Any) -> Any:
    def traced(*zeros: Any) -> Any:
        with contextlib.nullcontext() if mesh is None else _over(mesh):
            jaxpr, consts, *rest = rule.call_wrapped(*zeros)
        closed = rewrite(jaxpr, consts)
        return closed.jaxpr, closed.consts, *rest

    return _linear_util.wrap_init(traced, debug_info=rule.debug_info)


@contextlib.contextmanager
def _over(mesh: Any) -> Iterator[None]:
    """Trace over this mesh; the public context manager refuses another number of devices."""
    around = _MESH_CONTEXT.swap_local(mesh)
    try:
        yield
    finally:
        _MESH_CONTEXT.set_local(around)


def at_source_of(eqn: Any) -> Any:
    """A context in which new operations stand at the source line of an equation."""
    names = _source_info.current_name_stack() + eqn.source_info.name_stack
    return _source_info.user_context(eqn.source_info.traceback, name_stack=names)


def bind_like(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Apply the operation of an equation anew, under its source line and configuration."""
    params = eqn.primitive.get_bind_params(params)
    names = _source_info.current_name_stack() + eqn.source_info.name_stack
    with (
        _source_info.user_context(eqn.source_info.traceback, name_stack=names),
        eqn.ctx.manager,
    ):
        return eqn.primitive.bind(*operands, **params)


def bind_here(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """`bind_like`, under the mesh of the caller instead of the one that was traced over."""
    params = eqn.primitive.get_bind_params(params)
    names = _source_info.current_name_stack() + eqn.source_info.name_stack
    here = _mesh.get_abstract_mesh()
    with (
        _source_info.user_context(eqn.source_info.traceback, name_stack=names),
        eqn.ctx.manager,
        _over(here),
    ):
        return eqn.primitive.bind(*operands, **params)


# JAX 0.12 has it in another module.
_MESH_CONTEXT: Any = (
    getattr(_mesh, "abstract_mesh_context_manager", None) or _config.abstract_mesh_context_manager
)


def current_trace() -> Any:
    """The innermost trace that the caller is in, to be compared by identity.

    Waits for one public name: `get_opaque_trace_state` moves between 0.10 and 0.12.
    """
    return _core.trace_ctx.trace


def is_disabled_jit() -> bool:
    """Whether the caller is under `jax.disable_jit()`."""
    disabled: bool = _config.disable_jit.value
    return disabled


Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


class HeldTracer(_core.Tracer[Any]):
    """An array of one replica, with a mark that says where it came from.

    A tracer, because JAX takes every concrete operand of `jax.lax.psum` for a constant; in all
    else it behaves as the array that it holds.
    """

    __slots__ = ("held", "mark")

    def __init__(self, trace: Any, held: Any, mark: Any) -> None:
        super().__init__(trace, _core.typeof(held))
        self.held = held
        self.mark = mark

    def is_of(self, trace: Any) -> bool:
        return self._trace is trace

    def to_concrete_value(self) -> Any:
        return self.held

    def full_lower(self) -> "HeldTracer":
        return self

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.held.__array__(*args, **kwargs)

    def __float__(self) -> float:
        return float(self.held)

    def __complex__(self) -> complex:
        return complex(self.held)

    def tolist(self) -> Any:
        return self.held.tolist()

    def tobytes(self, order: Any = "C") -> Any:
        return self.held.tobytes(order)

    def item(self, *args: Any) -> Any:
        return self.held.item(*args)

    @property
    def sharding(self) -> Any:
        return self.held.sharding

    def devices(self) -> Any:
        return self.held.devices()

    def block_until_ready(self) -> "HeldTracer":
        self.held.block_until_ready()
        return self

    def __repr__(self) -> str:
        return repr(self.held)

    def __str__(self) -> str:
        return str(self.held)

    def __format__(self, spec: str) -> str:
        return format(self.held, spec)


def _of_held(name: str) -> property:
    return property(lambda self: getattr(self.held, name))


# What JAX refuses of a tracer, and a concrete array has.
for _name in (
    "addressable_data addressable_shards committed copy_to_host_async device format "
    "global_shards is_deleted is_fully_addressable is_fully_replicated on_device_size_in_bytes "
    "unsafe_buffer_pointer __dlpack__ __dlpack_device__ __reduce__"
).split():
    setattr(HeldTracer, _name, _of_held(_name))


class _OpByOp(_core.Trace):
    """Gives each operation to a handler."""

    __slots__ = ("_handler", "_stage")

    def __init__(self, handler: Handler, stage: Callable[[Any], Any]) -> None:
        super().__init__()
        self._handler = handler
        self._stage = stage

    def stage_value(self, val: Any) -> Any:
        return val if isinstance(val, HeldTracer) else self._stage(val)

    def cur_qdd(self, x: Any) -> Any:
        return x.cur_qdd()

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
        with _core.set_current_trace(_core.eval_trace):
            return self._handler(primitive, args, params)

    def process_call(self, primitive: Any, f: Any, tracers: Any, params: Any, /) -> Any:
        with _core.set_current_trace(self):
            return f.call_wrapped(*tracers)

    def process_shard_map(self, primitive: Any, *args: Any, **params: Any) -> Any:
        with _core.set_current_trace(_core.eval_trace):
            return self._handler(primitive, args, params)

    def process_custom_jvp_call(
        self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **_: Any
    ) -> Any:
        with _core.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **_: Any
    ) -> Any:
        with _core.set_current_trace(self):
            return fun.call_wrapped(*tracers)


@contextlib.contextmanager
def op_by_op(
    handler: Handler,
    stage: Callable[[Any], Any],
    axis_sizes: Sequence[tuple[str, int]],
    mesh: jax.sharding.Mesh,
) -> Iterator[Any]:
    """Give every operation of the block to `handler`; yields the trace, for `HeldTracer`.

    `stage` makes a `HeldTracer` of a host value that becomes an array (`jnp.asarray(2.0)`).

    Transformations (`jax.grad`, `jax.vmap`) work as they do outside of `jit`, and collectives
    over the axes come to the handler like every other operation. `mesh` is the one that sharding
    constraints may name. Waits for a public way to write
    an interpreter that JAX's own control flow does not have to be traced for.
    """
    trace = _OpByOp(handler, stage)
    with (
        _core.set_current_trace(trace),
        _core.extend_axis_env_nd(list(axis_sizes)),
        _config.disable_jit(True),
        _mesh.use_abstract_mesh(mesh.abstract_mesh),
    ):
        yield trace


def inside(trace: Any, fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn` with its operations given to `trace`."""
    with _core.set_current_trace(trace):
        return fn(*args)


def outside(fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn` as if no trace were around the caller."""
    with _core.set_current_trace(_core.eval_trace), _config.disable_jit(False):
        return fn(*args)


def evaluate(primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
    """One operation on concrete arrays, as JAX does it outside of `jit`."""
    return _core.eval_trace.process_primitive(primitive, args, params)


def is_mapped(value: Any) -> bool:
    """Whether `jax.vmap` maps over the value. Waits for a public name."""
    return isinstance(value, _batching.BatchTracer)


def with_jit() -> Any:
    """A context in which `jit` compiles, also inside `op_by_op` and `jax.disable_jit()`."""
    return _config.disable_jit(False)


def settings_of_thread() -> Callable[[], None]:
    """What the caller has set with JAX's context managers, as a function that sets it elsewhere.

    JAX keeps `jax.enable_x64`, `jax.debug_nans`, `jax.default_matmul_precision` and so on for
    each thread by itself. Waits for a public copy of them.
    """
    held = {}
    for holder in _config.config._value_holders.values():
        if isinstance(holder, _config.State):
            local = holder.get_local()
            if local is not _config.config_ext.unset:
                held[holder] = local

    def take_over() -> None:
        for holder, local in held.items():
            holder.set_local(local)

    return take_over


def callers_line() -> str:
    """`file:line (function)` of the user's line that the caller was called from."""
    return source_of(_Here(_source_info.current()))


@dataclasses.dataclass(frozen=True)
class _Here:
    source_info: Any


# The source of an operation that nobody will ask for.
NO_SOURCE = _source_info.new_source_info()


def on_host(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)` computed by the host of the device, inside a compiled program.

    JAX 0.10 has it under another name. Goes when 0.10 goes.
    """
    make: Any = getattr(_compute_on, "compute_on2", None) or _compute_on.compute_on
    space = jax.memory.Space
    hosted = make(fn, compute_type="device_host", out_memory_spaces=space.Host)
    moved = [jax.device_put(x, space.Host) for x in args]
    return jax.device_put(hosted(*moved), space.Device)


def is_ref(variable: Any) -> bool:
    """Whether a variable of a program is a mutable reference. Waits for a public name."""
    return isinstance(variable.aval, _AbstractRef)


def without_refs(closed: Any) -> Any:
    """A program that ends in a `shard_map`, with the refs made in its body turned into values.

    JAX does the same when it lowers a program. Waits for a public way to do it before.
    """
    eqn = closed.jaxpr.eqns[-1]
    mesh, manual = eqn.params["mesh"], eqn.params["newly_manual_axes"]
    with (
        _shard_map._extend_axis_env(mesh, manual),
        _mesh.use_abstract_mesh(_shard_map._as_manual_mesh(mesh, manual)),
        _config._check_vma(eqn.params["check_vma"]),
    ):
        pure = _pxla._discharge_internal_refs(ClosedJaxpr(eqn.params["jaxpr"], ()))
    params = {**eqn.params, "jaxpr": getattr(pure, "jaxpr", pure)}
    last = eqn.replace(params=params, effects=_without_ref_effects(eqn.effects))
    jaxpr = closed.jaxpr.replace(
        eqns=[*closed.jaxpr.eqns[:-1], last], effects=_without_ref_effects(closed.jaxpr.effects)
    )
    return jaxpr if closed.jaxpr is closed else closed.replace(jaxpr=jaxpr)


def _without_ref_effects(effects: Any) -> frozenset[Any]:
    return frozenset(e for e in effects if not isinstance(e, _core.InternalMutableArrayEffect))


def constrain_tiles(
    context: Any, value: Any, parts: Sequence[int], axis: str, mesh_shape: tuple[Any, ...]
) -> Any:
    """Lower the wish that dims of a value are cut into parts over one mesh axis, the first slowest.

    Dims of 0 parts are left to the partitioner. `NamedSharding` has no names for parts of an
    axis, and both partitioners have. Waits for those names.

    Args:
        context: Of the lowering rule.
        value: What is lowered, as MLIR knows it.
        parts: For each dim; 1 is a dim that is whole everywhere.
        axis: The mesh axis.
        mesh_shape: Names and sizes of all axes of the mesh.
    """
    [aval] = context.avals_in
    # The raw bits of typed random keys have more dims.
    physical = _core.physical_aval(aval)
    parts = (*parts, *(1,) * (physical.ndim - len(parts)))
    if _config.use_shardy_partitioner.value:
        return _sdy.sharding_constraint(value, _tiles(parts, axis, mesh_shape))
    sizes = [n for n in parts if n > 1] or [dict(mesh_shape)[axis]]
    names = [f"{axis}_{i}" for i in range(len(sizes))]
    shape: dict[str, int] = {}
    for name, size in mesh_shape:
        shape.update(zip(names, sizes, strict=True) if name == axis else [(name, size)])
    free = iter(names)
    open_dims = {d for d, n in enumerate(parts) if n == 0}
    unconstrained = jax.sharding.PartitionSpec.UNCONSTRAINED
    spec = [next(free) if n > 1 else None if n else unconstrained for n in parts]
    manual = getattr(context.module_context.axis_context, "manual_axes", ())
    kinds = jax.sharding.AxisType
    types = tuple(kinds.Manual if name in manual else kinds.Auto for name in shape)
    mesh = jax.sharding.AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=types)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    proto = sharding._to_xla_hlo_sharding(physical.ndim).to_proto()
    return _mlir.wrap_with_sharding_op(context, value, aval, proto, unspecified_dims=open_dims)


def _tiles(parts: Sequence[int], axis: str, mesh_shape: tuple[Any, ...]) -> Any:
    mesh = _sdy.MeshAttr.get([_sdy.MeshAxisAttr.get(n, s) for n, s in mesh_shape], [])
    size = dict(mesh_shape)[axis]
    dims = []
    before = 1
    for count in parts:
        axes: list[Any] = []
        if count > 1:
            part = None if count == size else _sdy.SubAxisInfoAttr.get(before, count)
            axes = [_sdy.AxisRefAttr.get(axis, sub_axis_info=part)]
            before *= count
        dims.append(_sdy.DimensionShardingAttr.get(axes, is_closed=count > 0))
    return _sdy.TensorShardingAttr.get(mesh, dims)
