"""JD010: a metric gets a loss that is divided by the rows of all replicas."""

import ast
from collections.abc import Iterator

from jaxdist._lint.finding import Finding, Program, Rule
from jaxdist._lint.flow import Averaged, read_leaves

RULE = Rule(
    "JD010",
    "divided-metric",
    "A metric adds up and counts the values of all replicas, so it takes the losses of the rows.",
    "docs/sharp-bits.md#metrics-of-a-loss-that-is-divided-by-all-rows",
)


def find(program: Program) -> Iterator[Finding]:
    """Find metrics that get a result of `nn.compute_average_loss`."""
    for update in program.events.metric_updates:
        for before in read_leaves(update.before):
            if isinstance(before, Averaged):
                yield RULE.at(
                    update.node,
                    f"a metric is given {ast.unparse(update.value)}, which line {before.line} "
                    "divides by the size of the global batch. The mean of the metric is too small "
                    "by the number of replicas.",
                    "give the metric the losses of the rows, or the sum over the replicas, "
                    'all_reduce("sum", loss).',
                )
