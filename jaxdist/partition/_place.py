"""`place`, which puts a model and its optimizer on the devices by rules.

# Note [Optimizer state follows its parameter]
Rules are written for parameters. A leaf of optimizer state (a moment) takes the placement of the
parameter with the same shape and the longest common end of the path: `opt_state/0/mu/mlp/kernel`
follows `mlp/kernel`. If the two had different placements, each update would move one of them.
State of other shapes (adafactor's factors) is replicated. If the tree has no parameters, the rules
are matched against the paths of the state itself.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from flax import nnx

from jaxdist import _compat, _pipeline
from jaxdist._called import called, refuse, refuse_type
from jaxdist._integers import check_fits
from jaxdist._mesh import ReplicaMesh
from jaxdist._replica import HasLayout, layout_of
from jaxdist._validate import check_has_arrays, format_lines, show
from jaxdist._values import (
    Sharded,
    copy_if_writable,
    cut_and_place,
    is_of_this_process,
    make_equal,
    put,
)
from jaxdist.errors import ArgumentError, ContextError, ShapeError, UnsupportedError
from jaxdist.partition._leaves import Entry, collect_entries, name_entries
from jaxdist.partition._placements import (
    TABLE,
    ByNames,
    Placement,
    Replicate,
    Stage,
    find_nearest,
    is_match,
)
from jaxdist.partition._resolve import ResolvedPlacement, resolve
from jaxdist.partition._rules import Rules, as_rules, describe_conflicts, put_on_stages

T = TypeVar("T")


@_compat.outside_of_meshes
@called("partition.place")
def place(strategy: HasLayout, tree: T, rules: Any, *, wrt: Any = nnx.Param) -> T:
    """Put a model, its optimizer, or any pytree of them on the devices by rules.

    Optimizer state is placed like its parameter: a leaf follows the parameter that has its shape
    and whose path has the same end. Other optimizer state, variables that are not parameters (batch
    statistics, random keys) and scalars are replicated. A second call moves the arrays.

    Shapes:
        Unchanged. A sharded leaf becomes a `Sharded` value, which is padded if its dim is not a
        multiple of the number of replicas.

    Cost:
        A copy to the devices. A device gets only its piece of a sharded leaf.

    Args:
        strategy: The strategy whose devices are used.
        tree: NNX modules and optimizers, or built models, layers and optimizers of Keras, which are
            changed in place; or pytrees of arrays. A Keras model includes its optimizer.
            `jax.ShapeDtypeStruct` leaves stay abstract and get the layout, for `Strategy.lower`.
        rules: `Rules`, pairs of pattern and placement, or `ByNames`.
        wrt: A Flax filter that selects the NNX variables that are parameters.

    Returns:
        The pytree with placed arrays; objects of NNX and Keras are the same objects.

    Raises:
        ArgumentError: No rule or two rules match a leaf, a rule matches nothing, `wrt` selects no
            variable, rules shard leaves over virtual replicas, JAX cannot hold a leaf as an array,
            or a Keras model is not built.
        ShapeError: A dim does not exist, or the devices do not divide it.
        ArgumentTypeError: `strategy` is not a strategy, `rules` are not rules, or a leaf is already
            placed: a `PerReplica` or `jaxdist.Variable`.
        UnsupportedError: A Keras variable has the placement `Shard` or `ByNames`, or the strategy
            has parameter servers.
        MixedStrategyError: A Keras model was made in the scope of another strategy.
        ContextError: Called in a function that JAX traces, or while a Keras model trains.
        DeviceError: The devices for the arrays are only described.

    Example:
        >>> strategy = MirroredStrategy()
        >>> params = {"up": {"kernel": jnp.ones((16, 3))}, "scale": jnp.ones(())}
        >>> placed = partition.place(strategy, params, partition.fsdp(min_bytes=0))
        >>> placed["up"]["kernel"], placed["scale"].is_fully_replicated
        (Sharded(float32[16, 3] cut along dim 0, held as [16, 3]), True)
    """
    remedy = "Pass the strategy first: partition.place(strategy, model, rules)."
    layout = layout_of(strategy, remedy)
    own = as_rules(rules)
    entries, rebuild = collect_entries(strategy, tree, _as_predicate(wrt))
    if not entries:
        check_has_arrays("tree", tree, "a pytree of arrays, or an NNX object")
    _check_wrt(entries, wrt)
    # Resolve all leaves before moving the first one, so that an error leaves the model unchanged.
    where = _resolve_all(entries, own, layout)
    # Every process has made its own arrays, and places the parts for its own devices.
    named = name_entries(entries)
    for name, entry in named.items():
        check_fits(name, entry.value)
    local = {name: e.value for name, e in named.items() if is_of_this_process(e.value)}
    for name, value in make_equal(local, layout).items():
        named[name].value = value
    for entry, found in zip(entries, where, strict=True):
        entry.assign(_place_leaf(entry, found, layout))
    return rebuild()


def _as_predicate(wrt: Any) -> Callable[[Any, Any], bool]:
    """Convert a Flax filter to a function of a path and a variable."""
    try:
        return nnx.filterlib.to_predicate(wrt)
    except (TypeError, ValueError) as error:
        raise refuse_type(
            f"wrt={show(wrt)}.",
            "wrt says which NNX variables are parameters: a class of variables, or another filter "
            "of Flax.",
            "Pass for instance wrt=nnx.Param, or leave it out.",
        ) from error


def _check_wrt(entries: Sequence[Entry], wrt: Any) -> None:
    """Check that `wrt` selects a variable; otherwise the rules would have nothing to match."""
    if wrt is not nnx.Param and entries and all(e.is_of_keras for e in entries):
        raise refuse(
            f"wrt={show(wrt)} and an object of Keras.",
            "wrt selects variables of Flax NNX. The parameters of a Keras model are the weights "
            "that its layers train.",
            "Leave wrt out.",
        )
    others = [e.leaf.path for e in entries if e.role == "other" and e.leaf.shape]
    if wrt is nnx.Param or not others or any(e.role == "parameter" for e in entries):
        return
    raise ArgumentError(
        f"partition.place(wrt={wrt!r}): none of {len(others)} NNX variable(s) is a parameter by "
        f"this filter.\n{format_lines(others)}\n\n"
        "Rules are for parameters, and wrt says which variables are parameters.\n\n"
        "Pass the class of the variables that rules are for, such as wrt=nnx.Param."
    )


def _resolve_all(
    entries: Sequence[Entry], rules: Rules, layout: ReplicaMesh
) -> list[ResolvedPlacement]:
    """Return the placement of each leaf; raise an error if the rules do not fit the leaves."""
    params = [e for e in entries if e.role == "parameter"]
    # See Note [Optimizer state follows its parameter]
    asked = params or [e for e in entries if e.role == "optimizer"]
    chosen = _choose_placements([e.leaf.path for e in asked if e.leaf.shape], rules, bool(params))
    found: dict[int, ResolvedPlacement] = {}
    for entry in asked:
        placement = chosen.get(entry.leaf.path, Replicate())
        if entry.is_of_keras and isinstance(placement, ByNames):
            raise UnsupportedError(_describe_keras(entry, placement, "have no names of dims"))
        try:
            found[id(entry)] = resolve(entry.leaf, placement, layout)
            if isinstance(placement, Stage) and placement.chunks > 1:
                _pipeline.note_chunks(layout.mesh, entry.leaf.shape, placement.chunks)
        # Without parameters, a rule for a kernel may match state of another shape. Replicate it.
        except ShapeError:
            if params:
                raise
            found[id(entry)] = ResolvedPlacement(layout.replicated)
        if entry.is_of_keras and found[id(entry)].cut is not None:
            why = "are whole on each replica, since layers of Keras compute with arrays"
            raise UnsupportedError(_describe_keras(entry, placement, why))
    if layout.num_virtual is not None and any(r.cut is not None for r in found.values()):
        raise refuse(
            "rules that cut arrays into pieces, and a strategy with deterministic=True.",
            "Its virtual replicas share devices, and a piece is on the device of one replica.",
            "Make the strategy without deterministic, or use rules with partition.Replicate().",
        )
    for entry in entries:
        if id(entry) not in found:
            same = _find_parameter(entry, params) if entry.role == "optimizer" else None
            found[id(entry)] = (
                ResolvedPlacement(layout.replicated) if same is None else found[id(same)]
            )
    return [found[id(e)] for e in entries]


def _describe_keras(entry: Entry, placement: Placement, why: str) -> str:
    return (
        f"partition.place was given rules with {placement!r} for the Keras variable {entry.leaf}."
        f"\n\nVariables of Keras {why}. They may be split over the logical devices.\n\n"
        "Use partition.Split(dim), or rules such as partition.tensor_parallel(), and a strategy "
        "with logical devices: MirroredStrategy(mesh=mesh, replica_axes=('data',)). Models with "
        "other placements are made with Flax NNX."
    )


def _choose_placements(
    paths: Sequence[str], rules: Rules, are_params: bool
) -> dict[str, Placement]:
    """Return the placement of each path. See Note [Rules have no order]."""
    found = {path: [pair for pair in rules.rules if is_match(pair[0], path)] for path in paths}
    several = [(path, [p for p, _ in pairs]) for path, pairs in found.items() if len(pairs) > 1]
    if several:
        raise ArgumentError(describe_conflicts(several))
    if are_params or not any(found.values()):
        _check_all_match(found, rules, are_params)
    placements = {path: pairs[0][1] for path, pairs in found.items() if pairs}
    if rules.otherwise is not None:
        placements |= {path: rules.otherwise for path in paths if path not in placements}
    unused = [p for p, _ in rules.stages if not any(is_match(p, path) for path in paths)]
    if unused and are_params and paths:
        raise ArgumentError(
            f"partition.place: the rules put {unused[0]!r} on stages, which matches no parameter "
            "of tree.\n\n"
            f"The nearest path is {find_nearest(unused[0], paths)!r}.\n\n"
            "Pass the pattern of the stacked layers: rules.on_stages('layers/**')."
        )
    return {path: put_on_stages(rules, path, found) for path, found in placements.items()}


def _check_all_match(found: dict[str, Any], rules: Rules, are_params: bool) -> None:
    used = {p for pairs in found.values() for p, _ in pairs}
    unused = [p for p, _ in rules.rules if p not in used]
    # Every model names its embedding table alike, so a match of it says nothing about other layers.
    if unused and (rules.must_match or not used - {TABLE}) and found:
        lines = [f"{p!r}; the nearest path is {find_nearest(p, found)}" for p in unused]
        if not rules.must_match:
            raise ArgumentError(
                f"partition.place: none of the {len(unused)} rules matches one of the "
                f"{len(found)} parameters of tree.\n"
                f"{format_lines(lines)}\n\n"
                "Ready-made rules match the usual names of layers.\n\n"
                'Write rules for the names of this model: partition.Rules([("path/of/kernel", '
                "partition.Split(1))], otherwise=partition.Replicate())."
            )
        raise ArgumentError(
            f"partition.place: {len(unused)} rule(s) match no parameter of tree.\n"
            f"{format_lines(lines)}\n\n"
            "Each rule matches at least one parameter, so that a wrong pattern is found.\n\n"
            "Correct the pattern, or leave the rule out; Rules(..., must_match=False) is for "
            "rules that are shared by models."
        )
    if not are_params:
        return
    alone = [path for path, pairs in found.items() if not pairs]
    if alone and rules.otherwise is None:
        patterns = [p for p, _ in rules.rules]
        lines = [
            path
            if not patterns
            else f"{path}; the nearest pattern is {find_nearest(path, patterns)!r}"
            for path in alone
        ]
        raise ArgumentError(
            f"partition.place: no rule matches {len(alone)} parameter(s).\n"
            f"{format_lines(lines)}\n\n"
            "Each parameter has a placement.\n\n"
            f"Add a rule such as ({alone[0]!r}, partition.Replicate()), or a placement for "
            "the rest: Rules(..., otherwise=partition.Replicate())."
        )


def _find_parameter(entry: Entry, params: Sequence[Entry]) -> Entry | None:
    """Return the parameter to which a leaf of optimizer state belongs; None if none matches."""
    own = f"/{entry.leaf.path}"
    fitting = [
        p
        for p in params
        if p.leaf.shape == entry.leaf.shape and own.endswith(f"/{_common_tail(p.leaf.path, own)}")
    ]
    return max(fitting, key=lambda p: len(_common_tail(p.leaf.path, own)), default=None)


def _common_tail(path: str, own: str) -> str:
    """Return the longest end of a parameter's path that is also the end of the path `own`."""
    # In a pytree of parameters and state, the paths of parameters start with a name (`params`)
    # that the paths of the state do not contain. So drop segments from the start.
    parts = path.split("/")
    for start in range(len(parts)):
        tail = "/".join(parts[start:])
        if own.endswith(f"/{tail}"):
            return tail
    return path


@called(lambda entry: f"partition.place of an array ({entry.leaf})")
def _place_leaf(entry: Entry, found: ResolvedPlacement, layout: ReplicaMesh) -> Any:
    value = entry.value
    # The array may be sharded for another strategy.
    if isinstance(value, Sharded):
        value = value.whole()
    if isinstance(value, jax.core.Tracer):
        raise ContextError(
            f"partition.place was called inside a function that JAX traces, on {entry.leaf}.\n\n"
            "It puts arrays on devices, and a traced array has none.\n\n"
            "Call it outside. To make the arrays in pieces at once, place the shapes, "
            "jax.eval_shape(make), and use their shardings: jax.jit(make, out_shardings=...)."
        )
    cut = found.cut
    if isinstance(value, jax.ShapeDtypeStruct):
        shape = found.padded_shape(tuple(value.shape), layout)
        abstract = jax.ShapeDtypeStruct(shape, value.dtype, sharding=found.sharding)
        return abstract if cut is None else Sharded(abstract, *cut)
    layout.check_can_run()
    try:
        if cut is None:
            # See Note [Who owns host memory]
            return put(copy_if_writable(value), found.sharding)
        return cut_and_place(value, cut, layout)
    except (TypeError, RuntimeError) as error:
        # JAX cannot hold the value as an array, or a step has donated the array.
        raise ArgumentError(
            f"partition.place cannot put {entry.leaf} on devices: {error}\n\n"
            "It places arrays of numbers that no step has taken by donation.\n\n"
            "Leave other values out of the tree, and place arrays before they are donated."
        ) from error
