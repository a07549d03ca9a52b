"""The language model as a task: checks of its sizes, its data, and its results in words."""

import functools
import math
from collections.abc import Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist import Strategy
from jaxdist.errors import ConfigError
from jaxdist.jobs import PARTITIONS, Curve, Data, LoadedConfig, Task
from jaxdist.jobs.topics_lm._attention import BLOCK_MULTIPLE, KERNELS
from jaxdist.jobs.topics_lm._generate import generate
from jaxdist.jobs.topics_lm._model import Pipeline, Transformer, evaluation_step, train_step
from jaxdist.jobs.topics_lm._schema import TopicsConfig
from jaxdist.jobs.topics_lm._text import (
    SEPARATOR,
    Text,
    compute_baselines,
    load_text,
    make_held_out_windows,
    make_training_windows,
)
from jaxdist.training import WEIGHT


def check_sizes(loaded: LoadedConfig[TopicsConfig]) -> None:
    """Check that the sizes of the model fit each other and the logical devices.

    Raises:
        ConfigError: Heads do not divide the width, or have an odd number of dims; logical devices
            cannot share the model equally.
    """
    _check_heads(loaded)
    _check_kernel(loaded)
    asked = loaded.values.strategy
    _check_stack(loaded)
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


@final
class TopicsTask(Task[TopicsConfig]):
    """Predicts the next byte in the topics of Python's `help()`.

    Example:
        >>> from jaxdist.jobs.topics_lm import TopicsConfig
        >>> task = TopicsTask(TopicsConfig())
        >>> task.rows_per_replica, task.rules[0], task.batch(4)["tokens"].shape
        (4, 'replicated', (4, 129))
    """

    config_type = TopicsConfig
    title = "topics"
    examples = "windows"
    unit = "bytes"
    curve = Curve("bits_per_byte", "held-out bits per byte")
    in_words = (
        "held out {bits_per_byte:.3f} bits per byte, perplexity {perplexity:.2f}, "
        "on {bytes:.0f} bytes"
    )
    headline = "bits per byte {bits_per_byte:.3f}"
    can_split = True
    stack = "layers/**"
    remats = ("none", "parameters", "products", "layers")
    train_step = staticmethod(train_step)
    evaluation_step = staticmethod(evaluation_step)

    @classmethod
    def check(cls, loaded: LoadedConfig[TopicsConfig]) -> None:
        check_sizes(loaded)

    def make_model(self, rngs: nnx.Rngs) -> Transformer:
        asked, pipeline = self.config.strategy, None
        if asked.stages > 1 or asked.micro_batches > 1:
            pipeline = Pipeline(asked.stages, asked.schedule, asked.micro_batches, asked.chunks)
        return Transformer(self.config.model, rngs=rngs, pipeline=pipeline)

    @property
    def is_stacked(self) -> bool:
        return self.config.model.scan_layers

    def batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {"tokens": jax.ShapeDtypeStruct((rows, self.units_per_example + 1), jnp.uint8)}

    @functools.cached_property
    def _text(self) -> Text:
        return load_text(self.config.data.test_fraction, self.config.data.seed)

    def load(self) -> Data:
        asked, text = self.config.data, self._text
        return Data(
            make_training_windows(text.train, asked.sequence_length, asked.stride),
            make_held_out_windows(text.held_out, asked.sequence_length),
            {
                "seed": asked.seed,
                "test_fraction": asked.test_fraction,
                "sequence_length": asked.sequence_length,
                "stride": asked.stride,
                "checksum of the text": text.checksum,
            },
        )

    @property
    def units_per_example(self) -> int:
        return self.config.data.sequence_length

    def measures(self, means: Mapping[str, float]) -> dict[str, float]:
        loss = means["loss"]
        return {
            "loss": loss,
            "bits_per_byte": loss / math.log(2),
            # Limit the loss: exp(710) raises OverflowError.
            "perplexity": math.exp(min(loss, 700.0)),
            "bytes": means[WEIGHT],
        }

    def finish(self, strategy: Strategy, model: Any) -> tuple[dict[str, Any], str]:
        """Generate text with the trained model."""
        asked, counted = self.config.generate, compute_baselines(self._text)
        found: dict[str, Any] = {"baseline_bits_per_byte": counted}
        words = (
            f"counting bytes takes {counted['unigram']:.3f} bits per byte, "
            f"counting pairs {counted['bigram']:.3f}"
        )
        if not asked.bytes:
            return found, words
        made = generate(
            strategy,
            model,
            asked.prompt,
            asked.bytes,
            context_length=self.config.data.sequence_length,
            temperature=asked.temperature,
            seed=asked.seed,
        )
        text = asked.prompt + made.decode(errors="replace")
        shown = text.replace(SEPARATOR.decode(), "\n\n")
        return {**found, "sample": text}, f"{words}\n\n{shown}\n"
