"""The program that a call of `run` executes, as a value that can be inspected."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist import _compat, _reports
from jaxdist._called import called
from jaxdist._collectives import TraceNotes
from jaxdist._mesh import ReplicaMesh
from jaxdist._program import report, virtual
from jaxdist._program.arguments.arguments import Static, is_static
from jaxdist._program.arguments.compiler_options import (
    CompilerOptions,
    add_options,
    refuse_option,
)
from jaxdist._program.arguments.in_slot import OutSlot
from jaxdist._program.compile import saving
from jaxdist._program.compile.replay import replay
from jaxdist._program.compile.result_layouts import choose_result_shardings
from jaxdist._program.compile.without_device import check_can_be_saved, check_needs_no_device
from jaxdist._program.logical.placed_work import PlacedWork
from jaxdist._program.nnx.graph_rules import Combination
from jaxdist._program.proof.replication import TracedCollective
from jaxdist._program.trace.axis_errors import explicit_types_error
from jaxdist._program.trace.trace import Signature, TracedStep
from jaxdist._program.uneven.uneven import cut
from jaxdist._program.variables.lift import NO_VARIABLES, LiftedVariables
from jaxdist._values import Kind, PiecesOfResult, hold_global, rebuild_on_unflatten
from jaxdist.errors import ContextError


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Program:
    """A step traced and analysed for one strategy and one signature; `Strategy.lower` returns it.

    Its `repr` shows the inputs and results with their kinds, and the collectives of the step.

    Shapes:
        Inputs are shown with global shapes, results with local ones.

    Example:
        >>> strategy = MirroredStrategy()
        >>> def step(w, x):
        ...     return get_replica_context().all_reduce("mean", w * x)
        >>> program = strategy.lower(step, (2.0, PerReplica(np.arange(8.0, dtype="float32"))))
        >>> [c.kind for c in program.collectives], program.results
        (['all-reduce'], {'result': 'mirrored float32[]'})

    Source:
        `jax.jit(...).lower(...)`.
    """

    name: str
    layout: ReplicaMesh
    signature: Signature
    traced: TracedStep
    outputs: tuple[OutSlot, ...]  # the variables of NNX objects first, then written variables
    traced_collectives: tuple[TracedCollective, ...]
    input_names: tuple[str, ...]
    combined: tuple[Combination, ...]  # variables of NNX objects that a collective makes equal
    donated: tuple[int, ...]  # numbers of input leaves
    variables: LiftedVariables = NO_VARIABLES
    told: TraceNotes = dataclasses.field(default_factory=TraceNotes)
    # Lowers the same step for a TPU slice and plans it. `Strategy.lower` sets it.
    planner: "Callable[..., _reports.SlicePlan] | None" = None
    # The work that runs on one logical device of each replica.
    placed: tuple[PlacedWork, ...] = ()
    # The compiler options of the user.
    asked_options: CompilerOptions = ()

    @property
    def inputs(self) -> dict[str, str]:
        """The kind, dtype and global shape of each traced input, by name.

        Example:
            >>> OneDeviceStrategy("cpu:0").lower(lambda x: x + 1, (np.zeros(3, "float32"),)).inputs
            {'args[0]': 'mirrored float32[3]'}
        """
        slots = self.signature.inputs
        return report.describe_slots(self.input_names, slots, dict(self.signature.uneven))

    @property
    def results(self) -> dict[str, str]:
        """The kind, dtype and local shape of each traced result, by name.

        Example:
            >>> OneDeviceStrategy("cpu:0").lower(lambda: {"a": jnp.ones(2)}).results
            {"result['a']": 'mirrored float32[2]'}
        """
        names = [o.name for o in self.outputs]
        return report.describe_slots(names, self.outputs, self.traced.uneven)

    def call(self, *leaves: Any) -> list[Any]:
        """Run on flat global arrays. `lowered` compiles this function."""
        # `traced.call` is the cheapest way: it does not trace the step's operations again.
        specs = [o.spec(self.layout) for o in self.outputs]
        if self.layout.num_virtual is not None:
            kinds = [o.kind for o in self.outputs]
            turns = virtual.VirtualDevice(self.layout)
            results = virtual.call_virtually(
                self.traced, self.signature, leaves, kinds, self.combined, turns
            )
        else:
            results = replay(self.layout, self.signature, self.traced, self.combined, leaves, specs)
            if results is None:
                results = self.traced.call(leaves, specs)
        return [
            self._constrain_rows(o, o.remove_extra_dim(r))
            for o, r in zip(self.outputs, results, strict=True)
        ]

    def _constrain_rows(self, out: OutSlot, array: Any) -> Any:
        """Constrain dim 0 of a per-replica result to the replicas; XLA lays out the other dims."""
        layout = self.layout
        if layout.num_logical == 1 or out.kind is not Kind.PER_REPLICA:
            return array
        if self.traced.is_explicit:
            return _put_rows_together(array, layout)
        if out.parts is not None and out.parts[:1] == (1,):
            return array  # The step's own sharding constraint already contains this.
        free = [PartitionSpec.UNCONSTRAINED] * (array.ndim - 1)
        spec = PartitionSpec(layout.replica_spec[0], *free)
        return jax.lax.with_sharding_constraint(array, NamedSharding(layout.auto_mesh, spec))

    def rebuild(self, results: Sequence[Any]) -> Any:
        """Return the step's result: plain arrays where replicas agree, otherwise `PerReplica`."""
        if self.traced.uneven:
            results = list(results)
            for number, shapes in self.traced.uneven.items():
                results[number] = cut(results[number], shapes, self.layout)
        return jax.tree.unflatten(jax.tree.structure(self.template), results)

    @functools.cached_property
    def template(self) -> Any:
        """The pytree that holds the flat results: `(state, the step's result)`, or the result."""
        # The nodes of this tree build `PerReplica` and `Sharded` when JAX unflattens it, so JAX's
        # C++ call path returns them without any Python code of a step.
        count = self.traced.num_graph

        def node(number: Any) -> Any:
            if isinstance(number, Static):
                return number
            out = self.outputs[count + number]
            if out.cut is not None:
                return PiecesOfResult(number, out.cut)
            if out.kind is not Kind.PER_REPLICA or count + number in self.traced.uneven:
                return number
            shared = self.layout.replicas_per_place
            return hold_global(number, scalars=out.shape == (), replicas_per_shard=shared)

        result = jax.tree.map(node, self.traced.template, is_leaf=is_static)
        result = rebuild_on_unflatten(result, Static)
        state = [
            PiecesOfResult(i, o.cut) if o.cut else i for i, o in enumerate(self.outputs[:count])
        ]
        has_state = self.signature.graph is not None or bool(self.variables.written)
        return (state, result) if has_state else result

    @functools.cached_property
    def result_shardings(self) -> list[NamedSharding] | list[NamedSharding | None]:
        """The shardings of the flat results; None where XLA chooses."""
        return choose_result_shardings(self.layout, self.signature, self.traced, self.outputs)

    @_compat.outside_of_meshes
    def lowered(self) -> jax.stages.Lowered:
        """Return JAX's lowered stage of this program.

        Raises:
            DeviceError: The program is for described GPUs, and calls back into Python.
            UnsupportedError: JAX cannot lower an operation on a value with Explicit types.
        """
        check_needs_no_device(self.name, self.traced.closed, self.layout)

        # A function of its own, which can have the name of the step.
        def call(*leaves: Any) -> list[Any]:
            return self.call(*leaves)

        call.__name__ = self.name
        jitted = jax.jit(
            call,
            donate_argnums=self.donated,
            out_shardings=self.result_shardings,
        )
        # JAX adds open constraints to nearly every result. They make XLA's TPU compiler insert
        # all-to-alls; see docs/design/010-logical-devices.md.
        exactly = _compat.use_exact_partitioner(self._needed_options)
        is_explicit = self.traced.is_explicit
        inputs = [i.abstract(on_users_mesh=is_explicit) for i in self.signature.inputs]
        with _compat.omit_open_constraints(), exactly:
            try:
                return jitted.lower(*inputs)
            except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
                if not is_explicit:
                    raise
                raise explicit_types_error(
                    error, self.name, self.layout, in_lowering=True
                ) from error

    @_compat.outside_of_meshes
    def compiled(self, lowered: jax.stages.Lowered | None = None) -> jax.stages.Compiled:
        """Return JAX's compiled stage, compiled with the options that this program needs."""
        options = self.compiler_options
        lowered = lowered or self.lowered()
        is_described = self.layout.described is not None
        cache = _compat.outside_of_cache() if is_described else contextlib.nullcontext()
        try:
            with cache, _compat.use_exact_partitioner(self._needed_options):
                if self.layout.is_described_gpu:
                    return _compat.compile_for_gpu_plan(lowered, options)
                return lowered.compile(compiler_options=options)
        except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
            better = refuse_option(error, self.asked_options, f"strategy.run({self.name})")
            if better is None:
                raise
            raise better from error

    def _identify(self, lowered: jax.stages.Lowered) -> "saving.Identity":
        """Return what decides whether a saved program is this one."""
        return saving.Identity(
            self.name,
            lowered,
            self.inputs,
            len(self.outputs),
            self.layout,
            self.compiler_options,
        )

    @called("CompiledProgram.save")
    def _save(self, path: str | os.PathLike[str], executable: jax.stages.Compiled) -> None:
        file = saving.check_path("path", path)
        check_can_be_saved(self.name, self.traced.closed, self.layout)
        lowered = self.lowered()
        if self.layout.platform == "cpu" and _compat.has_compilation_cache():
            with _compat.use_exact_partitioner(self._needed_options):
                executable = _compat.compile_anew(lowered, self.compiler_options)
        saving.save_program(file, self._identify(lowered), executable)

    def compile(self) -> "report.CompiledProgram":
        """Compile for the strategy's devices, without running anything.

        Cost:
            One compilation. It is not shared with `Strategy.run`.

        Example:
            >>> compiled = MirroredStrategy().lower(lambda x: x + 1, (1.0,)).compile()
            >>> compiled.collectives
            ()
        """
        return report.CompiledProgram(self, self.compiled())

    @property
    def compiler_options(self) -> dict[str, Any]:
        """The options that XLA compiles this program with: those of `RunOptions`, and its own.

        With virtual replicas, they keep the order of sums. On GPU, they set the size up to which
        XLA combines all-reduces. By default XLA would not combine the leaves of a larger pack. For
        described GPUs, they disable what needs a GPU while compiling.

        Example:
            >>> OneDeviceStrategy("cpu:0").lower(lambda: 1).compiler_options
            {}

        Raises:
            ArgumentError: `RunOptions` set another value for an option that the program needs.
        """
        options = add_options(
            self._needed_options, self.asked_options, f"strategy.run({self.name})", self.layout
        )
        packed = max((c.plan.pack_bytes for c in self.traced_collectives), default=0)
        if packed and self.layout.platform == "gpu" and self.layout.num_virtual is None:
            options.setdefault("xla_gpu_all_reduce_combine_threshold_bytes", str(packed))
        return options

    @property
    def _needed_options(self) -> dict[str, Any]:
        """The options without which this program cannot be compiled, or computes other bits."""
        options: dict[str, Any] = {}
        if self.layout.is_described_gpu:
            options |= _compat.get_gpu_plan_options()
        if self.layout.num_virtual is not None:
            options |= _compat.get_exact_options(self.layout.platform)
        return options

    @functools.cached_property
    def collectives(self) -> "tuple[report.CompiledRow, ...]":
        """The collectives of the compiled program: the rows of `explain`.

        Equal collectives are one row. It has the kind, the count, the bytes on each device, the
        size of the groups, the link between their devices, the number of runs in a loop, and the
        source line. `traced_collectives` lists the collectives of the step, before XLA combines and
        moves them.

        Cost:
            One compilation, the first time. It is not shared with `Strategy.run`.

        Example:
            >>> def step(x):
            ...     return get_replica_context().all_reduce("sum", x)
            >>> program = MirroredStrategy().lower(step, (PerReplica(range(8)),))
            >>> [(c.kind, c.count, c.num_bytes, c.group_size) for c in program.collectives]
            [('all-reduce', 1, 4, 8)]
            >>> [c.kind for c in program.traced_collectives]
            ['psum']
        """
        return self.explain().compiled

    def explain(self) -> "report.Explanation":
        """Return what the compiled program communicates, and what became of each asked collective.

        A notebook shows it as a table, `str` and `print` as aligned text, rich as a rich table.

        Cost:
            One compilation. It is not shared with `Strategy.run`.

        Example:
            >>> def step(x):
            ...     return get_replica_context().all_reduce("sum", x)
            >>> report = MirroredStrategy().lower(step, (PerReplica(range(8)),)).explain()
            >>> [(row.kind, row.group_size, row.level) for row in report.compiled]
            [('all-reduce', 8, 'inside')]
        """
        return self.compile().explain()

    def compile_for(
        self,
        topology: Any,
        *,
        logical: Any = None,
        global_batch: int | None = None,
        quick: bool = False,
        save: str | os.PathLike[str] | None = None,
    ) -> "_reports.SlicePlan":
        """Compile the same step for a TPU slice, and plan it. The slice need not exist here.

        The step is traced again for the replicas of that slice, with shapes only. It reads no
        values of arguments, and runs nothing.

        Shapes:
            Each replica keeps its number of rows: a per-replica `[R*b, ...]` becomes `[S*b, ...]`
            on the `S` replicas of the slice, unless `global_batch` is given. Sharded values are
            cut again.

        Cost:
            Two traces and compilations. One of them is for one device, for the comparison. If the
            step does not fit into memory, a few more, to find a batch that fits.

        Args:
            topology: `"v5p:8x8x8"`, `"v5e:4x4*2"` for two slices, a `tpu.Slice`, or a
                `tpu.TPUSystem`.
            logical: The logical devices of a replica: a number, or a box of chips such as `"2x2"`.
                None: as many as the strategy has.
            global_batch: The number of rows of all replicas together.
            quick: Compile only once: without the comparison with one device, and without the
                search for a batch that fits.
            save: A file for the compiled program, which runs on such a slice without compiling; see
                `CompiledProgram.save`.

        Returns:
            A plan. Print it, or read its fields.

        Raises:
            TopologyError: The slice does not exist, or the logical devices do not divide it.
            MissingExtraError: libtpu is not installed.
            ArgumentError: The replicas cannot share the batch, or the step uses variables from a
                closure, virtual replicas (`deterministic=True`), or values of different shapes.
            SavedProgramError: The file cannot be written.
            UnsupportedError: JAX cannot serialize the program, it calls back into Python, or it is
                for GPUs, whose kernels XLA can only choose on a GPU.

        Example:
            >>> program = MirroredStrategy().lower(lambda w, x: x @ w, (
            ...     jnp.ones((128, 8)), PerReplica(list(jnp.ones((8, 16, 128))))))
            >>> plan = program.compile_for("v5e:4x4")
            >>> plan.num_replicas, plan.global_rows, plan.memory.parameters
            (16, 256, 4096)
        """
        if self.planner is None:
            raise ContextError(
                f"compile_for was called on a program of {self.name} that strategy.lower did not "
                "make.\n\nA plan needs the strategy and the arguments of strategy.lower.\n\n"
                "Call strategy.lower(step, args).compile_for(topology)."
            )
        return self.planner(
            self, topology, logical=logical, global_batch=global_batch, quick=quick, save=save
        )

    def __repr__(self) -> str:
        return report.text(self)

    def _repr_html_(self) -> str:
        return _reports.as_fixed_width(report.text(self))


def _put_rows_together(array: Any, layout: ReplicaMesh) -> Any:
    """Return a value with types whose dim 0 is split over all replicas, and over nothing else."""
    sharding = jax.typeof(array).sharding
    first, *rest = sharding.spec
    axes = (first,) if isinstance(first, str) else tuple(first or ())
    kept = tuple(a for a in axes if a in layout.replica_axes)
    if kept != axes:
        array = jax.sharding.reshard(
            array, sharding.update(spec=PartitionSpec(kept or None, *rest))
        )
    # XLA chooses the layout over replica axes that are Auto.
    chosen = tuple(a for a in layout.replica_axes if a not in layout.mesh.explicit_axes)
    if not chosen:
        return array
    free = [PartitionSpec.UNCONSTRAINED] * (array.ndim - 1)
    spec = PartitionSpec(chosen, *free)
    return jax.lax.with_sharding_constraint(array, NamedSharding(layout.mesh, spec))
