"""The language model as a task: its data, and its results in words."""

import functools
import math
from collections.abc import Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist import Strategy
from jaxdist.jobs import PARTITIONS, Curve, Data, LoadedConfig, Task
from jaxdist.jobs.topics_lm._checks import check_sizes
from jaxdist.jobs.topics_lm._generate import generate
from jaxdist.jobs.topics_lm._layout import Layout, Pipeline
from jaxdist.jobs.topics_lm._model import Transformer, evaluation_step, train_step
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
    experts = "mlp/{up,down,gate}"
    divides_positions = True
    remats = ("none", "parameters", "products", "layers")
    train_step = staticmethod(train_step)
    evaluation_step = staticmethod(evaluation_step)

    @classmethod
    def check(cls, loaded: LoadedConfig[TopicsConfig]) -> None:
        check_sizes(loaded)

    def make_model(self, rngs: nnx.Rngs) -> Transformer:
        asked, pipeline = self.config.strategy, None
        if asked.stages > 1 or asked.micro_batches > 1:
            pipeline = Pipeline(
                asked.stages, asked.schedule, asked.micro_batches, asked.chunks, asked.experts
            )
        layout = Layout(asked.positions, asked.attention, asked.order, asked.experts)
        return Transformer(self.config.model, rngs=rngs, pipeline=pipeline, layout=layout)

    @property
    def is_stacked(self) -> bool:
        return self.config.model.scan_layers

    @property
    def has_experts(self) -> bool:
        return self.config.model.experts > 0

    @property
    def rules(self) -> tuple[str, ...]:
        # Tensor parallelism splits the matrices of the MLP, which experts do not have.
        split = [n for n, found in PARTITIONS.items() if found.is_split and self.has_experts]
        return tuple(n for n in super().rules if n not in split)

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
