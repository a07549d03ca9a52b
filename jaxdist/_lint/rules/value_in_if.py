"""JD007: a Python condition on a value that is unknown while a step is traced."""

import ast
from collections.abc import Iterator

from jaxdist._lint.finding import Finding, Program, Rule

RULE = Rule(
    "JD007",
    "value-in-if",
    "A step is traced once, before its values are known, so Python cannot choose by them.",
    "docs/sharp-bits.md#debugging-a-step",
)


def find(program: Program) -> Iterator[Finding]:
    """Find `if variable > 3` in steps."""
    # Op by op, the values of a step are known.
    if program.uses("run_eagerly", "run_functions_eagerly"):
        return
    for test in program.events.tests:
        yield RULE.at(
            test.node,
            f"a Python condition reads {ast.unparse(test.value)}, whose value is not known while "
            "the step is traced.",
            "use jnp.where or jax.lax.cond in the step, or decide outside of the step.",
        )
