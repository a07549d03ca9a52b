"""JD006: names of `tf.distribute`, with their spelling in jaxdist."""

import ast
from collections.abc import Iterator

from jaxdist._lint.finding import Finding, Program, Rule

RULE = Rule(
    "JD006",
    "tf-name",
    "jaxdist has the documented names of tf.distribute.",
    "docs/porting/coming-from-tf-distribute.md#names",
)
# Place in TensorFlow -> place in jaxdist. Longer places are tried first.
PLACES = {
    "tensorflow.distribute": "",
    "tensorflow.compat.v2.distribute": "",
    "tensorflow.compat.v1.distribute": "compat.v1",
    "tensorflow.contrib.distribute": "contrib",
    "tensorflow.tpu": "tpu",
    "tensorflow.compat.v1.tpu": "compat.v1.tpu",
    "tensorflow.contrib.tpu": "compat.v1.tpu",
    "tensorflow.estimator": "estimator",
}
# Single names that are elsewhere in jaxdist.
SINGLE = {
    "tensorflow.nn.compute_average_loss": "nn.compute_average_loss",
    "tensorflow.nn.scale_regularization_loss": "nn.scale_regularization_loss",
}
# Programs without tf.distribute use these names too, so they count only with it.
BESIDE = {
    "tensorflow.config.experimental_connect_to_cluster": "config.experimental_connect_to_cluster",
    "tensorflow.config.set_logical_device_configuration": "testing.virtual_devices",
    "tensorflow.config.run_functions_eagerly": "config.run_eagerly",
    "tensorflow.train.ClusterSpec": "cluster_resolver.ClusterSpec",
    "tensorflow.VariableSynchronization": "VariableSynchronization",
    "tensorflow.VariableAggregation": "VariableAggregation",
    "tensorflow.Variable": "Variable",
    "tensorflow.function": "function",
    "tensorflow.IndexedSlices": "IndexedSlices",
}


def find(program: Program) -> Iterator[Finding]:
    """Find each name of `tf.distribute` that the program uses."""
    if "tensorflow" not in program.names.modules:
        return
    found = list(_read_names(program))
    is_distributed = any(name.startswith(tuple(PLACES)) for _, name in found)
    for node, name in found:
        ours = find_place(name, is_distributed)
        if ours is not None:
            yield _report(program, node, name, ours)


def _read_names(program: Program) -> Iterator[tuple[ast.AST, str]]:
    """Iterate over the full names in the program's text, each in its full length."""
    inner = {id(node.value) for node in ast.walk(program.tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(program.tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            name = program.names.find(node)
            if name:
                yield node, name


def find_place(name: str, is_distributed: bool = True) -> str | None:
    """Return the name in jaxdist for a name of TensorFlow; None if the rule does not cover it.

    Args:
        name: A full name, such as `tensorflow.distribute.MirroredStrategy`.
        is_distributed: Whether the program uses `tf.distribute` at all.
    """
    singles = {**SINGLE, **(BESIDE if is_distributed else {})}
    for single, ours in singles.items():
        if name == single or name.startswith(f"{single}."):
            return ours + name[len(single) :]
    for place in sorted(PLACES, key=len, reverse=True):
        if name.startswith(f"{place}."):
            return ".".join(part for part in (PLACES[place], name[len(place) + 1 :]) if part)
    return None


def _report(program: Program, node: ast.AST, name: str, ours: str) -> Finding:
    short = name.replace("tensorflow", "tf", 1)
    spelling, advice = program.spell(ours)
    if spelling:
        return RULE.at(node, f"{short} is {spelling} here.", f"write {spelling}.")
    return RULE.at(node, f"{short} does not exist under this name.", advice)
