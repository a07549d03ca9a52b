"""JD004: code that `jax.pmap` needs, and a strategy does not."""

import ast
from collections.abc import Iterator

from jaxdist._lint.finding import Finding, Program, Rule
from jaxdist._lint.flow import Function

RULE = Rule(
    "JD004",
    "pmap",
    "strategy.run takes global arrays, and splits and replicates them by their shardings.",
    "docs/porting/coming-from-jax.md#what-run-compiles-to",
)
_DATASET = (
    "pass the batches to strategy.experimental_distribute_dataset, which splits them and copies "
    "them ahead of the step."
)
_REPLICATE = (
    "pass the state itself to strategy.run, or jax.device_put(state, strategy.replicated_sharding)."
)
_FIXES = {
    "jax.pmap": "call strategy.run(step, args): no leading dim for devices, and no axis_name.",
    "jax.device_put_replicated": _REPLICATE,
    "flax.jax_utils.replicate": _REPLICATE,
    "jax.device_put_sharded": "write jax.device_put(x, strategy.per_replica_sharding).",
    "flax.jax_utils.prefetch_to_device": _DATASET,
    "flax.jax_utils.pad_shard_unpad": _DATASET,
    "flax.training.common_utils.shard": _DATASET,
    "flax.training.common_utils.shard_prng_key": (
        "pass nnx.Rngs or one key to the step; nn.example_keys makes one key for each example."
    ),
}
_OVER_AXIS = {"psum", "pmean", "pmax", "pmin", "all_gather", "axis_index", "axis_size"}
_OWN_AXES = {"replica", "logical"}
_MESHES = ("Mesh", "make_mesh", "AbstractMesh", "mesh", "create_device_mesh")


def find(program: Program) -> Iterator[Finding]:
    """Find calls that belong to pmap, and collectives over the axis of a removed pmap."""
    for node in ast.walk(program.tree):
        # Check names, not only calls, to find `@jax.pmap` and functools.partial(jax.pmap, ...) too.
        name = program.names.find(node) if isinstance(node, ast.Attribute | ast.Name) else ""
        if name in _FIXES:
            found = f"{name} is one array for each device, with a leading dim for devices."
            if name == "jax.pmap":
                found = "jax.pmap compiles for arrays with a leading dim for devices."
            yield RULE.at(node, found, _FIXES[name])
    if not program.uses(*_MESHES) and not _has_keyword(program.tree, "mesh"):
        known = _OWN_AXES | _named_axes(program.tree)
        for step in program.events.steps:
            yield from _find_strange_axes(program, step, known)


def _has_keyword(tree: ast.AST, name: str) -> bool:
    return any(isinstance(node, ast.keyword) and node.arg == name for node in ast.walk(tree))


def _named_axes(tree: ast.AST) -> set[str]:
    """Return the axes that vmap or pmap makes with `axis_name="batch"`."""
    makers = ("vmap", "pmap", "shard_map", "xmap", "partial")
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {
        k.value.value
        for call in calls
        if ast.unparse(call.func).endswith(makers)
        for k in call.keywords
        if k.arg == "axis_name"
        and isinstance(k.value, ast.Constant)
        and isinstance(k.value.value, str)
    }


def _find_strange_axes(program: Program, step: Function, known: set[str]) -> Iterator[Finding]:
    for node in ast.walk(step.node):
        name = program.names.find(node.func) if isinstance(node, ast.Call) else ""
        last = name.rpartition(".")[2]
        if not isinstance(node, ast.Call) or name != f"jax.lax.{last}" or last not in _OVER_AXIS:
            continue
        values = [*node.args, *(k.value for k in node.keywords if k.arg == "axis_name")]
        axes = [v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]
        for axis in axes:
            if axis not in known:
                found = (
                    f"lax.{last} over the axis {axis!r}, which the mesh of this strategy does not "
                    "have. Its axes are 'replica' and 'logical'."
                )
                fix = (
                    "call jaxdist.get_replica_context().all_reduce, all_gather or "
                    "replica_id_in_sync_group, or pass a mesh with this axis to the strategy."
                )
                yield RULE.at(node, found, fix)
