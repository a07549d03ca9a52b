"""Strategies of one process in a job of two: each says that it is alone, or is refused.

Two real processes over loopback. What can be wrong with one of them is told by both.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.ports import find_free_ports

PROGRAM = """
import json, logging, sys, warnings
import jax
jax.config.update("jax_num_cpu_devices", 2)
rank, ports = int(sys.argv[1]), sys.argv[2:]
import jaxdist
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
spec = ClusterSpec({"worker": [f"localhost:{port}" for port in ports]})
resolver = SimpleClusterResolver(spec, task_type="worker", task_id=rank)
jaxdist.config.experimental_connect_to_cluster(resolver)
mesh = lambda devices: dict(mesh=jax.sharding.Mesh(devices, "data"), replica_axes="data")
mirrored, told = jaxdist.MirroredStrategy, []
virtual = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:1x2")
MADE = {
    "nothing": lambda: mirrored(),
    "no devices": lambda: mirrored([]),
    "only options": lambda: mirrored(options=jaxdist.experimental.CommunicationOptions()),
    "own by name": lambda: mirrored(["cpu:0", "cpu:1"]),
    "own": lambda: mirrored(jax.local_devices()),
    "own mesh": lambda: mirrored(**mesh(jax.local_devices())),
    "all": lambda: mirrored(jax.devices()),
    "mesh of all": lambda: mirrored(**mesh(jax.devices())),
    "one": lambda: jaxdist.OneDeviceStrategy("cpu:0"),
    "one of the other": lambda: jaxdist.OneDeviceStrategy(jax.devices()[2 - 2 * rank]),
    "virtual TPUs": lambda: jaxdist.TPUStrategy(virtual),
    "default": jaxdist.get_strategy,
}
class Keep(logging.Handler):
    def emit(self, record):
        told.append(record.getMessage())
logging.getLogger("jaxdist").addHandler(Keep(logging.WARNING))
found = {}
for name, make in MADE.items():
    told.clear()
    try:
        strategy, error = make(), None
        step = lambda: jaxdist.get_replica_context().all_reduce("sum", 1.0)
        error = [] if float(strategy.run(step)) == strategy.num_replicas_in_sync else ["sum"]
    except Exception as e:
        error = [c.__name__ for c in type(e).__mro__] + [str(e)]
    found[name] = {"error": error, "told": list(told)}
print(json.dumps(found), flush=True)
"""


def _answers() -> list[dict[str, Any]]:
    """What each of two processes found: for each way to make a strategy, its error and its log."""
    ports = find_free_ports(2)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
    environment.pop("XLA_FLAGS", None)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), *map(str, ports)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        answers = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, said) in zip(processes, answers, strict=True):
        assert process.returncode == 0, said
    return [json.loads(said.splitlines()[-1]) for said, _ in answers]


@pytest.mark.timeout(400)
def test_each_way_to_make_a_strategy_is_refused_by_name_or_works_and_is_logged_as_alone() -> None:
    for rank, answers in enumerate(_answers()):
        for way in ("nothing", "no devices", "only options"):
            _must_be_refused(answers[way], f"MirroredStrategy() was made in process {rank} of a ")
            assert "MirroredStrategy(jax.local_devices())" in answers[way]["error"][-1]
        for way in ("all", "mesh of all", "one of the other"):
            _must_be_refused(answers[way], f"process(es) [{1 - rank}], and this is process {rank}")
        for way, name in ALONE.items():
            assert answers[way]["error"] == [], way
            (message,) = answers[way]["told"]
            assert message.startswith(f"{name} in process {rank} of a job of 2 processes")
            assert "a model of its own" in message
        assert answers["default"] == {"error": [], "told": []}


ALONE = {
    "own by name": "MirroredStrategy",
    "own": "MirroredStrategy",
    "own mesh": "MirroredStrategy",
    "one": "OneDeviceStrategy",
    "virtual TPUs": "TPUStrategy",
}


def _must_be_refused(answer: dict[str, Any], words: str) -> None:
    error = answer["error"]
    assert {"SeveralProcessesError", "ContextError", "RuntimeError", "ValueError"} <= set(error)
    assert words in error[-1]
    assert "MultiWorkerMirroredStrategy" in error[-1]
