"""Calls of a strategy over several processes: what is refused, and what traces make of values."""

import functools
from typing import Any

import pytest

import jaxdist
from jaxdist.errors import ArgumentTypeError
from tests.processes.job import results_of_job
from tests.strategies.multi_worker.calls import compute, refuse
from tests.strategies.oracle import refused


@functools.cache
def _refused() -> list[dict[str, str]]:
    return results_of_job(refuse, 2, timeout=120)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("op by op", ["ContextError", "run_eagerly", "1 of the 2 replicas", "jax.debug.print"]),
        ("nan", ["NotFiniteError", "With several processes", "op by op"]),
        ("gradients", ["ContextError", "only 1 of 2 replicas", "virtual_devices(2)"]),
        ("device of another process", ["DeviceError", "reduce_to", "a device of process", "cpu:0"]),
        ("list of it", ["DeviceError", "broadcast_to", "a device of process", "cpu:0"]),
        ("captured", ["ReplicaValueError", "merge function", "2 replicas", "argument"]),
        ("own values in a trace", ["ReplicaValueError", "1 values", "2 replicas in all processes"]),
        ("other ranks", ["ProgramMismatchError", "rank 1", "rank 2", "process 1"]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_call_that_several_processes_cannot_make_is_refused_in_each(
    name: str, parts: list[str]
) -> None:
    for result in _refused():
        for part in parts:
            assert part in result[name]


def test_a_cluster_that_is_no_resolver_is_refused() -> None:
    wrong: Any = {"worker": ["a:1", "b:1"]}
    with refused(ArgumentTypeError, "cluster_resolver={'worker'", "ClusterResolver", "TF_CONFIG"):
        jaxdist.MultiWorkerMirroredStrategy(wrong)


def test_errors_name_the_replica_by_its_number_in_the_job() -> None:
    for index, result in enumerate(_refused()):
        assert f"replica {index} has the Python integer {2**40}" in result["too large"]


def test_values_of_single_replicas_and_variables_work_in_traces() -> None:
    for result in results_of_job(compute, 2, timeout=120):
        assert result == {
            "function of listed values": 30.0,
            "listed values in jit": 30.0,
            "traced values in jit": 30.0,
            "gather in jit": [1.0, -1.0, 2.0, -2.0],
            "assigned": [3.0, 2.0, 6.0],
            "devices": tuple(
                f"/job:localhost/replica:0/task:{task}/device:CPU:0" for task in (0, 1)
            ),
        }
