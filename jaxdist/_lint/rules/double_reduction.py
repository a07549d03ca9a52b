"""JD001: a value is reduced over replicas twice."""

from collections.abc import Iterator

from jaxdist._lint.finding import Finding, Program, Rule
from jaxdist._lint.flow import UPDATES, Averaged, Reduced, Reduction, read_leaves

RULE = Rule(
    "JD001",
    "double-reduction",
    "A gradient or loss is reduced over replicas once.",
    "docs/porting/coming-from-tf-distribute.md#gradients",
)


def find(program: Program) -> Iterator[Finding]:
    """Find reductions of values that are already reduced, and losses that are averaged twice."""
    # Gradients of sharded parameters are shards; an all-reduce with "mean" does not change them.
    has_shards = program.uses("partition", "fsdp")
    for reduction in program.events.reductions:
        is_harmless = reduction.call in UPDATES and reduction.op == "mean" and has_shards
        for before in read_leaves(reduction.before):
            if isinstance(before, Reduced) and reduction.axes & before.axes:
                # A step whose result is its next argument repeats the same reduction.
                if before.by is not reduction.node and not is_harmless:
                    yield _report_reduced(reduction, before)
            elif isinstance(before, Averaged) and reduction.is_mean_of_replicas:
                yield _report_averaged(reduction, before)


def _report_reduced(reduction: Reduction, before: Reduced) -> Finding:
    how = f"the {before.op} over replicas" if before.op else "reduced over replicas"
    effect = {
        "sum": "A sum of equal values multiplies them by the number of replicas.",
        "mean": "A mean of equal values changes nothing, and costs one more reduction.",
    }.get(reduction.op, "The second reduction is not needed.")
    if reduction.call in UPDATES:
        fix = f"remove the reduction in line {before.line}: {reduction.call} reduces gradients."
    else:
        fix = f"keep the reduction in line {before.line}, and remove this one."
    found = f"{reduction.call} of a value that is {how} since line {before.line}. {effect}"
    return RULE.at(reduction.node, found, fix)


def _report_averaged(reduction: Reduction, before: Averaged) -> Finding:
    found = (
        f"{reduction.call} takes the mean of what nn.compute_average_loss in line {before.line} "
        "divides by the size of the global batch. The result is too small by the number of "
        "replicas."
    )
    if reduction.call in UPDATES:
        fix = f'write {reduction.call}(..., reduce_op="sum").'
    else:
        fix = 'reduce with "sum" (psum) here.'
    return RULE.at(reduction.node, found, fix)
