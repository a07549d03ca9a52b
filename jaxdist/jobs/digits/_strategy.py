"""The strategy of a digits configuration."""

import jax

from jaxdist._strategies import MirroredStrategy
from jaxdist._validate import check_instance
from jaxdist.jobs.digits._schema import DigitsConfig


def mirrored_strategy(config: DigitsConfig) -> MirroredStrategy:
    """Return the configured strategy, on all accelerators or on virtual CPU devices.

    Virtual CPU devices must be requested before JAX starts.
    """
    check_instance(
        "jobs.mirrored_strategy",
        "config",
        config,
        DigitsConfig,
        "a jobs.DigitsConfig",
        "Pass load_job_config(path).values, or DigitsConfig().",
    )
    deterministic = config.strategy.deterministic
    if config.strategy.devices != "auto":
        return MirroredStrategy(list(config.strategy.devices), deterministic=deterministic)
    devices = jax.local_devices()
    if jax.default_backend() == "cpu":
        # The process may have more of them, from XLA_FLAGS or from an earlier request.
        devices = devices[: config.strategy.virtual_cpu_devices]
    return MirroredStrategy(devices, deterministic=deterministic)
