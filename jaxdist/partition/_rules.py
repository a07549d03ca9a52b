"""Rules that choose the placement of each leaf of a model by its path.

# Note [Rules have no order]
Each parameter matches exactly one rule, or `otherwise`. Each rule matches at least one parameter,
unless `must_match=False`. In libraries where the first match wins, a renamed layer falls through to
a later rule, and loses its layout without a message. Here that is an error. So patterns need no
order, and lists of rules can be joined.
"""

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from jaxdist._called import call_as, called, refuse, refuse_type
from jaxdist._validate import as_flag, as_list, check_has_arrays, format_lines, show
from jaxdist.errors import ArgumentError
from jaxdist.partition._activations import check_activation, constrain
from jaxdist.partition._placements import (
    STAGE,
    TABLE,
    ByNames,
    Placement,
    Replicate,
    Shard,
    Split,
    Stage,
    check_placement,
    find_nearest,
    is_match,
)

_CALLER = "partition.Rules"


@final
class Rules:
    """Patterns over paths, each with a placement.

    A pattern is matched against the end of a path such as `layers/0/mlp/up/kernel`, segment by
    segment: `mlp/up/kernel` and `{up,down}/kernel` match it. `*` is any one segment, `**` any
    number of segments. A pattern that starts with `/` must match the whole path. The optimizer
    state of a parameter has the placement of the parameter.

    Each parameter matches one rule. Scalars need no rule: they are replicated.

    Args:
        rules: `(pattern, placement)` pairs, or a mapping.
        otherwise: Placement of parameters that no rule matches; with None, these are an error.
        activations: `(pattern, placement)` pairs for names of activations, which
            `rules.constrain(x, name)` in the model applies. `Split` and `Replicate` only.
        must_match: Whether a rule that matches nothing is an error.

    Raises:
        ArgumentTypeError: A value is not a pattern or not a placement.
        ArgumentError: A pattern is given twice.

    Example:
        >>> rules = partition.Rules(
        ...     [("mlp/up/kernel", partition.Split(1)), ("mlp/down/kernel", partition.Split(0))],
        ...     otherwise=partition.Replicate())
        >>> rules.placement_of("layers/0/mlp/up/kernel")
        Split(dim=1)
    """

    __slots__ = ("activations", "must_match", "otherwise", "rules", "stages")

    @called(_CALLER)
    def __init__(
        self,
        rules: Iterable[tuple[str, Placement]] | Mapping[str, Placement],
        otherwise: Placement | None = None,
        *,
        activations: Iterable[tuple[str, Placement]] | Mapping[str, Placement] = (),
        must_match: bool = True,
    ) -> None:
        self.rules = _as_pairs("rules", rules)
        self.activations = _as_pairs("activations", activations)
        for pattern, placement in self.activations:
            call_as(f"{_CALLER}(activations=[({pattern!r}, ...)])", check_activation, placement)
        self.otherwise = None if otherwise is None else check_placement("otherwise", otherwise)
        self.must_match = as_flag("must_match", must_match)
        # Patterns of stacks of layers, each with the `Stage` around the placement of a layer.
        self.stages: tuple[tuple[str, Stage], ...] = ()

    @called("Rules.placement_of")
    def placement_of(self, path: str) -> Placement | None:
        """Return the placement of one path; None if no rule matches and `otherwise` is None.

        Raises:
            ArgumentError: Two rules match.

        Example:
            >>> print(partition.Rules([("bias", partition.Replicate())]).placement_of("a/kernel"))
            None
        """
        path = _check_path("path", path)
        found = _find_match(self.rules, path) or self.otherwise
        return None if found is None else put_on_stages(self, path, found)

    @called("Rules.on_stages", replaces="partition.Stage")
    def on_stages(self, pattern: str, *, axis: str = STAGE, chunks: int = 1) -> "Rules":
        """Return these rules for a model whose stacked layers are the stages of a pipeline.

        A leaf that the pattern matches gets the placement `Stage(of)`, where `of` is the placement
        by these rules, whose dims are those of one layer.

        Args:
            pattern: The pattern of the leaves of the stack, such as `"layers/**"`.
            axis: As for `partition.Stage`.
            chunks: As for `partition.Stage`.

        Raises:
            ArgumentTypeError: `pattern` or `axis` is not a string, or `chunks` is not an integer.
            ArgumentError: `chunks` is less than 1. When leaves are placed: the rule of one is a
                `Stage` with another axis or other chunks.

        Example:
            >>> rules = partition.fsdp(min_bytes=0).on_stages("layers/**")
            >>> rules.placement_of("layers/mlp/up/kernel")
            Stage(of=Shard(dim=None, split=None, axes=None, pad=False, min_bytes=0))
            >>> rules.placement_of("embed/embedding")
            Shard(dim=None, split=None, axes=None, pad=False, min_bytes=0)
        """
        staged = copy.copy(self)
        stage = Stage(axis=axis, chunks=chunks)
        staged.stages = (*self.stages, (_check_path("pattern", pattern), stage))
        return staged

    @called("Rules.constrain")
    def constrain(self, value: Any, name: str) -> Any:
        """Return an activation with the layout that the rules give its name.

        Shapes:
            Unchanged: the shape that one replica sees.

        Cost:
            The communication that changes the layout; nothing with one logical device.

        Args:
            value: An array inside a step; outside of a step it is returned unchanged.
            name: The name of the activation; exactly one rule for activations must match it.

        Raises:
            ArgumentError: No rule or two rules match the name.

        Example:
            >>> rules = partition.Rules([], activations=[("mlp/hidden", partition.Split(-1))])
            >>> rules.constrain(jnp.ones((2, 4)), "layers/0/mlp/hidden").shape
            (2, 4)
        """
        name = _check_path("name", name)
        check_has_arrays("value", value)
        placement = _find_match(self.activations, name)
        if placement is None:
            known = find_nearest(name, [p for p, _ in self.activations])
            raise refuse(
                f"name={name!r}, which no rule for activations matches.",
                f"The nearest one is {known!r}."
                if known
                else "There are no rules for activations.",
                f"Add it: Rules(..., activations=[({name!r}, partition.Split(-1))]).",
            )
        return constrain(value, placement)

    def __repr__(self) -> str:
        lines = [f"  {pattern!r}: {placement!r}" for pattern, placement in self.rules]
        if self.otherwise is not None:
            lines.append(f"  otherwise: {self.otherwise!r}")
        lines += [f"  stages {pattern!r}: {stage!r}" for pattern, stage in self.stages]
        lines += [f"  activation {p!r}: {placement!r}" for p, placement in self.activations]
        return "\n".join(["Rules(", *lines, ")"])


def put_on_stages(rules: Rules, path: str, placement: Placement) -> Placement:
    """Return the placement of a leaf, by the placement of one layer; see `Rules.on_stages`.

    Raises:
        ArgumentError: The placement is one of other stages.
    """
    stage = _find_match(rules.stages, path)
    if not isinstance(stage, Stage):
        return placement
    if not isinstance(placement, Stage):
        return dataclasses.replace(stage, of=placement)
    if placement == dataclasses.replace(stage, of=placement.of):
        return placement
    raise ArgumentError(
        f"partition.Rules: {path} has the rule {placement!r}, and on_stages puts it on {stage!r}."
        "\n\nA leaf is on the stages of one axis, in one number of chunks.\n\n"
        f"Give it the rule {placement.of!r}, which is the placement of one layer, or leave it out "
        "of on_stages."
    )


@called(None, replaces=_CALLER)
def as_rules(rules: Any) -> Rules:
    """Convert pairs, a mapping, or one `ByNames` for all leaves to `Rules`."""
    if isinstance(rules, Rules):
        return rules
    if isinstance(rules, (Mapping, list, tuple)):
        return Rules(rules)
    if isinstance(rules, ByNames):
        return Rules([("*", rules)])
    raise refuse_type(
        f"rules={show(rules)}.",
        "rules are partition.Rules, pairs of a pattern and a placement, or a mapping.",
        "Pass partition.Rules([(pattern, placement), ...]), or ready ones such as "
        "partition.fsdp().",
    )


def _find_match(pairs: Iterable[tuple[str, Placement]], path: str) -> Placement | None:
    """Return the placement of the one pattern that matches a path; None if no pattern does."""
    found = [(p, placement) for p, placement in pairs if is_match(p, path)]
    if len(found) > 1:
        raise ArgumentError(describe_conflicts([(path, [p for p, _ in found])]))
    return found[0][1] if found else None


def describe_conflicts(found: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return the message for leaves that more than one rule matches."""
    lines = [f"{path}: {' and '.join(map(repr, patterns))}" for path, patterns in found]
    return (
        f"partition.Rules: {len(found)} leaf or leaves are matched by more than one rule.\n"
        f"{format_lines(lines)}\n\n"
        "Each leaf has one placement, and the order of rules does not matter.\n\n"
        "Make the patterns longer, so that each leaf matches one of them. For the rest pass "
        "Rules(..., otherwise=...)."
    )


def _check_path(name: str, path: Any) -> str:
    if isinstance(path, str):
        return path
    raise refuse_type(
        f"{name}={show(path)}.",
        f"{name} is a path.",
        'Write it with slashes: "layers/0/mlp/up/kernel".',
    )


def _as_pairs(name: str, rules: Any) -> tuple[tuple[str, Placement], ...]:
    is_mapping = isinstance(rules, Mapping)
    given = as_list(
        name,
        list(rules.items()) if is_mapping else rules,
        "a list of (pattern, placement) pairs, or a mapping",
        'Pass for instance [("mlp/up/kernel", partition.Split(1))]. To add to other rules, pass '
        "[*other.rules, (pattern, placement)].",
    )
    pairs = []
    for pair in given:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise refuse_type(
                f"{name} with {show(pair)}.",
                f"Each entry of {name} is a pair: (pattern, placement).",
                'Write for instance ("mlp/up/kernel", partition.Split(1)).',
            )
        pairs.append((pair[0], check_placement(f"{name}[{pair[0]!r}]", pair[1])))
    # A mapping cannot hold a pattern twice, but a list can. See Note [Rules have no order].
    patterns = [p for p, _ in pairs]
    twice = sorted({p for p in patterns if patterns.count(p) > 1})
    if twice:
        raise refuse(
            f"{len(twice)} pattern(s) of {name} twice: {twice}.",
            "Each pattern occurs once.",
            "Leave one of each out.",
        )
    return tuple(pairs)


# Several names for each kind of layer, since libraries of models name them differently.
_ATTENTION_IN = "*att*/{query,key,value,q_proj,k_proj,v_proj}"
_ATTENTION_OUT = "*att*/{out,o_proj}"
_MLP_IN = "{up,gate,wi,wi_0,wi_1,fc1,up_proj,gate_proj}"
_MLP_OUT = "{down,wo,fc2,down_proj}"
_VOCABULARY = "{unembed,lm_head}"


def replicated() -> Rules:
    """Return the rules of data parallelism: every device holds every parameter.

    Example:
        >>> partition.replicated().placement_of("layers/0/mlp/up/kernel")
        Replicate()
    """
    return Rules([], otherwise=Replicate())


@called("partition.fsdp", replaces="partition.Shard")
def fsdp(*, min_bytes: float | None = None, axes: tuple[str, ...] | None = None) -> Rules:
    """Return the rules of fully sharded data parallelism (ZeRO-3).

    Each parameter is sharded over the replicas along the dim that `Shard()` takes. Gradients and
    the optimizer state are sharded in the same way. Small parameters are replicated.

    Args:
        min_bytes: Leaves with fewer bytes (in float32) are replicated; None takes the size from
            which sharding is faster.
        axes: The replica axes to shard over, if the strategy has several; None means all of them.

    Example:
        >>> partition.fsdp(min_bytes=0).placement_of("embed/embedding")
        Shard(dim=None, split=None, axes=None, pad=False, min_bytes=0)

    Source:
        ZeRO, arXiv:1910.02054; FSDP, arXiv:2304.11277.
    """
    return Rules([("*", Shard(axes=axes, min_bytes=min_bytes))])


@called("partition.tensor_parallel", replaces="partition.Split")
def tensor_parallel(*, axis: str | None = None) -> Rules:
    """Return the rules of tensor parallelism for attention and MLP blocks.

    The kernels into a block (`query`, `key`, `value`; `up`, `gate`) are split by their outputs,
    and the kernels out of it (`out`; `down`) by their inputs. So a forward pass needs only one
    all-reduce at the end of each block. The projection to the vocabulary is split by its outputs.
    An embedding table is split by its rows if the logical devices divide them; a lookup then costs
    one more all-reduce. The rest is replicated. The number of heads must be a multiple of the
    number of logical devices. Kernels of layers that are stacked in one array (`nnx.scan`) have one
    more dim in front. If their variables have the metadata `stacked_layers=True`, they are placed
    like a kernel of one layer; otherwise they need their own rules.

    Args:
        axis: The axis of the mesh over which kernels are split; None means all axes that are not
            for replicas (nor for stages, with `Rules.on_stages`).

    Example:
        >>> rules = partition.tensor_parallel()
        >>> rules.placement_of("layers/0/attention/query/kernel")
        Split(dim=1)
        >>> rules.placement_of("layers/0/mlp/down/kernel")
        Split(dim=0)
        >>> rules.placement_of("embed/embedding")
        Split(dim=0, must_divide=False)

    Source:
        Megatron-LM, arXiv:1909.08053.
    """
    # Not every model has all of these layers, so a rule may match nothing.
    table = Split(0, axis, must_divide=False)
    rules = [*_rules_of_blocks(Split(1, axis), Split(0, axis)), (TABLE, table)]
    return Rules(rules, otherwise=Replicate(), must_match=False)


@called("partition.fsdp_tensor_parallel", replaces="partition.Shard")
def fsdp_tensor_parallel(
    *,
    min_bytes: float | None = None,
    axes: tuple[str, ...] | None = None,
    split_axis: str | None = None,
) -> Rules:
    """Return the rules of `tensor_parallel` and `fsdp` together.

    A kernel that is split over the logical devices is also sharded over the replicas, along its
    other dim; an embedding table is split by its rows and sharded along its columns.

    Args:
        min_bytes: As for `fsdp`.
        axes: As for `fsdp`.
        split_axis: As `axis` for `tensor_parallel`.

    Example:
        >>> rules = partition.fsdp_tensor_parallel(min_bytes=0)
        >>> rules.placement_of("layers/0/mlp/up/kernel")
        Shard(dim=None, split=1, axes=None, pad=False, min_bytes=0)
    """

    def shard(split: int | None) -> Shard:
        over = None if split is None else split_axis
        return Shard(None, split, axes, min_bytes=min_bytes, split_axis=over)

    table = dataclasses.replace(shard(0), must_divide=False)
    rules = [*_rules_of_blocks(shard(1), shard(0)), (TABLE, table)]
    return Rules(rules, otherwise=shard(None), must_match=False)


def _rules_of_blocks(by_outputs: Placement, by_inputs: Placement) -> list[tuple[str, Placement]]:
    """Return the rules for kernels, and for the biases of kernels that are split by outputs."""
    # The bias of a kernel that is split by its inputs is added to the sum over the logical
    # devices, so it is not split: `otherwise` places it.
    into = [_ATTENTION_IN, _MLP_IN, _VOCABULARY]
    return [
        *((f"{name}/kernel", by_outputs) for name in into),
        *((f"{name}/bias", by_inputs) for name in into),
        *((f"{name}/kernel", by_inputs) for name in (_ATTENTION_OUT, _MLP_OUT)),
    ]
