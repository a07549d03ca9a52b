"""What must hold between entries of a language model's configuration."""

import re

from jaxdist import tpu
from jaxdist.errors import ConfigError, TopologyError
from jaxdist.training._config import LoadedConfig
from jaxdist.training.topics_lm._schema import TopicsConfig

_SHAPE = re.compile(r"^[1-9]\d*(x[1-9]\d*){1,3}$")


def check_entries(loaded: LoadedConfig[TopicsConfig]) -> None:
    """Refuse entries that do not go together, before anything is started.

    Raises:
        ConfigError: Heads do not divide the width, or have an odd number of dims; the slice or
            the logical devices are not written as they should be.
    """
    _check_slice(loaded)
    _check_logical(loaded)
    _check_heads(loaded)


def _check_slice(loaded: LoadedConfig[TopicsConfig]) -> None:
    name = loaded.values.strategy.virtual_slice
    try:
        tpu.slice_of(name)
    except TopologyError as error:
        raise ConfigError(f"{loaded.origin('strategy.virtual_slice')}: {error}") from None


def _check_logical(loaded: LoadedConfig[TopicsConfig]) -> None:
    asked = loaded.values.strategy.logical_devices
    if isinstance(asked, str) and not _SHAPE.match(asked):
        raise ConfigError(
            f"{loaded.origin('strategy.logical_devices')}: strategy.logical_devices is "
            f"{asked!r}, which is neither a number nor a shape.\n\n"
            'Give the devices of one replica, such as 2, or the box that they are, such as "2x1".'
        )


def _check_heads(loaded: LoadedConfig[TopicsConfig]) -> None:
    width, heads = loaded.values.model.width, loaded.values.model.heads
    # Rotary positions turn dims in pairs.
    fitting = [n for n in range(1, width + 1) if width % n == 0 and width // n % 2 == 0]
    if heads not in fitting:
        near = sorted(fitting, key=lambda n: abs(n - heads))[:2]
        raise ConfigError(
            f"{loaded.origin('model.heads')}: model.heads is {heads}, and model.width {width} "
            "has to divide into heads of an even number of dims.\n\n"
            + (
                f"Set model.heads to {' or '.join(map(str, sorted(near)))}."
                if near
                else f"Set model.width to an even number, such as {width + 1}."
            )
        )
