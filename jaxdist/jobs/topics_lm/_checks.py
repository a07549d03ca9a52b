"""Checks that the sizes of the language model fit each other and the devices of a replica."""

import math

from jaxdist.errors import ConfigError
from jaxdist.jobs import PARTITIONS, LoadedConfig
from jaxdist.jobs.topics_lm._attention import BLOCK_MULTIPLE, KERNELS
from jaxdist.jobs.topics_lm._schema import TopicsConfig


def check_sizes(loaded: LoadedConfig[TopicsConfig]) -> None:
    """Check that the sizes of the model fit each other and the logical devices.

    Raises:
        ConfigError: Heads do not divide the width, or have an odd number of dims; logical devices
            or those of an axis cannot share the model equally.
    """
    _check_heads(loaded)
    _check_kernel(loaded)
    asked = loaded.values.strategy
    _check_stack(loaded)
    _check_positions(loaded)
    _check_experts(loaded)
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


def _check_stack(loaded: LoadedConfig[TopicsConfig]) -> None:
    """Check that a pipeline has stacked layers, which its stages and chunks divide."""
    asked, model = loaded.values.strategy, loaded.values.model
    if asked.stages == 1 and asked.micro_batches <= 1:
        return
    name = "stages" if asked.stages > 1 else "micro_batches"
    count = getattr(asked, name)
    if not model.scan_layers:
        raise ConfigError(
            f"{loaded.origin(f'strategy.{name}')}: strategy.{name} is {count}, and "
            "model.scan_layers is false.\n\n"
            "A pipeline runs layers whose parameters are stacked in one array.\n\n"
            f"Set model.scan_layers to true, or strategy.{name} to 1."
        )
    unit = asked.stages * asked.chunks
    if model.layers % unit:
        low, high = model.layers - model.layers % unit, model.layers + -model.layers % unit
        each = f"{asked.stages} stages"
        if asked.chunks > 1:
            each += f" of {asked.chunks} chunks"
        raise ConfigError(
            f"{loaded.origin('strategy.stages')}: strategy.stages is {asked.stages}, "
            f"strategy.chunks is {asked.chunks}, and model.layers is {model.layers}.\n\n"
            f"The {each} have equal numbers of layers: model.layers is a multiple of {unit}.\n\n"
            f"Set model.layers to {' or '.join(str(n) for n in (low, high) if n)}, or fewer stages "
            "or chunks."
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


def _check_positions(loaded: LoadedConfig[TopicsConfig]) -> None:
    """Check that devices can divide the positions, where there are any."""
    asked, model = loaded.values.strategy, loaded.values.model
    count, length = asked.positions, loaded.values.data.sequence_length
    if count == 1:
        return
    found = f"strategy.positions is {count}"
    if model.attention in KERNELS:
        raise ConfigError(
            f"{loaded.origin('model.attention')}: model.attention is {model.attention!r}, and "
            f"{found}.\n\nThe kernel computes all positions on one device.\n\n"
            "Set model.attention to 'chunked': devices that divide positions compute attention in "
            "blocks of model.attention_chunk. Or set strategy.positions to 1."
        )
    if model.split_residual:
        raise ConfigError(
            f"{loaded.origin('model.split_residual')}: model.split_residual is true, and {found}."
            "\n\nThe positions of activations are divided over those devices already.\n\n"
            "Set model.split_residual to false."
        )
    if asked.attention == "ulysses" and model.heads % count:
        low, high = model.heads - model.heads % count, model.heads + -model.heads % count
        raise ConfigError(
            f"{loaded.origin('strategy.attention')}: strategy.attention is 'ulysses', {found}, and "
            f"model.heads is {model.heads}.\n\n"
            "Each device computes an equal number of whole heads.\n\n"
            "Set strategy.attention to 'gather' or 'ring', or model.heads to "
            f"{' or '.join(str(n) for n in (low, high) if n)}."
        )
    if asked.order == "zigzag" and model.experts:
        raise ConfigError(
            f"{loaded.origin('strategy.order')}: strategy.order is 'zigzag', {found}, and "
            f"model.experts is {model.experts}.\n\n"
            "Experts take the positions of a window in their order, so another order would drop "
            "other ones.\n\nSet strategy.order to 'contiguous'."
        )
    parts = 2 * count if asked.order == "zigzag" else count
    if length % parts:
        low, high = length - length % parts, length + -length % parts
        other = ", or strategy.order to 'contiguous'" if length % count == 0 else ""
        raise ConfigError(
            f"{loaded.origin('data.sequence_length')}: data.sequence_length is {length}, {found}, "
            f"and strategy.order is {asked.order!r}.\n\n"
            f"This order cuts the positions into {parts} parts of one length.\n\n"
            f"Set data.sequence_length to {' or '.join(str(n) for n in (low, high) if n)}{other}."
        )


def _check_experts(loaded: LoadedConfig[TopicsConfig]) -> None:
    """Check that a model has the experts that devices divide and positions choose."""
    asked, model = loaded.values.strategy, loaded.values.model
    count = asked.experts
    if count > 1 and (not model.experts or model.experts % count):
        raise _make_experts_error(loaded, count)
    if not model.experts:
        return
    found = f"model.experts is {model.experts}"
    if model.top_k > model.experts:
        raise ConfigError(
            f"{loaded.origin('model.top_k')}: model.top_k is {model.top_k}, and {found}.\n\n"
            "A position chooses some of the experts, each at most once.\n\n"
            f"Set model.top_k to {model.experts} or less."
        )
    if PARTITIONS[asked.partition].is_split:
        raise ConfigError(
            f"{loaded.origin('strategy.partition')}: strategy.partition is {asked.partition!r}, "
            f"and {found}.\n\nTensor parallelism splits the kernels of an MLP, and an expert is "
            "whole on its device.\n\n"
            "Set strategy.partition to 'replicated' or 'fsdp', strategy.logical_devices to 1, and "
            f"strategy.experts to a divisor of {model.experts}."
        )
    if model.split_residual and count > 1:
        raise ConfigError(
            f"{loaded.origin('model.split_residual')}: model.split_residual is true, and "
            f"strategy.experts is {count}.\n\nThese devices divide the rows of activations.\n\n"
            "Set model.split_residual to false."
        )


def _make_experts_error(loaded: LoadedConfig[TopicsConfig], count: int) -> ConfigError:
    found = loaded.values.model.experts
    near = [n for n in (found - found % count, found + -found % count) if n] or [count]
    return ConfigError(
        f"{loaded.origin('strategy.experts')}: strategy.experts is {count}, and model.experts is "
        f"{found}.\n\nEach of these devices has the same number of experts, one or more.\n\n"
        f"Set model.experts to {' or '.join(map(str, near))}, or strategy.experts to "
        f"{max(n for n in range(1, count + 1) if found % n == 0) if found else 1}."
    )
