"""Where flattening stops: each kind of value in each column, and no private copies of it."""

import ast
import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.experimental import sparse

import jaxdist
from jaxdist._parameter_server.variables.server_variable import ServerVariable
from jaxdist._values import Handle, HeldPieces, PiecesOfResult, Stop, stops
from jaxdist._values.sharded.containers import Opened
from jaxdist._values.variable.blocks import VariableSlice
from jaxdist.coordinator import ShardedVariable

ROOT = pathlib.Path(jaxdist.__file__).parent


class _Module(nnx.Module):
    pass


def _of(kind: type) -> object:
    return object.__new__(kind)


# Written by hand. Of a new kind of value, each column has to be decided.
OPENED: set[str] = set()
_ROWS = {
    *("PER_REPLICA", "ARGUMENTS", "RESULTS", "READ", "REDUCED", "REDUCED_IN_MERGE"),
    *("DISTRIBUTED", "LAID_OUT", "GATHERED", "COMPARED", "NODES", "REPORTED"),
}
_SLICES = {"SPARSE", "REDUCED", "REDUCED_IN_MERGE", "REDUCED_IN_STEP"}
_SAVED = {"ASSIGNABLE", "ARGUMENTS", "RESULTS", "RESULTS_OF_FUNCTIONS", "BARE_VARIABLES", "SAVED"}
_VARIABLE = {"VARIABLE", "READ", "LAID_OUT", "NODES", "REPORTED", *_SAVED}
_OBJECT = {"NNX", "ARGUMENTS", "BARE_VARIABLES", "GATHERED", "COMPARED", "NODES", "SAVED"}
_MODULE = {"RESULTS", "RESULTS_OF_FUNCTIONS", *_OBJECT}
STOPS = {
    "PerReplica": (jaxdist.PerReplica([1, 2]), _ROWS),
    "Handle": (_of(Handle), _ROWS),
    "Sharded": (
        _of(jaxdist.Sharded),
        {
            *("ARGUMENTS", "RESULTS", "BARE_VARIABLES", "REDUCED", "REDUCED_IN_STEP"),
            *("DISTRIBUTED", "LAID_OUT", "GATHERED", "NODES", "ARRAYS_OF_NODES"),
            "REPORTED",
        },
    ),
    "HeldPieces": (_of(HeldPieces), {"ARGUMENTS"}),
    "PiecesOfResult": (_of(PiecesOfResult), {"ARGUMENTS"}),
    "Variable": (_of(jaxdist.Variable), _VARIABLE),
    "ServerVariable": (_of(ServerVariable), _VARIABLE),
    "ShardedVariable": (_of(ShardedVariable), _SAVED),
    "VariableSlice": (_of(VariableSlice), OPENED),
    "IndexedSlices": (_of(jaxdist.IndexedSlices), {"SLICES", *_SLICES}),
    "Opened": (_of(Opened), OPENED),
    "BCOO": (sparse.BCOO.fromdense(jnp.eye(2)), _SLICES),
    "nnx.Module": (_Module(), _MODULE),
    "nnx.Optimizer": (_of(nnx.Optimizer), _MODULE),
    "nnx.Rngs": (nnx.Rngs(0), _OBJECT),
    "nnx.Param": (
        nnx.Param(jnp.ones(2)),
        {"NNX", "BARE_VARIABLES", "NODES", "ARRAYS_OF_NODES", "REPORTED", "SAVED"},
    ),
    "nnx.State": (nnx.State({}), {"BARE_VARIABLES", "SAVED"}),
    "state of optax": (optax.EmptyState(), {"NODES"}),
    "array": (jnp.ones(2), OPENED),
    "dict": ({}, OPENED),
}


@pytest.mark.parametrize("kind", STOPS)
def test_flattening_stops_at_a_kind_of_value_in_these_columns_only(kind: str) -> None:
    value, expected = STOPS[kind]
    assert {column.name for column in Stop if stops(column)(value)} == expected


def test_every_class_of_values_that_is_a_pytree_node_has_a_row() -> None:
    found = {
        name
        for path in (ROOT / "_values").rglob("*.py")
        for name in re.findall(r"register_pytree_\w+\(\s*([A-Z]\w+),", path.read_text())
    }
    assert "Sharded" in found
    assert found <= STOPS.keys()


def test_classes_of_the_caller_are_stopped_at_too() -> None:
    leaves = jax.tree.leaves(({"a": 1}, [2, 3]), is_leaf=stops(Stop.ARGUMENTS, dict))
    assert leaves == [{"a": 1}, 2, 3]


# Modules below `kinds.py`, which it imports.
_BELOW = {
    "_values/replicas/attached.py",
    "_values/replicas/handle.py",
    "_values/sharded/sharded.py",
}
# Tasks are programs as users write them, with public names only.
_OF_USERS = {"jobs/topics_lm/_model.py"}
_VALUES = {
    *("PerReplica", "Sharded", "HeldPieces", "Variable", "Assignable", "IndexedSlices"),
    *("DistributedValues", "Handle"),
}


def _is_test_of_values(node: ast.AST | None) -> bool:
    """Whether an expression is one `isinstance` with a class of values."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != "isinstance":
        return False
    return bool(_VALUES & {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)})


def _private_predicates(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Lambda(body=body):
                found += [ast.unparse(body)] if _is_test_of_values(body) else []
            case ast.FunctionDef(body=[*_, ast.Return(value=value)]) if len(node.body) <= 2:
                found += [node.name] if _is_test_of_values(value) else []
    return found


def test_a_room_has_no_predicate_of_its_own_for_values() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in sorted(ROOT.rglob("*.py"))
        if (names := _private_predicates(path.read_text()))
    }
    assert found.keys() == _BELOW | _OF_USERS, found


def test_private_predicates_are_found() -> None:
    source = """
def is_one(x):
    # A comment.
    return isinstance(x, (int, PerReplica))
found = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Variable))
"""
    assert _private_predicates(source) == ["is_one", "isinstance(x, Variable)"]
