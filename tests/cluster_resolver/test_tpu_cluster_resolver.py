"""The resolver of TPUs: names, what the environment says, and what cannot be found."""

import importlib.util
import logging
from typing import Any

import jax
import pytest

import jaxdist
from jaxdist import _processes, tpu
from jaxdist._devices import chips
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver, TPUClusterResolver
from jaxdist.config import experimental_connect_to_cluster
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    MissingExtraError,
    NotFoundError,
    TopologyError,
)
from jaxdist.tpu.experimental import DeviceAssignment, initialize_tpu_system, shutdown_tpu_system
from tests.strategies.oracle import refused


@pytest.fixture(autouse=True)
def _nothing_of_a_tpu_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TPU_NAME", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID", "CLOUD_TPU_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    for name in ("TPU_PROCESS_ADDRESSES", "MEGASCALE_NUM_SLICES", "TPU_SKIP_MDS_QUERY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What JAX's processes were told to meet by, without meeting."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(_processes, "connect", lambda **how: calls.append(how))
    return calls


def test_virtual_slice_is_laid_out_over_the_cpu_devices_by_their_number() -> None:
    resolver = TPUClusterResolver("virtual:v5e:4x2")
    assert initialize_tpu_system(resolver) == tpu.slice_of("v5e:4x2").topology
    metadata = resolver.get_tpu_system_metadata()
    assert metadata[:3] == (8, 2, 4)
    # Host by host: chips 0, 1, 4 and 5 of the 4x2 slice are those of the first.
    assert [d.id for d in metadata.devices] == [0, 1, 4, 5, 2, 3, 6, 7]
    assert metadata.topology is not None
    assert resolver.tpu_topology == metadata.topology


@pytest.mark.parametrize(
    "name", ["v2:2x2", "v3:2x2", "v4:2x2x1", "v5e:2x4", "v5p:2x2x2", "v6e:1x1"]
)
def test_every_generation_and_a_single_chip_can_be_virtual(name: str) -> None:
    resolver = TPUClusterResolver.connect(f"virtual:{name}")
    cores = tpu.slice_of(name).num_cores
    assert resolver.get_tpu_system_metadata().num_cores == cores
    assert jaxdist.TPUStrategy(resolver).num_replicas_in_sync == cores
    feature = resolver.tpu_hardware_feature.embedding_feature
    assert (feature.name == "UNSUPPORTED") == name.startswith("v5e")


def test_a_resolver_of_one_machine_has_no_addresses() -> None:
    for name in (None, "", "local", "virtual:v5e:2x4"):
        with TPUClusterResolver(name) as resolver:
            assert resolver.cluster_spec() == {}
            assert resolver.master() == resolver.get_master() == ""
            assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", 0, "")
            assert resolver.get_coordination_service_leader() == "/job:worker/task:0"
    assert TPUClusterResolver("virtual:v5e:2x4").num_accelerators() == {"TPU": 4}


def test_hosts_of_a_slice_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, connected: list[dict[str, Any]]
) -> None:
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "h0,h1, h2,h3")
    monkeypatch.setenv("TPU_WORKER_ID", "2")
    resolver = TPUClusterResolver(
        "", job_name="tpu", coordinator_name="head", coordinator_address="c:1"
    )
    assert resolver.cluster_spec() == {
        "tpu": ["h0:8482", "h1:8482", "h2:8482", "h3:8482"],
        "head": ["c:1"],
    }
    assert resolver.master() == "grpc://h2:8482"
    assert resolver.master("tpu", 3, "http") == "http://h3:8482"
    assert TPUClusterResolver("virtual:v5e:2x4").cluster_spec() == {}
    experimental_connect_to_cluster(resolver)
    assert connected == [{}], "JAX detects the hosts of a slice itself"
    monkeypatch.setenv("TPU_PROCESS_ADDRESSES", "p0:1234,p1:1234")
    assert resolver.cluster_spec().job_tasks("tpu") == ["p0:8482", "p1:8482"]


def test_hosts_that_only_the_metadata_server_knows_are_left_to_jax(
    monkeypatch: pytest.MonkeyPatch, connected: list[dict[str, Any]]
) -> None:
    experimental_connect_to_cluster(TPUClusterResolver(""))
    assert connected == [], "a machine without chips is alone"
    monkeypatch.setattr(chips, "chips_of_this_machine", lambda: ["/dev/accel0"])
    experimental_connect_to_cluster(TPUClusterResolver(""))
    assert connected == [{}]
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    experimental_connect_to_cluster(TPUClusterResolver(""))
    assert connected == [{}, {}], "slices of one host each are several hosts"
    experimental_connect_to_cluster(TPUClusterResolver("virtual:v5e:2x4"))
    assert len(connected) == 2


def test_a_host_that_finds_no_others_goes_on_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nobody() -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(chips, "chips_of_this_machine", lambda: ["/dev/accel0"])
    monkeypatch.setattr(_processes, "connect", nobody)
    with caplog.at_level(logging.INFO, "jaxdist"):
        experimental_connect_to_cluster(TPUClusterResolver(""))
    assert "coordinator_address" in caplog.text


def test_the_name_of_this_tpu_vm_is_its_own_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_NAME", "my-tpu")
    assert TPUClusterResolver("my-tpu").tpu_name == "local"
    with refused(NotFoundError, "'other'", "TPU_NAME", "is 'my-tpu'", "virtual:v5e:2x4"):
        TPUClusterResolver("other")


@pytest.mark.parametrize("name", ["my-tpu", "grpc://10.0.0.1:8470"])
def test_tpus_of_other_machines_are_not_found_and_it_is_said_where(name: str) -> None:
    with refused(NotFoundError, repr(name), "What was looked for", "TPU_NAME", "is not set"):
        TPUClusterResolver(name)
    assert issubclass(NotFoundError, ValueError)
    assert issubclass(NotFoundError, RuntimeError)


def test_a_machine_without_tpus_says_what_was_looked_for_and_where() -> None:
    found = "No TPU was found", "What was looked for", "JAX_PLATFORMS", "virtual:", "/dev/accel0"
    for call in (initialize_tpu_system, shutdown_tpu_system, jaxdist.TPUStrategy):
        with refused(NotFoundError, *found):
            call()
    with refused(NotFoundError, *found):
        TPUClusterResolver.connect("")


def test_a_machine_with_one_chip_is_a_topology_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = tpu.slice_of("v5e:1x1").cores
    monkeypatch.setattr(chips, "tpus", lambda: (list(chip), ""))
    try:
        assert repr(initialize_tpu_system()) == "Topology(1x1x1 chips, 1 core each, 1 task)"
        resolver = TPUClusterResolver()
        assert resolver.num_accelerators() == {"TPU": 1}
        assert resolver.get_tpu_system_metadata()[:3] == (1, 1, 1)
        built = DeviceAssignment.build(resolver.tpu_system.topology)
        assert resolver.tpu_system.device_grid(built.core_assignment).tolist() == [[chip[0]]]
    finally:
        shutdown_tpu_system()


@pytest.mark.parametrize("name", ["virtual:v5e", "virtual:v5e:3x2", "described:v7:2x2"])
def test_slices_that_cannot_be_are_refused_when_they_are_named(name: str) -> None:
    with refused(TopologyError, name.partition(":")[2]):
        TPUClusterResolver(name)


def test_a_virtual_slice_that_is_too_large_says_how_to_get_more_devices() -> None:
    with refused(NotFoundError, "16 CPU devices", "shows 8", "virtual_devices(16)"):
        initialize_tpu_system(TPUClusterResolver("virtual:v5e:4x4"))


def test_a_description_without_libtpu_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chips, "_libtpu_version", lambda: None)
    with refused(MissingExtraError, "pip install libtpu", "v5p:2x2x2"):
        initialize_tpu_system(TPUClusterResolver("described:v5p:2x2x2"))


def test_a_libtpu_that_knows_no_such_slice_says_how_to_get_a_newer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def old(name: str, num_slices: int, wrap: Any) -> Any:
        raise chips.NotDescribedError("Invalid TPU external name", "0.0.1")

    monkeypatch.setattr(chips, "describe_slice", old)
    with refused(TopologyError, "libtpu 0.0.1", "Invalid TPU", "pip install -U libtpu"):
        initialize_tpu_system(TPUClusterResolver("described:v6e:2x2"))


def test_a_slice_that_follows_no_prefix_is_asked_for() -> None:
    for prefix in ("virtual", "described"):
        parts = f"tpu='{prefix}:'", "without the name of a slice", f"tpu='{prefix}:v5e:2x4'"
        with refused(ArgumentError, *parts):
            TPUClusterResolver(f"{prefix}:")


def test_a_coordinator_needs_an_address() -> None:
    with refused(ArgumentError, "'head'", "coordinator_address"):
        TPUClusterResolver("", coordinator_name="head")
    with refused(ArgumentTypeError, "int"):
        TPUClusterResolver(3)  # type: ignore[arg-type]


def test_only_tpu_resolvers_are_initialized() -> None:
    simple: Any = SimpleClusterResolver(ClusterSpec({}))
    for call in (initialize_tpu_system, shutdown_tpu_system, jaxdist.TPUStrategy):
        with refused(ArgumentTypeError, "TPUClusterResolver", "SimpleClusterResolver"):
            call(simple)


def test_systems_are_not_started_inside_a_traced_function() -> None:
    resolver = TPUClusterResolver("virtual:v5e:2x4")
    for call in (initialize_tpu_system, shutdown_tpu_system):
        with refused(ContextError, call.__name__, "inside a step"):
            jax.eval_shape(lambda x, call=call: call(resolver) and x, 1.0)


def test_arrays_stay_valid_when_a_system_is_initialized_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    resolver = TPUClusterResolver.connect("virtual:v5e:2x4")
    strategy = jaxdist.TPUStrategy(resolver)
    kept = jax.device_put(3.0, strategy.replicated_sharding)
    with caplog.at_level(logging.INFO, "jaxdist"):
        initialize_tpu_system(resolver)
    assert "initialized before" in caplog.text
    shutdown_tpu_system(resolver)
    assert float(strategy.run(lambda x: x + 1, (kept,))) == 4


def test_a_cluster_of_one_task_needs_no_meeting(connected: list[dict[str, Any]]) -> None:
    experimental_connect_to_cluster(TPUClusterResolver(""))
    assert connected == []


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu describes slices")
def test_a_slice_that_libtpu_does_not_know_is_an_error_with_the_version_of_libtpu() -> None:
    with pytest.raises(chips.NotDescribedError) as caught:
        chips.describe_slice("v5e:3x5", 1)
    assert "\n" not in caught.value.args[0]
