"""JD003: a program takes the first copy of a state that has no copies here."""

import ast
import re
from collections.abc import Iterator

from jaxdist._lint.finding import Finding, Program, Rule
from jaxdist._lint.names import written

RULE = Rule(
    "JD003",
    "first-replica",
    "A state that is equal on all replicas is one plain array, without a dim for replicas.",
    "docs/porting/coming-from-tf-distribute.md#results-of-run",
)
_TREE_MAPS = {"jax.tree.map", "jax.tree_util.tree_map", "jax.tree_map", "jax.tree_multimap"}
_UNREPLICATE = "flax.jax_utils.unreplicate"
_STATE = re.compile(r"(\w+_)?(state|params|parameters|variables|weights|batch_stats)$")
_FIX = "use the state itself. It has no leading dim, so [0] would take its first row."
# In these programs, a leading dim may be something else: members of an ensemble, layers, steps.
_STACKS = ("vmap", "scan", "stack", "multi_step")


def find(program: Program) -> Iterator[Finding]:
    """Find `unreplicate(state)` and `jax.tree.map(lambda x: x[0], state)`."""
    has_pmap = program.uses("pmap", "replicate", "device_put_replicated")
    is_certain = has_pmap or (program.is_distributed and not program.uses(*_STACKS))
    for node in ast.walk(program.tree):
        if not isinstance(node, ast.Call):
            continue
        name = program.names.find(node.func)
        if name == _UNREPLICATE:
            yield RULE.at(node, "flax.jax_utils.unreplicate takes the first of the copies.", _FIX)
        elif is_certain and name in _TREE_MAPS and len(node.args) == 2:
            function, state = node.args
            what = written(state)
            if _takes_first(function) and _STATE.search(what):
                found = f"x[0] of each leaf of {what} takes the first of its copies."
                yield RULE.at(node, found, _FIX)


def _takes_first(node: ast.expr) -> bool:
    """Return whether a function is `lambda x: x[0]`."""
    match node:
        case ast.Lambda(
            args=ast.arguments(args=[ast.arg(arg=name)]),
            body=ast.Subscript(value=ast.Name(id=used), slice=ast.Constant(value=0)),
        ):
            return name == used
    return False
