"""Options of XLA on TPUs, as `RunOptions` takes them."""

from typing import NamedTuple


class XLAOptions(NamedTuple):
    """What `RunOptions(experimental_xla_options=...)` takes.

    Args:
        use_spmd_for_xla_partitioning: Has no effect: XLA partitions a replica by SPMD always.
        enable_xla_dynamic_padder: Has no effect: programs have static shapes.
        use_shardy_partitioner: Has no effect: JAX's own setting
            `jax_use_shardy_partitioner` says so.

    Another value than the default is logged when a step runs with it.

    Example:
        >>> options = RunOptions(experimental_xla_options=jaxdist.tpu.XLAOptions())
        >>> options.experimental_xla_options.use_spmd_for_xla_partitioning
        True

    Source:
        `tf.tpu.XLAOptions`.
    """

    use_spmd_for_xla_partitioning: bool = True
    enable_xla_dynamic_padder: bool = True
    use_shardy_partitioner: bool = False
