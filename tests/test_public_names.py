"""The public names, written out: adding or losing one is a decision, never an accident."""

import ast
import doctest
import importlib
import inspect
import pathlib
from types import ModuleType

import pytest

import jaxdist
import jaxdist.jobs
from tests.strategies_under_test import STRATEGIES
from tests.test_layers import late_block

# `jaxdist.X` for every X of `tf.distribute` that works.
DOCUMENTED = {
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "TPUStrategy",
    "StrategyExtended",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "ParameterServerStrategy",
    "cluster_resolver",
    "compat",
    "contrib",
    "coordinator",
    "experimental",
    "fit",
    "estimator",
    "experimental_set_strategy",
    "function",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "tpu",
}
# What `tf.distribute` does not have, or does not show.
OUR_OWN = {
    "GradientReport",
    "PartialBatch",
    "PerReplica",
    "Program",
    "Sharded",
    "accumulate_gradients",
    "assume_replicated",
    "check_replicas",
    "compressed_update",
    "explain",
    "config",
    "errors",
    "multi_step",
    "nn",
    "partition",
    "shard_state",
    "sharded_update",
    "testing",
}
CONTRIB = {
    "AllReduceCrossDeviceOps",
    "CrossDeviceOps",
    "DistributeConfig",
    "Monitor",
    "MultiWorkerAllReduce",
    "OneDeviceStrategy",
    "ReplicaContext",
    "get_cross_replica_context",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "initialize_tpu_system",
    "require_replica_context",
}
ESTIMATOR = {
    "BestExporter",
    "CheckpointSaverListener",
    "DistributeConfig",
    "Estimator",
    "EstimatorSpec",
    "EvalSpec",
    "Exported",
    "Exporter",
    "FinalExporter",
    "LatestExporter",
    "ModeKeys",
    "RunConfig",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "TaskType",
    "TrainSpec",
    "WarmStartSettings",
    "experimental",
    "get_global_step",
    "get_module",
    "load_export",
    "train_and_evaluate",
}
ESTIMATOR_EXPERIMENTAL = {
    "make_early_stopping_hook",
    "read_eval_metrics",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
}
COMPAT_V1 = {
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputReplicationMode",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "cluster_resolver",
    "experimental",
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "tpu",
}
COMPAT_V1_EXPERIMENTAL = {
    "CentralStorageStrategy",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
}
EXPERIMENTAL = {
    "CentralStorageStrategy",
    "ParameterServerStrategy",
    "coordinator",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "TerminationConfig",
    "AutoShardPolicy",
    "CollectiveAllReduce",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "TPUStrategy",
    "ValueContext",
    "partitioners",
    "rpc",
}
COORDINATOR = {
    "ClusterCoordinator",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "PerWorkerValues",
    "RemoteValue",
    "ServerOptimizer",
    "ShardedVariable",
    "Statistics",
    "experimental_get_current_worker_index",
}
COORDINATOR_EXPERIMENTAL = {"ClusterCoordinator", "PerWorkerValues", "RemoteValue"}
PARTITIONERS = {
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
}
RPC = {"Client", "Server", "StatusOrResult"}
TESTING = {"launch", "virtual_devices"}
CLUSTER_RESOLVER = {
    "ClusterResolver",
    "ClusterSpec",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "UnionClusterResolver",
    "UnionResolver",
    "ENVIRONMENTS",
    "choose_resolver",
    "choose_slurm_port",
    "describe_unused_sign",
    "experimental_connect_to_cluster",
    "find_own_task",
    "find_source",
    "list_training_tasks",
}
TPU = {
    "AXES",
    "SINGLE_CORE_ASSIGNMENT",
    "Slice",
    "TPUSystem",
    "XLAOptions",
    "experimental",
    "is_reordered",
    "order_cores",
    "slice_of",
    "system_of",
    "topology_of",
    "topology_of_bytes",
}
TPU_EXPERIMENTAL = {
    "DeviceAssignment",
    "DeviceOrderMode",
    "HardwareFeature",
    "TPUSystemMetadata",
    "Topology",
    "initialize_tpu_system",
    "shutdown_tpu_system",
}
CONFIG = {
    "compilation_cache",
    "experimental_connect_to_cluster",
    "links",
    "processes",
    "gpu_flags",
    "run_eagerly",
    "steps_run_eagerly",
}
PARTITION = {
    "ByNames",
    "Replicate",
    "Rules",
    "Shard",
    "Split",
    "Stage",
    "constrain",
    "fsdp",
    "fsdp_tensor_parallel",
    "gather",
    "place",
    "remat_policy",
    "replicated",
    "tensor_parallel",
}
# What a task of a user is written with.
PARTS_OF_TASKS = {
    "BatchConfig",
    "CheckpointConfig",
    "Curve",
    "Data",
    "JobConfig",
    "OptimizerConfig",
    "OutputConfig",
    "StrategyConfig",
    "Table",
    "Task",
    "TrainingConfig",
    "entry",
    "section",
    "split_rows",
}
JOBS = {
    "DigitsConfig",
    "LoadedConfig",
    "PARTITIONS",
    "TASKS",
    "TASK_NAMES",
    "TrainingReport",
    "count_cpu_devices",
    "finished_line",
    "finished_run",
    "has_cluster",
    "is_chief",
    "is_server_task",
    "kind_of",
    "load_config",
    "load_job",
    "load_job_config",
    "make_strategy",
    "plan_job",
    "sweep_job",
    "train",
    "versions",
}
NN = {
    "attention",
    "compute_average_loss",
    "embedding_lookup",
    "example_keys",
    "experts",
    "pipeline_loss",
    "positions",
    "scale_regularization_loss",
    "schedules",
    "split_positions",
    "vocabulary_head",
}
SCHEDULES = {"gpipe", "one_f_one_b", "zero_bubble"}

ROOT = pathlib.Path(jaxdist.__file__).parent


def _exported(path: pathlib.Path) -> set[str]:
    """Names that a package lists with `X as X`, or defines, and that have no underscore."""
    tree = ast.parse(path.read_text())
    body = [*tree.body, *late_block(tree)]
    defined = {n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    aliases = [
        alias
        for node in body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    ]
    listed = {alias.name for alias in aliases if alias.asname == alias.name}
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module and node.names[0].name == "*":
            listed |= set(importlib.import_module(node.module).__all__)
    return {name for name in listed | defined if not name.startswith("_")}


def _public(module: ModuleType) -> dict[str, object]:
    return {n: getattr(module, n) for n in dir(module) if not n.startswith("_")}


def _callables() -> dict[str, object]:
    """Every public function, class and own public method, by the name that users type."""
    found: dict[str, object] = {}
    modules = (
        jaxdist,
        jaxdist.cluster_resolver,
        jaxdist.compat.v1,
        jaxdist.compat.v1.experimental,
        jaxdist.config,
        jaxdist.contrib,
        jaxdist.coordinator,
        jaxdist.experimental,
        jaxdist.experimental.coordinator,
        jaxdist.experimental.partitioners,
        jaxdist.experimental.rpc,
        jaxdist.nn,
        jaxdist.nn.schedules,
        jaxdist.partition,
        jaxdist.testing,
        jaxdist.tpu,
        jaxdist.tpu.experimental,
    )
    for module in modules:
        for name, value in _public(module).items():
            if callable(value):
                found[f"{module.__name__}.{name}"] = value
    for name in PARTS_OF_TASKS:
        found[f"jaxdist.jobs.{name}"] = getattr(jaxdist.jobs, name)
    for name in ("Strategy", "StrategyExtended", "ReplicaContext", "PerReplica", "Variable"):
        for member, value in inspect.getmembers(getattr(jaxdist, name), inspect.isroutine):
            if not member.startswith("_"):
                found[f"jaxdist.{name}.{member}"] = value
    return found


def test_top_level_names_are_exactly_the_documented_ones_and_ours() -> None:
    assert _exported(ROOT / "__init__.py") == DOCUMENTED | OUR_OWN


def test_names_that_are_no_rooms_are_all_listed() -> None:
    rooms = {path.stem for path in ROOT.iterdir() if not path.stem.startswith("_")}
    assert set(_public(jaxdist)) - rooms <= DOCUMENTED | OUR_OWN


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("config.py", CONFIG),
        ("contrib/__init__.py", CONTRIB),
        ("coordinator.py", COORDINATOR),
        ("estimator/__init__.py", ESTIMATOR),
        ("estimator/experimental.py", ESTIMATOR_EXPERIMENTAL),
        ("experimental/coordinator.py", COORDINATOR_EXPERIMENTAL),
        ("experimental/__init__.py", EXPERIMENTAL),
        ("experimental/partitioners.py", PARTITIONERS),
        ("experimental/rpc.py", RPC),
        ("compat/__init__.py", {"v1"}),
        ("compat/v1/__init__.py", COMPAT_V1),
        ("compat/v1/experimental.py", COMPAT_V1_EXPERIMENTAL),
        ("compat/v1/tpu.py", set()),
        ("jobs/__init__.py", JOBS | PARTS_OF_TASKS),
        ("nn/__init__.py", NN),
        ("nn/schedules.py", SCHEDULES),
        ("partition/__init__.py", PARTITION),
        ("testing/__init__.py", TESTING),
        ("cluster_resolver/__init__.py", CLUSTER_RESOLVER),
        ("tpu/__init__.py", TPU),
        ("tpu/experimental.py", TPU_EXPERIMENTAL),
    ],
    ids=lambda x: x if isinstance(x, str) else "names",
)
def test_names_of_public_modules_are_exactly_the_written_ones(path: str, names: set[str]) -> None:
    assert _exported(ROOT / path) == names


def test_every_listed_name_is_there() -> None:
    for name in sorted(DOCUMENTED | OUR_OWN):
        assert hasattr(jaxdist, name), name


def test_every_error_is_of_the_tree_in_the_docstring_and_of_a_built_in_that_fits() -> None:
    drawn = jaxdist.errors.__doc__ or ""
    for name, value in inspect.getmembers(jaxdist.errors, inspect.isclass):
        assert name in drawn
        built_in = [c for c in inspect.getmro(value) if c.__module__ == "builtins"]
        assert value is jaxdist.errors.JaxdistError or built_in[0] is not Exception, name


@pytest.mark.parametrize("name", sorted(_callables()))
def test_public_callable_says_what_it_does_and_shows_it(name: str) -> None:
    text = inspect.getdoc(_callables()[name])
    assert text, f"{name} has no docstring"
    assert text.splitlines()[0].endswith("."), "the first line is one sentence"
    assert "Example:" in text, f"{name} shows no example"
    assert doctest.DocTestParser().get_examples(text), f"the example of {name} does not run"


def test_every_strategy_is_in_the_table_of_the_contract_tests() -> None:
    tested = {type(row.make()).__name__ for row in STRATEGIES}
    assert {name for name in DOCUMENTED if name.endswith("Strategy") and name != "Strategy"} - {
        "ParameterServerStrategy"
    } <= tested  # Workers run its steps: tests/parameter_server.
