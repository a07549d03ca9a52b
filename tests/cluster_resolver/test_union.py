"""The union of resolvers, compared with TensorFlow's."""

from typing import Any

import pytest

from jaxdist.cluster_resolver import (
    ClusterSpec,
    SimpleClusterResolver,
    UnionClusterResolver,
    UnionResolver,
)
from jaxdist.errors import ArgumentError, ArgumentTypeError, DuplicateTaskError
from tests.cluster_resolver.answers.record import answer, is_same, read
from tests.strategies.oracle import refused


def _make(row: dict[str, Any]) -> UnionResolver:
    parts = [
        SimpleClusterResolver(
            ClusterSpec(p["cluster"]),
            p["master"],
            p["task_type"],
            p["task_id"],
            rpc_layer=p["rpc_layer"],
        )
        for p in row["parts"]
    ]
    return UnionResolver(*parts, **row["made"])


@pytest.mark.parametrize("row", read("union"))
def test_every_answer_is_that_of_tensorflow(row: dict[str, Any]) -> None:
    union = _make(row)
    assert is_same(answer(union.cluster_spec), row["cluster_spec"])
    # TensorFlow puts a protocol also before no address.
    master = "" if str(row["master"]).endswith("://") else row["master"]
    assert is_same(answer(lambda: union.master(**row["asked"])), master)
    names = ("task_type", "task_id", "rpc_layer", "environment")
    assert [getattr(union, name) for name in names] == [row[name] for name in names]


def test_a_task_that_two_resolvers_have_is_a_key_error_that_can_be_read() -> None:
    parts = [SimpleClusterResolver(ClusterSpec({"ps": {1: a, 3: "c:1"}})) for a in ("a:1", "b:1")]
    with refused(DuplicateTaskError, "task 1 of job 'ps' twice: 'a:1' and 'b:1'", "[1, 3]"):
        UnionResolver(*parts).cluster_spec()
    with pytest.raises(KeyError, match=r"^UnionResolver\.cluster_spec found"):
        UnionResolver(*parts).cluster_spec()


def test_task_0_that_is_given_counts() -> None:
    first = SimpleClusterResolver(ClusterSpec({}), task_id=3, num_accelerators={"GPU": 2})
    union = UnionClusterResolver(first, task_id=0)
    assert (union.task_id, union.num_accelerators()) == (0, {"GPU": 2})
    union.task_type, union.task_id, union.rpc_layer = "ps", 1, "grpc"
    assert (union.task_type, union.task_id, union.rpc_layer) == ("ps", 1, "grpc")


def test_what_is_no_resolver_is_refused() -> None:
    with refused(ArgumentError, "no resolvers"):
        UnionResolver()
    with refused(ArgumentTypeError, "resolvers[0]='x'"):
        UnionResolver("x")  # type: ignore[arg-type]
