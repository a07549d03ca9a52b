"""Valid calls of TPU topologies, cluster resolvers, devices and links."""

from typing import Any
from unittest import mock

import numpy as np

import jaxdist
from jaxdist._launching import Outcome
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver, TPUClusterResolver
from jaxdist.testing import _launch
from jaxdist.tpu.experimental import DeviceAssignment, Topology
from tests.bad_inputs.call import Call


def _topology() -> Topology:
    return jaxdist.tpu.slice_of("v4:2x2x2").topology


def _assignment() -> DeviceAssignment:
    return DeviceAssignment.build(_topology(), num_replicas=16)


def _resolver() -> TPUClusterResolver:
    return TPUClusterResolver("virtual:v5e:2x2")


def _spec() -> ClusterSpec:
    return ClusterSpec({"worker": ["a:1", "b:1"], "ps": {3: "c:1"}})


def _simple() -> SimpleClusterResolver:
    return SimpleClusterResolver(_spec(), task_type="worker", task_id=1, rpc_layer="grpc")


def _get_nothing() -> None:
    return None


def _launch_nothing(**arguments: Any) -> Any:
    """`testing.launch` up to the start of the processes, which would take seconds each."""
    outcome = Outcome((), None, None, ())
    with (
        mock.patch.object(_launch, "run_attempt", return_value=outcome),
        mock.patch.object(_launch, "_read_result", return_value=None),
    ):
        return jaxdist.testing.launch(**arguments)


_WHERE = {"task_type": "worker", "task_id": 0}

CALLS = {
    "jaxdist.tpu.topology_of": Call(
        lambda: jaxdist.tpu.topology_of,
        lambda: {"devices": jaxdist.tpu.slice_of("v5e:4x2").cores},
    ),
    "jaxdist.tpu.system_of": Call(
        lambda: jaxdist.tpu.system_of, lambda: {"name": "virtual:v5e:2x2"}
    ),
    "jaxdist.tpu.topology_of_bytes": Call(
        lambda: jaxdist.tpu.topology_of_bytes,
        lambda: {
            "serialized": jaxdist.tpu.slice_of("v5e:2x2").topology.serialized(),
        },
    ),
    "jaxdist.tpu.Slice": Call(
        lambda: jaxdist.tpu.Slice,
        lambda: {"generation": "v5e", "shape": (2, 2, 1), "num_slices": 1},
        use=lambda made: made.topology,
    ),
    "jaxdist.tpu.is_reordered": Call(
        lambda: jaxdist.tpu.is_reordered, lambda: {"topology": _topology(), "num_slices": 1}
    ),
    "jaxdist.tpu.order_cores": Call(
        lambda: jaxdist.tpu.order_cores, lambda: {"topology": _topology(), "num_slices": 1}
    ),
    "jaxdist.tpu.slice_of": Call(lambda: jaxdist.tpu.slice_of, lambda: {"name": "v5e:2x2"}),
    "jaxdist.tpu.experimental.DeviceAssignment": Call(
        lambda: DeviceAssignment,
        lambda: {
            "topology": _topology(),
            "core_assignment": np.zeros((1, 1, 4), int),
        },
    ),
    "jaxdist.tpu.experimental.DeviceAssignment.build": Call(
        lambda: DeviceAssignment.build,
        lambda: {
            "topology": _topology(),
            "computation_shape": [1, 1, 1, 1],
            "computation_stride": [1, 1, 1, 1],
            "num_replicas": 2,
        },
    ),
    "jaxdist.tpu.experimental.DeviceAssignment.coordinates": Call(
        lambda: _assignment().coordinates, lambda: {"replica": 1, "logical_core": 0}
    ),
    "jaxdist.tpu.experimental.DeviceAssignment.host_device": Call(
        lambda: _assignment().host_device,
        lambda: {"replica": 1, "logical_core": 0, "job": "worker"},
    ),
    "jaxdist.tpu.experimental.DeviceAssignment.tpu_device": Call(
        lambda: _assignment().tpu_device,
        lambda: {"replica": 1, "logical_core": 0, "job": "worker"},
    ),
    "jaxdist.tpu.experimental.DeviceAssignment.lookup_replicas": Call(
        lambda: _assignment().lookup_replicas, lambda: {"task_id": 1, "logical_core": 0}
    ),
    "jaxdist.tpu.experimental.DeviceAssignment.tpu_ordinal": Call(
        lambda: _assignment().tpu_ordinal, lambda: {"replica": 1, "logical_core": 0}
    ),
    "jaxdist.tpu.experimental.HardwareFeature": Call(
        lambda: jaxdist.tpu.experimental.HardwareFeature,
        lambda: {"kind": "TPU v5"},
        use=lambda feature: feature.embedding_feature,
    ),
    "jaxdist.tpu.experimental.initialize_tpu_system": Call(
        lambda: jaxdist.tpu.experimental.initialize_tpu_system,
        lambda: {"cluster_resolver": _resolver()},
    ),
    "jaxdist.tpu.experimental.shutdown_tpu_system": Call(
        lambda: jaxdist.tpu.experimental.shutdown_tpu_system,
        lambda: {"cluster_resolver": _resolver()},
    ),
    "jaxdist.tpu.experimental.Topology": Call(
        lambda: Topology,
        lambda: {
            "mesh_shape": [2, 1, 1, 1],
            "device_coordinates": [[[0, 0, 0, 0], [1, 0, 0, 0]]],
        },
    ),
    **{
        f"jaxdist.tpu.experimental.Topology.{method}": Call(
            lambda method=method: getattr(_topology(), method),
            lambda: {"device_coordinates": [0, 0, 1, 0]},
        )
        for method in (
            "task_ordinal_at_coordinates",
            "tpu_device_ordinal_at_coordinates",
            "cpu_device_name_at_coordinates",
            "tpu_device_name_at_coordinates",
        )
    },
    "jaxdist.tpu.experimental.Topology.tasks_and_ordinals": Call(
        lambda: _topology().tasks_and_ordinals,
        lambda: {"places": np.array([[0, 0, 1, 0], [1, 0, 1, 1]])},
    ),
    "jaxdist.tpu.experimental.Topology.serialized": Call(lambda: _topology().serialized),
    # Who is in the job.
    "jaxdist.cluster_resolver.ClusterSpec": Call(
        lambda: ClusterSpec, lambda: {"cluster": {"worker": ["a:1"]}}
    ),
    "jaxdist.cluster_resolver.ClusterSpec.as_dict": Call(lambda: _spec().as_dict),
    **{
        f"jaxdist.cluster_resolver.ClusterSpec.{method}": Call(
            lambda method=method: getattr(_spec(), method), lambda: {"job_name": "worker"}
        )
        for method in ("job_tasks", "num_tasks", "task_indices")
    },
    "jaxdist.cluster_resolver.ClusterSpec.task_address": Call(
        lambda: _spec().task_address, lambda: {"job_name": "worker", "task_index": 1}
    ),
    "jaxdist.cluster_resolver.experimental_connect_to_cluster": Call(
        lambda: jaxdist.cluster_resolver.experimental_connect_to_cluster,
        lambda: {"cluster_spec_or_resolver": _resolver()},
    ),
    "jaxdist.cluster_resolver.SimpleClusterResolver": Call(
        lambda: SimpleClusterResolver,
        lambda: {"cluster_spec": _spec(), "task_type": "worker", "task_id": 1},
        use=lambda resolver: (resolver.master(), resolver.num_accelerators()),
    ),
    "jaxdist.cluster_resolver.SimpleClusterResolver.cluster_spec": Call(
        lambda: _simple().cluster_spec
    ),
    "jaxdist.cluster_resolver.SimpleClusterResolver.master": Call(
        lambda: _simple().master, lambda: {**_WHERE, "rpc_layer": "grpc"}
    ),
    "jaxdist.cluster_resolver.SimpleClusterResolver.num_accelerators": Call(
        lambda: _simple().num_accelerators, lambda: dict(_WHERE)
    ),
    "jaxdist.cluster_resolver.TPUClusterResolver": Call(
        lambda: TPUClusterResolver,
        lambda: {"tpu": "virtual:v5e:2x2"},
        use=lambda resolver: (resolver.master(), resolver.num_accelerators()),
    ),
    "jaxdist.cluster_resolver.TPUClusterResolver.connect": Call(
        lambda: TPUClusterResolver.connect, lambda: {"tpu": "virtual:v5e:2x2"}
    ),
    "jaxdist.cluster_resolver.TPUClusterResolver.master": Call(
        lambda: _resolver().master, lambda: {**_WHERE, "rpc_layer": "grpc"}
    ),
    "jaxdist.cluster_resolver.TPUClusterResolver.num_accelerators": Call(
        lambda: _resolver().num_accelerators, lambda: dict(_WHERE)
    ),
    "jaxdist.cluster_resolver.TPUClusterResolver.set_tpu_topology": Call(
        lambda: _resolver().set_tpu_topology,
        lambda: {"serialized_tpu_topology": jaxdist.tpu.slice_of("v5e:2x2").topology.serialized()},
    ),
    **{
        f"jaxdist.cluster_resolver.TPUClusterResolver.{method}": Call(
            lambda method=method: getattr(_resolver(), method)
        )
        for method in (
            "cluster_spec",
            "get_coordination_service_leader",
            "get_job_name",
            "get_master",
            "get_tpu_system_metadata",
        )
    },
    # Devices and links.
    "jaxdist.testing.virtual_devices": Call(
        lambda: jaxdist.testing.virtual_devices, lambda: {"count": 8}
    ),
    "jaxdist.testing.launch": Call(
        lambda: _launch_nothing, lambda: {"function": _get_nothing, "n": 1}
    ),
    "jaxdist.config.compilation_cache": Call(
        lambda: jaxdist.config.compilation_cache, lambda: {"directory": None}
    ),
    "jaxdist.config.gpu_flags": Call(
        lambda: jaxdist.config.gpu_flags,
        lambda: {"training": "fsdp", "chip": "h100", "layer_bytes": 1000},
    ),
    "jaxdist.config.links": Call(lambda: jaxdist.config.links, lambda: {"path_or_links": None}),
}
