"""Checks that the sizes of a language model fit each other."""

import math

from jaxdist.errors import ConfigError
from jaxdist.jobs import PARTITIONS, LoadedConfig
from jaxdist.jobs.topics_lm._attend import BLOCK_MULTIPLE, KERNELS
from jaxdist.jobs.topics_lm._schema import TopicsConfig


def check_sizes(loaded: LoadedConfig[TopicsConfig]) -> None:
    """Check that the sizes of the model fit each other and the logical devices.

    Raises:
        ConfigError: Heads do not divide the width, or have an odd number of dims; logical devices
            cannot share the model equally.
    """
    _check_heads(loaded)
    _check_kernel(loaded)
    asked = loaded.values.strategy
    # Tensor parallelism splits heads, hidden dims and the vocabulary over the logical devices.
    if PARTITIONS[asked.partition].is_split:
        # A number, or a shape such as "2x2".
        _check_divides(loaded, math.prod(map(int, str(asked.logical_devices).split("x"))))


def _check_heads(loaded: LoadedConfig[TopicsConfig]) -> None:
    model = loaded.values.model
    width, heads = model.width, model.heads
    if model.head_dim:
        if model.head_dim % 2:
            raise ConfigError(
                f"{loaded.origin('model.head_dim')}: model.head_dim is {model.head_dim}.\n\n"
                "Rotary positions rotate pairs of dims, so a head has an even number of them.\n\n"
                f"Set model.head_dim to {model.head_dim + 1}, or to 0 for width / heads."
            )
        return
    # Rotary positions rotate pairs of dims, so a head needs an even number of dims.
    fitting = [n for n in range(1, width + 1) if width % n == 0 and width // n % 2 == 0]
    if heads not in fitting:
        near = sorted(fitting, key=lambda n: abs(n - heads))[:2]
        raise ConfigError(
            f"{loaded.origin('model.heads')}: model.heads is {heads}, and model.width is {width}."
            "\n\nAll heads have the same even number of dims.\n\n"
            + (
                f"Set model.heads to {' or '.join(map(str, sorted(near)))}."
                if near
                else f"Set model.width to an even number, such as {width + 1}."
            )
        )


def _check_kernel(loaded: LoadedConfig[TopicsConfig]) -> None:
    length, how = loaded.values.data.sequence_length, loaded.values.model.attention
    if how in KERNELS and length % BLOCK_MULTIPLE:
        near = length + -length % BLOCK_MULTIPLE
        raise ConfigError(
            f"{loaded.origin('model.attention')}: model.attention is {how!r}, and "
            f"data.sequence_length is {length}.\n\n"
            f"The kernel works on blocks of {BLOCK_MULTIPLE} positions.\n\n"
            f"Set data.sequence_length to {near}, or model.attention to 'chunked'."
        )


def _check_divides(loaded: LoadedConfig[TopicsConfig], count: int) -> None:
    for entry, what in {"heads": "attention", "hidden": "the MLP"}.items():
        size = getattr(loaded.values.model, entry)
        if size % count:
            low, high = size - size % count, size + -size % count
            raise ConfigError(
                f"{loaded.origin(f'model.{entry}')}: model.{entry} is {size}, and {count} "
                f"logical devices cannot share {what} equally.\n\n"
                f"Each logical device has the same part: model.{entry} is a multiple of "
                f"{count}.\n\n"
                f"Set model.{entry} to {' or '.join(str(n) for n in (low, high) if n)}, or "
                f"strategy.logical_devices to a divisor of {size}."
            )
    length = loaded.values.data.sequence_length
    if loaded.values.model.split_residual and length % count:
        raise ConfigError(
            f"{loaded.origin('model.split_residual')}: model.split_residual is true, and {count} "
            f"logical devices cannot share the {length} positions of data.sequence_length "
            f"equally.\n\nEach logical device has the same number of positions.\n\n"
            f"Set data.sequence_length to {length + -length % count}, or model.split_residual to "
            "false."
        )
    vocabulary = loaded.values.model.vocabulary
    if vocabulary % count:
        raise ConfigError(
            f"{loaded.origin('strategy.logical_devices')}: strategy.logical_devices is {count}, "
            f"and the vocabulary has {vocabulary} entries.\n\n"
            f"Each logical device has the same number of them.\n\n"
            f"Set it to a divisor of {vocabulary}, such as {math.gcd(vocabulary, count)}."
        )
