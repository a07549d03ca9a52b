"""The public names of `tf.distribute`, and what becomes of each here.

Every symbol, method and argument that TensorFlow documents (2.21, with `tf.compat.v1` and
`tf.contrib` of 1.15), under the name that it has in `jaxdist`. A line is `name` or
`name(arguments)` as TensorFlow writes them; indented lines go on with the one before.
"""

# There, with the same arguments in the same order, and the same defaults.
HERE = """
get_strategy()
has_strategy()
get_replica_context()
in_cross_replica_context()
experimental_set_strategy(strategy)
function(func=None)

Strategy.scope()
Strategy.run(fn, args=(), kwargs=None, options=None)
Strategy.reduce(reduce_op, value, axis)
Strategy.gather(value, axis)
Strategy.experimental_local_results(value)
Strategy.unwrap(value)
Strategy.group(value, name=None)
Strategy.experimental_distribute_dataset(dataset, options=None)
Strategy.distribute_datasets_from_function(dataset_fn, options=None)
Strategy.experimental_distribute_datasets_from_function(dataset_fn, options=None)
Strategy.experimental_distribute_values_from_function(value_fn)
Strategy.num_replicas_in_sync
Strategy.cluster_resolver
Strategy.extended
Strategy.colocate_vars_with(colocate_with_variable)
Strategy.experimental_run(fn, input_iterator=None)
Strategy.make_dataset_iterator(dataset)
Strategy.make_input_fn_iterator(input_fn, replication_mode=...)
Strategy.experimental_make_numpy_dataset(numpy_input, session=None)

MirroredStrategy(devices=None, cross_device_ops=None)
MultiWorkerMirroredStrategy(cluster_resolver=None, communication_options=None)
OneDeviceStrategy(device)
TPUStrategy(
    tpu_cluster_resolver=None, experimental_device_assignment=None,
    experimental_spmd_xla_partitioning=False)
TPUStrategy.experimental_assign_to_logical_device(tensor, logical_device_id)
TPUStrategy.experimental_split_to_logical_devices(tensor, partition_dimensions)
TPUStrategy.experimental_replicate_to_logical_devices(tensor)
experimental.CentralStorageStrategy(compute_devices=None, parameter_device=None)
compat.v1.experimental.CentralStorageStrategy(compute_devices=None, parameter_device=None)
experimental.MultiWorkerMirroredStrategy(communication=..., cluster_resolver=None)
experimental.TPUStrategy(tpu_cluster_resolver=None, device_assignment=None)

StrategyExtended.batch_reduce_to(reduce_op, value_destination_pairs, options=None)
StrategyExtended.colocate_vars_with(colocate_with_variable)
StrategyExtended.experimental_require_static_shapes
StrategyExtended.parameter_devices
StrategyExtended.worker_devices
StrategyExtended.reduce_to(reduce_op, value, destinations, options=None)
StrategyExtended.update(var, fn, args=(), kwargs=None, group=True)
StrategyExtended.value_container(value)
StrategyExtended.variable_created_in_scope(v)
StrategyExtended.broadcast_to(tensor, destinations)
StrategyExtended.call_for_each_replica(fn, args=(), kwargs=None)
StrategyExtended.experimental_between_graph
StrategyExtended.experimental_should_init
StrategyExtended.should_checkpoint
StrategyExtended.should_save_summary
StrategyExtended.experimental_make_numpy_dataset(numpy_input, session=None)
StrategyExtended.experimental_run_steps_on_iterator(
    fn, iterator, iterations=1, initial_loop_values=None)
StrategyExtended.read_var(v)
StrategyExtended.update_non_slot(colocate_with, fn, args=(), kwargs=None, group=True)
StrategyExtended.non_slot_devices(var_list)
StrategyExtended.num_hosts
StrategyExtended.num_replicas_per_host

ReplicaContext.strategy
ReplicaContext.num_replicas_in_sync
ReplicaContext.replica_id_in_sync_group
ReplicaContext.devices
ReplicaContext.merge_call(merge_fn, args=(), kwargs=None)
ReplicaContext.all_reduce(reduce_op, value, options=None)
ReplicaContext.all_gather(value, axis, options=None)
experimental.ValueContext(replica_id_in_sync_group=0, num_replicas_in_sync=1)
InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1)
InputContext.num_input_pipelines
InputContext.input_pipeline_id
InputContext.num_replicas_in_sync
InputContext.get_per_replica_batch_size(global_batch_size)

ReduceOp.SUM
ReduceOp.MEAN
InputReplicationMode.PER_WORKER
InputReplicationMode.PER_REPLICA
InputOptions(
    experimental_fetch_to_device=None, experimental_replication_mode=...,
    experimental_place_dataset_on_device=False, experimental_per_replica_buffer_size=1)
RunOptions(
    experimental_enable_dynamic_batch_size=True, experimental_bucketizing_dynamic_shape=False,
    experimental_xla_options=None)
Server(
    server_or_cluster_def, job_name=None, task_index=None, protocol=None, config=None, start=True)
Server.create_local_server(config=None, start=True)
Server.join()
Server.server_def
Server.start()
Server.target
experimental.CommunicationImplementation.AUTO
experimental.CommunicationImplementation.RING
experimental.CommunicationImplementation.NCCL
experimental.CollectiveCommunication
experimental.CommunicationOptions(bytes_per_pack=0, timeout_seconds=None, implementation=...)
experimental.CollectiveHints(bytes_per_pack=0, timeout_seconds=None)
ParameterServerStrategy(cluster_resolver, variable_partitioner=None)
experimental.ParameterServerStrategy(cluster_resolver, variable_partitioner=None)
coordinator.ClusterCoordinator(strategy)
coordinator.ClusterCoordinator.schedule(fn, args=None, kwargs=None)
coordinator.ClusterCoordinator.join()
coordinator.ClusterCoordinator.done()
coordinator.ClusterCoordinator.fetch(val)
coordinator.ClusterCoordinator.create_per_worker_dataset(dataset_fn)
coordinator.RemoteValue.fetch()
coordinator.RemoteValue.get()
coordinator.PerWorkerValue
coordinator.experimental_get_current_worker_index()
experimental.coordinator.ClusterCoordinator(strategy)
experimental.coordinator.PerWorkerValues
experimental.coordinator.RemoteValue
experimental.partitioners.Partitioner()
experimental.partitioners.FixedShardsPartitioner(num_shards)
experimental.partitioners.MinSizePartitioner(
    min_shard_bytes=262144, max_shards=1, bytes_per_string=16)
experimental.partitioners.MaxSizePartitioner(max_shard_bytes, max_shards=None, bytes_per_string=16)
experimental.rpc.Server
experimental.rpc.Server.create(rpc_layer, address)
experimental.rpc.Server.register(method_name, func)
experimental.rpc.Server.start()
experimental.rpc.Client
experimental.rpc.Client.create(rpc_layer, address, name='', timeout_in_ms=0)
experimental.rpc.Client.call(method_name, args=None, output_specs=None, timeout_in_ms=0)
experimental.PreemptionCheckpointHandler(
    cluster_resolver, checkpoint_or_checkpoint_manager, checkpoint_dir=None,
    termination_config=None)
experimental.PreemptionCheckpointHandler.run(distributed_train_function)
experimental.PreemptionCheckpointHandler.save_checkpoint_if_preempted()
experimental.PreemptionCheckpointHandler.watch_preemption_scope()
experimental.PreemptionCheckpointHandler.total_run_calls
experimental.PreemptionWatcher()
experimental.PreemptionWatcher.preemption_message
experimental.PreemptionWatcher.block_until_worker_exit()
experimental.TerminationConfig(
    termination_watcher_fn=None, exit_fn=None, grace_period=None, save_fn=None)
tpu.XLAOptions(
    use_spmd_for_xla_partitioning=True, enable_xla_dynamic_padder=True,
    use_shardy_partitioner=False)

DistributedValues
DistributedDataset.__iter__()
DistributedDataset.element_spec
DistributedDataset.reduce(initial_state, reduce_func)
DistributedIterator.get_next()
DistributedIterator.get_next_as_optional()
DistributedIterator.element_spec
DistributedIterator.__next__()
PerReplica.values
Variable
VariableSynchronization.AUTO
VariableSynchronization.NONE
VariableSynchronization.ON_WRITE
VariableSynchronization.ON_READ
VariableAggregation.NONE
VariableAggregation.SUM
VariableAggregation.MEAN
VariableAggregation.ONLY_FIRST_REPLICA
IndexedSlices(values, indices, dense_shape=None)

CrossDeviceOps()
CrossDeviceOps.reduce(reduce_op, per_replica_value, destinations, options=None)
CrossDeviceOps.batch_reduce(reduce_op, value_destination_pairs, options=None)
CrossDeviceOps.broadcast(tensor, destinations)
CrossDeviceOps.reduce_implementation(reduce_op, per_replica_value, destinations, options)
CrossDeviceOps.batch_reduce_implementation(reduce_op, value_destination_pairs, options)
CrossDeviceOps.broadcast_implementation(tensor, destinations)
ReductionToOneDevice(reduce_to_device=None, accumulation_fn=None)
NcclAllReduce(num_packs=1)
HierarchicalCopyAllReduce(num_packs=1)

cluster_resolver.ClusterResolver.cluster_spec()
cluster_resolver.ClusterResolver.master(task_type=None, task_id=None, rpc_layer=None)
cluster_resolver.ClusterResolver.num_accelerators(task_type=None, task_id=None, config_proto=None)
cluster_resolver.ClusterResolver.environment
cluster_resolver.ClusterResolver.task_type
cluster_resolver.ClusterResolver.task_id
cluster_resolver.SimpleClusterResolver(
    cluster_spec, master='', task_type=None, task_id=None, environment='',
    num_accelerators=None, rpc_layer=None)
cluster_resolver.TFConfigClusterResolver(
    task_type=None, task_id=None, rpc_layer=None, environment=None)
cluster_resolver.TFConfigClusterResolver.rpc_layer
cluster_resolver.SlurmClusterResolver(
    jobs=None, port_base=8888, gpus_per_node=None, gpus_per_task=None, tasks_per_node=None,
    auto_set_gpu=True, rpc_layer='grpc')
cluster_resolver.SlurmClusterResolver.get_task_info()
cluster_resolver.KubernetesClusterResolver(
    job_to_label_mapping=None, tf_server_port=8470, rpc_layer='grpc', override_client=None,
    executable_location=...)
cluster_resolver.KubernetesExecutableLocation.WITHIN_CLUSTER
cluster_resolver.KubernetesExecutableLocation.OFF_CLUSTER
cluster_resolver.GCEClusterResolver(
    project, zone, instance_group, port, task_type='worker', task_id=0, rpc_layer='grpc',
    credentials='default', service=None)
cluster_resolver.UnionResolver
cluster_resolver.UnionClusterResolver
cluster_resolver.ClusterSpec(cluster)
cluster_resolver.ClusterSpec.as_cluster_def()
cluster_resolver.ClusterSpec.as_dict()
cluster_resolver.ClusterSpec.job_tasks(job_name)
cluster_resolver.ClusterSpec.jobs
cluster_resolver.ClusterSpec.num_tasks(job_name)
cluster_resolver.ClusterSpec.task_address(job_name, task_index)
cluster_resolver.ClusterSpec.task_indices(job_name)
cluster_resolver.TPUClusterResolver(
    tpu=None, zone=None, project=None, job_name='worker', coordinator_name=None,
    coordinator_address=None, credentials='default', service=None, discovery_url=None)
cluster_resolver.TPUClusterResolver.connect
cluster_resolver.TPUClusterResolver.get_master()
cluster_resolver.TPUClusterResolver.get_job_name()
cluster_resolver.TPUClusterResolver.get_tpu_system_metadata()
cluster_resolver.TPUClusterResolver.set_tpu_topology
cluster_resolver.TPUClusterResolver.get_coordination_service_leader()
cluster_resolver.TPUClusterResolver.tpu_hardware_feature
cluster_resolver.TPUClusterResolver.__enter__
config.experimental_connect_to_cluster(cluster_spec_or_resolver, job_name=..., task_index=...)

tpu.experimental.Topology(serialized=None, mesh_shape=None, device_coordinates=None)
tpu.experimental.Topology.mesh_shape
tpu.experimental.Topology.mesh_rank
tpu.experimental.Topology.device_coordinates
tpu.experimental.Topology.missing_devices
tpu.experimental.Topology.num_tasks
tpu.experimental.Topology.num_tpus_per_task
tpu.experimental.Topology.task_ordinal_at_coordinates(device_coordinates)
tpu.experimental.Topology.tpu_device_ordinal_at_coordinates(device_coordinates)
tpu.experimental.Topology.cpu_device_name_at_coordinates(device_coordinates, job=None)
tpu.experimental.Topology.tpu_device_name_at_coordinates(device_coordinates, job=None)
tpu.experimental.Topology.serialized()
tpu.experimental.DeviceAssignment(topology, core_assignment)
tpu.experimental.DeviceAssignment.build(
    topology, computation_shape=None, computation_stride=None, num_replicas=1,
    device_order_mode=...)
tpu.experimental.DeviceAssignment.topology
tpu.experimental.DeviceAssignment.num_cores_per_replica
tpu.experimental.DeviceAssignment.num_replicas
tpu.experimental.DeviceAssignment.core_assignment
tpu.experimental.DeviceAssignment.coordinates(replica, logical_core)
tpu.experimental.DeviceAssignment.lookup_replicas(task_id, logical_core)
tpu.experimental.DeviceAssignment.tpu_ordinal(replica=0, logical_core=0)
tpu.experimental.DeviceAssignment.host_device(replica=0, logical_core=0, job=None)
tpu.experimental.DeviceAssignment.tpu_device(replica=0, logical_core=0, job=None)
tpu.experimental.DeviceOrderMode.AUTO
tpu.experimental.DeviceOrderMode.RING
tpu.experimental.DeviceOrderMode.MESH
tpu.experimental.TPUSystemMetadata(num_cores, num_hosts, num_of_cores_per_host, topology, devices)
tpu.experimental.HardwareFeature.embedding_feature
tpu.experimental.HardwareFeature.num_embedding_devices_per_chip
tpu.experimental.HardwareFeature.EmbeddingFeature.UNSUPPORTED
tpu.experimental.HardwareFeature.EmbeddingFeature.V1
tpu.experimental.HardwareFeature.EmbeddingFeature.V2
tpu.experimental.initialize_tpu_system(cluster_resolver=None)
tpu.experimental.shutdown_tpu_system(cluster_resolver=None)

compat.v1.get_loss_reduction()
compat.v1.get_strategy()
compat.v1.has_strategy()
compat.v1.get_replica_context()
compat.v1.in_cross_replica_context()
compat.v1.experimental_set_strategy(strategy)
compat.v1.Strategy.reduce(reduce_op, value, axis=None)
compat.v1.Strategy.experimental_make_numpy_dataset(numpy_input, session=None)
compat.v1.Strategy.experimental_run(fn, input_iterator=None)
compat.v1.MirroredStrategy(devices=None, cross_device_ops=None)
compat.v1.OneDeviceStrategy(device)
compat.v1.experimental.MultiWorkerMirroredStrategy(communication=..., cluster_resolver=None)
compat.v1.experimental.ParameterServerStrategy(cluster_resolver=None)
compat.v1.experimental.TPUStrategy(
    tpu_cluster_resolver=None, steps_per_run=None, device_assignment=None)
compat.v1.experimental.TPUStrategy.steps_per_run
compat.v1.experimental.CollectiveCommunication
compat.v1.experimental.CollectiveHints(bytes_per_pack=0, timeout_seconds=None)
compat.v1.experimental.CommunicationImplementation
compat.v1.experimental.CommunicationOptions(
    bytes_per_pack=0, timeout_seconds=None, implementation=...)
compat.v1.CrossDeviceOps
compat.v1.HierarchicalCopyAllReduce(num_packs=1)
compat.v1.InputContext
compat.v1.InputReplicationMode
compat.v1.NcclAllReduce(num_packs=1)
compat.v1.ReduceOp
compat.v1.ReductionToOneDevice(reduce_to_device=None, accumulation_fn=None)
compat.v1.ReplicaContext
compat.v1.RunOptions
compat.v1.Server(
    server_or_cluster_def, job_name=None, task_index=None, protocol=None, config=None, start=True)
compat.v1.StrategyExtended
compat.v1.cluster_resolver.SimpleClusterResolver

contrib.AllReduceCrossDeviceOps(
    all_reduce_alg='nccl', num_packs=1, agg_small_grads_max_bytes=0,
    agg_small_grads_max_group=10)
contrib.MultiWorkerAllReduce(
    worker_devices, num_gpus_per_worker, all_reduce_spec=('pscpu/pscpu', 2, -1), num_packs=0,
    agg_small_grads_max_bytes=0, agg_small_grads_max_group=10)
contrib.CrossDeviceOps
contrib.DistributionStrategy
contrib.DistributionStrategyExtended
contrib.Monitor(step_callable, session=None)
contrib.Monitor.run_steps(num_steps=None)
contrib.OneDeviceStrategy(device)
contrib.ReductionToOneDeviceCrossDeviceOps(reduce_to_device=None, accumulation_fn=None)
contrib.ReplicaContext
contrib.get_cross_replica_context()
contrib.get_distribution_strategy()
contrib.get_replica_context()
contrib.get_strategy()
contrib.get_loss_reduction()
contrib.has_distribution_strategy()
contrib.has_strategy()
contrib.in_cross_replica_context()
contrib.initialize_tpu_system
contrib.require_replica_context(replica_ctx)

contrib.DistributeConfig(train_distribute=None, eval_distribute=None, remote_cluster=None)
estimator.Estimator(model_fn, model_dir=None, config=None, params=None, warm_start_from=None)
estimator.Estimator.train(input_fn, hooks=None, steps=None, max_steps=None, saving_listeners=None)
estimator.Estimator.evaluate(input_fn, steps=None, hooks=None, checkpoint_path=None, name=None)
estimator.Estimator.predict(input_fn, predict_keys=None, hooks=None, checkpoint_path=None,
    yield_single_examples=True)
estimator.Estimator.config
estimator.Estimator.eval_dir(name=None)
estimator.Estimator.get_variable_names()
estimator.Estimator.get_variable_value(name)
estimator.Estimator.latest_checkpoint()
estimator.Estimator.model_dir
estimator.Estimator.params
estimator.ModeKeys.TRAIN
estimator.ModeKeys.EVAL
estimator.ModeKeys.PREDICT
estimator.RunConfig(model_dir=None, tf_random_seed=None, save_summary_steps=100,
    save_checkpoints_steps=..., save_checkpoints_secs=...)
estimator.RunConfig.replace
estimator.TrainSpec(input_fn, max_steps=None, hooks=None, saving_listeners=None)
estimator.EvalSpec(input_fn, steps=100, name=None, hooks=None, exporters=None, start_delay_secs=120,
    throttle_secs=600)
estimator.train_and_evaluate(estimator, train_spec, eval_spec)
estimator.WarmStartSettings(ckpt_to_initialize_from, vars_to_warm_start='.*')
estimator.SessionRunHook.begin()
estimator.SessionRunHook.after_create_session(session, coord)
estimator.SessionRunHook.before_run(run_context)
estimator.SessionRunHook.after_run(run_context, run_values)
estimator.SessionRunHook.end(session)
estimator.CheckpointSaverListener.begin()
estimator.CheckpointSaverListener.before_save(session, global_step_value)
estimator.CheckpointSaverListener.after_save(session, global_step_value)
estimator.CheckpointSaverListener.end(session, global_step_value)
estimator.Exporter.export(estimator, export_path, checkpoint_path, eval_result, is_the_final_export)
estimator.FinalExporter(name, serving_input_receiver_fn)
estimator.LatestExporter(name, serving_input_receiver_fn)
estimator.BestExporter(name='best_exporter', serving_input_receiver_fn=None)
estimator.TaskType.CHIEF
estimator.experimental.make_early_stopping_hook(estimator, should_stop_fn, run_every_secs=60,
    run_every_steps=None)
estimator.experimental.stop_if_higher_hook(estimator, metric_name, threshold, eval_dir=None,
    min_steps=0, run_every_secs=60, run_every_steps=None)
estimator.experimental.stop_if_lower_hook(estimator, metric_name, threshold, eval_dir=None,
    min_steps=0, run_every_secs=60, run_every_steps=None)
estimator.experimental.stop_if_no_increase_hook(estimator, metric_name, max_steps_without_increase,
    eval_dir=None, min_steps=0, run_every_secs=60, run_every_steps=None)
estimator.experimental.stop_if_no_decrease_hook(estimator, metric_name, max_steps_without_decrease,
    eval_dir=None, min_steps=0, run_every_secs=60, run_every_steps=None)

nn.compute_average_loss(per_example_loss, sample_weight=None, global_batch_size=None)
nn.scale_regularization_loss(regularization_loss)

errors.CancelledError
errors.DeadlineExceededError
errors.InvalidArgumentError
errors.NotFoundError
errors.OutOfRangeError
errors.UnavailableError
errors.UnknownError
"""

# Not there: reading it is an error with these words, which name what is in its place.
REPLACED = {
    "ExponentialMovingAverage": "optax.incremental_update",
    "StrategyV1": "jaxdist.compat.v1.Strategy",
    "get_loss_reduction": "jaxdist.compat.v1.get_loss_reduction",
    "experimental_aggregate_gradients": "optax's, which never all-reduce",
    "Strategy.configure": "config.experimental_connect_to_cluster",
    "Strategy.update_config_proto": "XLA_FLAGS",
    "Strategy.steps_per_run": "compat.v1.experimental.TPUStrategy",
    "Strategy.experimental_assign_to_logical_device": "TPUStrategy has it",
    "Strategy.experimental_replicate_to_logical_devices": "TPUStrategy has it",
    "Strategy.experimental_split_to_logical_devices": "TPUStrategy has it",
    "cluster_resolver.SageMakerClusterResolver": "SimpleClusterResolver",
    "compat.v1.DistributedDataset": "jaxdist.DistributedDataset",
    "compat.v1.DistributedIterator": "jaxdist.DistributedIterator",
    "compat.v1.DistributedValues": "jaxdist.DistributedValues",
    "compat.v1.InputOptions": "jaxdist.InputOptions",
    "compat.v1.TPUStrategy": "jaxdist.TPUStrategy",
    "compat.v1.tpu.CrossShardOptimizer": "all_reduce('mean', grads)",
    "compat.v1.tpu.PaddingSpec": "PartialBatch.PAD",
    "compat.v1.tpu.batch_parallel": "strategy.run",
    "compat.v1.tpu.bfloat16_scope": "jnp.bfloat16",
    "compat.v1.tpu.core": "on_logical_device",
    "compat.v1.tpu.cross_replica_sum": "all_reduce('sum', x)",
    "compat.v1.tpu.initialize_system": "initialize_tpu_system",
    "compat.v1.tpu.outside_compilation": "jax.pure_callback",
    "compat.v1.tpu.replicate": "strategy.run",
    "compat.v1.tpu.rewrite": "jaxdist.function",
    "compat.v1.tpu.shard": "per_replica_sharding",
    "compat.v1.tpu.shutdown_system": "shutdown_tpu_system",
    "compat.v1.MultiWorkerMirroredStrategy": "compat.v1.experimental",
    "compat.v1.ParameterServerStrategy": "compat.v1.experimental",
    "contrib.CollectiveAllReduceStrategy": "distribute_datasets_from_function",
    "contrib.MirroredStrategy": "distribute_datasets_from_function",
    "contrib.ParameterServerStrategy": "compat.v1.experimental.ParameterServerStrategy",
    "contrib.StandardInputStep": "strategy.run",
    "contrib.StandardSingleLossStep": "value_and_grad",
    "contrib.Step": "strategy.run",
    "contrib.TPUStrategy": "jaxdist.TPUStrategy",
    "contrib.UpdateContext": "extended.update",
    "errors.FailedPreconditionError": "errors.ContextError",
    "CentralStorageStrategy": "experimental.CentralStorageStrategy",
    "contrib.run_standard_tensorflow_server": "jaxdist.Server",
    "errors.AbortedError": "errors.PSUnavailableError",
    "distribute": "jaxdist.MirroredStrategy",
    "keras": "KERAS_BACKEND=jax",
    "lookup": "jaxdist.nn.embedding_lookup",
    "tpu.experimental.embedding": "partition.fsdp()",
}

# There under the same name, with other arguments: what the page on differences says of it.
OTHER_ARGUMENTS = {
    "ReplicaContext(strategy, replica_id_in_sync_group)": "made by `get_replica_context()` alone",
}
