"""JD002: the mean of means over replicas that may have different numbers of rows."""

from collections.abc import Iterator

from jaxdist._lint.finding import Finding, Program, Rule
from jaxdist._lint.flow import LocalMean, read_leaves

RULE = Rule(
    "JD002",
    "uneven-mean",
    "The mean of the replicas' means is the mean over the batch only if all replicas have "
    "equally many rows.",
    "docs/sharp-bits.md#a-mean-over-a-batch-that-is-not-full",
)


def find(program: Program) -> Iterator[Finding]:
    """Find means of local means over a dataset whose last batch may be smaller."""
    for reduction in program.events.reductions:
        for before in read_leaves(reduction.before):
            if isinstance(before, LocalMean) and reduction.is_mean_of_replicas:
                yield RULE.at(
                    reduction.node,
                    f"{reduction.call} averages over replicas what line {before.line} averages "
                    "over the rows of one replica, and the last batch of this dataset may be "
                    "smaller.",
                    "divide by the rows of all replicas with nn.compute_average_loss(losses, "
                    'global_batch_size=all_reduce("sum", rows)) and reduce with "sum". For '
                    "metrics, return training.weighted_sums. Or let the dataset drop the last "
                    "batch with drop_remainder=True.",
                )
