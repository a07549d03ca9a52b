"""Functions are exported for the platforms of the workers, whatever the coordinator runs on."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxdist
from jaxdist import _mesh
from jaxdist._parameter_server.worker.devices import check_platform, find_platform
from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import ClusterError
from tests.parameter_server.strategy.making import make_strategy


@pytest.mark.parametrize("platforms", [["cuda"], ["cpu", "tpu"], ["cpu"]])
def test_a_function_is_exported_for_the_platforms_of_the_workers(
    platforms: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = make_strategy()
    with strategy.scope():
        v = jaxdist.Variable(jnp.zeros(3))
    monkeypatch.setattr(strategy._tasks, "find_platforms", lambda: platforms)

    def step(x: Any) -> Any:
        v.assign_add(x)
        return x @ v.value()

    closure = strategy.prepare(step, (np.ones(3, np.float32),), {}).program.first.closure
    assert list(export.deserialize(bytearray(closure.exported)).platforms) == platforms


def test_a_worker_of_another_platform_refuses_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = make_strategy()
    monkeypatch.setattr(strategy._tasks, "find_platforms", lambda: ["cuda"])
    coordinator = ClusterCoordinator(strategy)
    result = coordinator.schedule(lambda x: x + 1, (np.float32(1),))
    with pytest.raises(ClusterError, match="<lambda> was exported for cuda, and this worker runs"):
        coordinator.join()
    with pytest.raises(ClusterError):
        result.fetch()
    # The functions that this process runs itself are for its own devices.
    assert strategy.run(lambda x: x + 1, (jnp.float32(1),)) == 2


def test_a_step_that_runs_here_is_exported_for_this_process() -> None:
    assert find_platform(_mesh.build(jax.devices()[:1])) == "cpu"
    check_platform("step", ["cuda", "cpu"], "cpu")


class _Client:
    def __init__(self, version: str) -> None:
        self.platform_version = version


class _Gpu:
    platform = "gpu"

    def __init__(self, version: str) -> None:
        self.client = _Client(version)


@pytest.mark.parametrize(
    ("version", "name"),
    [("PJRT C API\ncuda 12090", "cuda"), ("PJRT C API\nrocm 60000", "rocm")],
)
def test_gpus_are_named_as_jax_export_names_them(version: str, name: str) -> None:
    class Layout:
        first_device = _Gpu(version)

    layout: Any = Layout()
    assert find_platform(layout) == name
