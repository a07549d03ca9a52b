"""The table of valid calls, and what of the public names is none of it."""

import re
from collections.abc import Callable
from typing import Any

from tests.bad_inputs import (
    calls_clusters,
    calls_coordinator,
    calls_cost,
    calls_data,
    calls_devices,
    calls_estimator,
    calls_fit,
    calls_preemption,
    calls_rpc,
    calls_servers,
    calls_sharding,
    calls_strategies,
    calls_training,
    calls_v1,
    calls_values,
)
from tests.bad_inputs.call import Call
from tests.bad_inputs.walk import parameters, public_callables

CALLS: dict[str, Call] = {
    **calls_strategies.CALLS,
    **calls_values.CALLS,
    **calls_data.CALLS,
    **calls_devices.CALLS,
    **calls_training.CALLS,
    **calls_fit.CALLS,
    **calls_v1.CALLS,
    **calls_cost.CALLS,
    **calls_clusters.CALLS,
    **calls_coordinator.CALLS,
    **calls_preemption.CALLS,
    **calls_rpc.CALLS,
    **calls_servers.CALLS,
    **calls_estimator.CALLS,
    **calls_sharding.CALLS,
}

# Users hold objects of these classes and do not make them.
MADE_BY_JAXDIST = {
    "jaxdist.DistributedDataset",
    "jaxdist.DistributedIterator",
    "jaxdist.GradientReport",
    "jaxdist.cost.Chip",
    "jaxdist.cost.Efficiency",
    "jaxdist.cost.Fit",
    "jaxdist.cost.Target",
    "jaxdist.Program",
    "jaxdist.coordinator.PerWorkerDataset",
    "jaxdist.coordinator.PerWorkerIterator",
    "jaxdist.coordinator.PerWorkerValues",
    "jaxdist.coordinator.PerWorkerValue",
    "jaxdist.coordinator.RemoteValue",
    "jaxdist.coordinator.Statistics",
    "jaxdist.data.Batches",
    "jaxdist.data.Examples",
    "jaxdist.data.Files",
    "jaxdist.data.OptionalBatch",
    "jaxdist.fit.History",
    "jaxdist.fit.Summary",
    "jaxdist.experimental.rpc.StatusOrResult",
    "jaxdist.tpu.TPUSystem",
    "jaxdist.tpu.experimental.TPUSystemMetadata",
    "jaxdist.estimator.Exported",
    "jaxdist.estimator.Exported.__call__",
    "jaxdist.estimator.SessionRunContext",
    "jaxdist.estimator.SessionRunContext.request_stop",
    "jaxdist.estimator.SessionRunContext.should_stop",
    "jaxdist.estimator.SessionRunValues",
    "jaxdist.jobs.LoadedConfig",
    "jaxdist.training.LoopEnd",
    "jaxdist.training.Restored",
    "jaxdist.jobs.TrainingReport",
}
# Subclasses define these; jaxdist calls them.
FOR_SUBCLASSES = {
    "jaxdist.cluster_resolver.ClusterResolver",
    "jaxdist.cluster_resolver.ClusterResolver.cluster_spec",
    "jaxdist.cluster_resolver.ClusterResolver.master",
    "jaxdist.cluster_resolver.ClusterResolver.num_accelerators",
    "jaxdist.experimental.partitioners.Partitioner.__call__",
    "jaxdist.fit.Callback",
    "jaxdist.fit.Metric",
    "jaxdist.fit.Tracker",
    "jaxdist.fit.Tracker.log",
    *(
        f"jaxdist.estimator.SessionRunHook{name}"
        for name in ("", *".begin|.after_create_session|.before_run|.after_run|.end".split("|"))
    ),
    *(
        f"jaxdist.estimator.CheckpointSaverListener{name}"
        for name in ("", *".begin|.before_save|.after_save|.end".split("|"))
    ),
    *(f"jaxdist.estimator.{name}Exporter.export" for name in ("", "Best", "Final", "Latest")),
    *(
        f"jaxdist.jobs.Task.{name}"
        for name in "batch check finish load make_model measures".split()
    ),
    # Sections: `load_config` makes them from values that it has checked.
    *(
        f"jaxdist.jobs.{name}Config"
        for name in "Batch Checkpoint Optimizer Output Strategy Training".split()
    ),
}

# Other rooms of jaxdist call these.
OF_ROOMS = {
    "jaxdist.DistributedIterator.position",
    "jaxdist.DistributedIterator.put_back",
    "jaxdist.DistributedIterator.take",
    "jaxdist.IndexedSlices.with_parts",
    *(
        f"jaxdist.ParameterServerStrategy.{name}"
        for name in "joining links make_per_worker prepare report_of_servers".split()
    ),
    *(
        f"jaxdist.coordinator.PerWorker{kind}.{name}"
        for kind in ("Dataset", "Iterator", "Values", "Value")
        for name in "find_any forget has of set set_error what_to_make".split()
    ),
    "jaxdist.cluster_resolver.choose_resolver",
    "jaxdist.cluster_resolver.choose_slurm_port",
    "jaxdist.cluster_resolver.describe_unused_sign",
    "jaxdist.cluster_resolver.find_source",
    "jaxdist.cluster_resolver.find_own_task",
    "jaxdist.cluster_resolver.list_training_tasks",
    "jaxdist.Program.call",
    "jaxdist.Program.compiled",
    "jaxdist.Program.lowered",
    "jaxdist.Program.rebuild",
    "jaxdist.data.Batches.cardinality_of_multiples",
    "jaxdist.data.Batches.order",
    "jaxdist.data.Batches.restarted",
    "jaxdist.data.Files.claim_epoch",
    "jaxdist.data.Files.order",
    "jaxdist.data.Files.restarted",
    "jaxdist.data.checked_options",
    "jaxdist.data.distribute_dataset",
    "jaxdist.data.distribute_datasets_from_function",
    "jaxdist.fit.History.add",
    # The arguments are those of the user's module.
    "jaxdist.fit.Model.__call__",
    "jaxdist.fit.Model.get_compiled",
    "jaxdist.fit.Model.get_predict_step",
    "jaxdist.fit.Model.objects",
    "jaxdist.jobs.Task.build",
    "jaxdist.estimator.RunConfig.move_to",
    "jaxdist.jobs.has_cluster",
    "jaxdist.jobs.is_chief",
    "jaxdist.jobs.is_server_task",
    "jaxdist.jobs.count_cpu_devices",
    "jaxdist.jobs.finished_line",
    "jaxdist.jobs.finished_run",
    "jaxdist.tpu.TPUSystem.device_at",
    "jaxdist.tpu.TPUSystem.device_grid",
    "jaxdist.tpu.experimental.Topology.place",
    "jaxdist.tpu.experimental.Topology.present",
}
# Every call of these is an error, which has a test of its own.
NEVER_VALID = {"jaxdist.DistributedValues.__setitem__"}
# Methods of callbacks and metrics, which `fit` calls.
OF_FIT = re.compile(
    r"jaxdist\.fit\.\w+\.(on_\w+|set_model|set_params|get_state|set_state|close|result)"
)
HOOKS = ("_implementation", ".summing", ".sums", ".all_reduced")


def users_callables() -> dict[str, Callable[..., Any]]:
    """The public callables that users call."""
    others = MADE_BY_JAXDIST | FOR_SUBCLASSES | OF_ROOMS | NEVER_VALID
    return {
        name: value
        for name, value in public_callables().items()
        if name not in others and not name.endswith(HOOKS) and not OF_FIT.fullmatch(name)
    }


def rows() -> list[tuple[str, str]]:
    """Each parameter of each public callable: the names of both."""
    found = users_callables()
    return [(name, p) for name in CALLS if name in found for p in parameters(found[name])]
