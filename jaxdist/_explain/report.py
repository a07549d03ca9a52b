"""`explain`: describes a strategy, arrays or a program, and finds possible improvements."""

import re
from typing import Any, cast, overload

from jaxdist._called import called, refuse_type
from jaxdist._explain.arrays import ArraysReport
from jaxdist._explain.findings import find_in_arrays, find_in_compilations
from jaxdist._explain.leaves import collect_leaves, find_tracer, has_arrays
from jaxdist._explain.program import ProgramReport, explain_program
from jaxdist._explain.replicas import Chips, Replicas, list_replicas
from jaxdist._explain.strategy import ReplicaRow, StrategyReport, choose_colours
from jaxdist._mesh import ReplicaMesh
from jaxdist._parameter_server import ParameterServerStrategy
from jaxdist._program import Program
from jaxdist._reports import shorten_source
from jaxdist._strategies import Strategy, TPUStrategy, check_strategy
from jaxdist._typing import PyTree
from jaxdist._validate import check_keys, show
from jaxdist.errors import ContextError
from jaxdist.tpu import topology_of

# The name of several slices ends with their number: v5e:2x4*2.
_SLICES = re.compile(r"\*(\d+)$")
_PLACE = ("coords", "core_on_chip")


@overload
def explain(value: Strategy, strategy: None = None) -> StrategyReport: ...


@overload
def explain(value: Program, strategy: None = None) -> ProgramReport: ...


@overload
def explain(value: PyTree, strategy: Strategy | None = None) -> ArraysReport: ...


@called("explain")
def explain(
    value: Strategy | Program | PyTree, strategy: Strategy | None = None
) -> StrategyReport | ProgramReport | ArraysReport:
    """Describe a strategy, a program or arrays: where they are, and possible improvements.

    The result is text for `print`, tables for rich and for a notebook, and a picture
    (`save_png(path)`). Its fields have the same numbers.

    - For a strategy: the devices, the mesh, the process of each replica, the chips of TPUs with
      their links, and the programs that it compiled, each with the reason.
    - For an array, a pytree of arrays, an NNX object, a `fit.Model`, or a model, layer or
      optimizer of Keras: which device has which part, the bytes of each device by use, padding,
      and the largest arrays.
    - For a program from `Strategy.lower`: the memory of a device while it runs, its
      arguments, and its collectives.

    Cost:
        For a program, one compilation, which is not shared with `Strategy.run`. Otherwise nothing
        is copied and nothing runs.

    Args:
        value: The strategy, the program, or the arrays.
        strategy: The strategy whose steps will take the arrays. Then the report also says what each
            call copies, and shapes without devices are shown where a step would place them.

    Raises:
        ArgumentTypeError: `value` is not one of these; `strategy` is not a strategy, or is given
            although `value` is itself a strategy or a program.
        ArgumentError: The keys of a dict in `value` cannot be sorted.
        ContextError: The call is inside a step or `jax.jit`, where values have no devices.

    Example:
        >>> strategy = MirroredStrategy()
        >>> w = jax.device_put(np.ones((64, 4), "float32"), strategy.replicated_sharding)
        >>> report = jaxdist.explain({"w": w})
        >>> report.num_bytes, report.bytes_on(jax.devices()[0])
        (1024, 1024)
        >>> print(jaxdist.explain(MirroredStrategy(["cpu:0"])).text().splitlines()[0])
        MirroredStrategy: 1 replica x 1 logical device on 1 cpu device of 1 process

    Source:
        `jax.debug.visualize_array_sharding`, for arrays of rank 1 and 2.
    """
    if strategy is not None:
        check_strategy(strategy)
        if isinstance(value, (Strategy, Program)):
            raise refuse_type(
                f"value={show(value)} and strategy={show(strategy)}.",
                "A strategy and a program know their devices; only arrays can be explained for a "
                "strategy.",
                "Leave strategy out.",
            )
    if isinstance(value, Strategy):
        return _explain_strategy(value)
    if isinstance(value, Program):
        return explain_program(value)
    check_keys("explain was given", "value", value)
    traced = find_tracer(value)
    if traced is not None:
        raise ContextError(
            f"explain was called inside a step or jax.jit: {traced} is a tracer.\n\n"
            "A traced value has no devices and no memory.\n\n"
            "Explain the arguments before the call, or the program: strategy.lower(step, args)."
        )
    if not has_arrays(value):
        raise refuse_type(
            f"value={show(value)}, which has no arrays.",
            "value is a strategy, a program of strategy.lower, an array, a pytree of arrays, an "
            "NNX object, a fit.Model, or a built model of Keras.",
            "Pass for instance jaxdist.explain(model).",
        )
    layout = None if strategy is None else strategy.layout
    found = collect_leaves(value, layout)
    findings = tuple(find_in_arrays(found, layout))
    replicas = Replicas()
    if strategy is not None:
        chips, _ = _find_chips(strategy, strategy.layout)
        replicas = list_replicas(
            strategy.layout, choose_colours(strategy.layout.num_replicas, chips)
        )
    return ArraysReport(tuple(leaf for leaf, _ in found), findings, replicas)


def _explain_strategy(strategy: Strategy) -> StrategyReport:
    layout = strategy.layout
    chips, places = _find_chips(strategy, layout)
    owners = layout.replica_owners
    rows = tuple(
        ReplicaRow(
            replica,
            owners[replica],
            tuple(devices),
            tuple(places[d] for d in devices if d in places),
        )
        for replica, devices in enumerate(layout.device_grid.tolist())
    )
    notes = []
    if isinstance(strategy, ParameterServerStrategy):
        notes.append(
            "Variables are on the parameter servers. These devices run the steps of this process; "
            "each worker has its own."
        )
    if layout.described is not None:
        notes.append(f"{layout.described} is a description: programs compile, and cannot run.")
    compilations = strategy._runner.compilations
    return StrategyReport(
        type(strategy).__name__,
        layout,
        rows,
        compilations,
        chips,
        tuple(notes),
        tuple(find_in_compilations(compilations, shorten_source)),
    )


def _find_chips(
    strategy: Strategy, layout: ReplicaMesh
) -> tuple[Chips | None, dict[Any, tuple[int, ...]]]:
    """Return the chips of a strategy, and the coordinates of its devices."""
    places: dict[Any, tuple[int, ...]] = {}
    named = None
    if isinstance(strategy, TPUStrategy):
        named = _SLICES.search(strategy.cluster_resolver.tpu_name)
        assignment = strategy._assignment
        topology = assignment.topology
        cores = assignment.core_assignment
        for replica, devices in enumerate(layout.device_grid):
            for part, device in enumerate(devices):
                places[device] = tuple(cores[replica, part].tolist())
    # Devices of GPUs have `coords` in XLA too, but no cores.
    elif all(getattr(d, a, None) is not None for d in layout.devices for a in _PLACE):
        topology, by_task = topology_of(cast(Any, layout.devices))
        pairs = zip(by_task, topology.device_coordinates, strict=True)
        for devices, coordinates in pairs:
            places.update(zip(devices, map(tuple, coordinates.tolist()), strict=True))
    else:
        return None, places
    # Virtual TPUs are CPU devices, which belong to no slice; the name has the number of slices.
    slices = {getattr(d, "slice_index", None) or 0 for d in layout.devices}
    num_slices = int(named[1]) if named else len(slices)
    at: dict[Any, tuple[int, int]] = {}
    for replica, devices in enumerate(layout.device_grid):
        for part, device in enumerate(devices):
            at[places[device]] = (replica, part)
    x, y, z, core = topology.mesh_shape.tolist()
    return Chips((x, y, z, core), at, num_slices), places
