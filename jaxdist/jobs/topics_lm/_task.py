"""The language model as a task: its data, and the words for its results."""

import math
from typing import Any, final

from jaxdist._strategies import Strategy
from jaxdist.jobs._task import Curve, Measures, Task
from jaxdist.jobs.topics_lm._generate import generate
from jaxdist.jobs.topics_lm._recipe import TopicsRecipe
from jaxdist.jobs.topics_lm._schema import TopicsConfig
from jaxdist.jobs.topics_lm._text import (
    SEPARATOR,
    compute_baselines,
    load_text,
    make_held_out_windows,
    make_training_windows,
)
from jaxdist.training import WEIGHT


@final
class TopicsTask(Task):
    """The prediction of the next byte in the topics of Python's `help()`."""

    title = "topics"
    examples = "windows"
    unit = "bytes"
    curve = Curve("bits_per_byte", "held-out bits per byte")

    def __init__(self, config: TopicsConfig) -> None:
        self.recipe = TopicsRecipe(config)
        self._config = config
        text = load_text(config.data.test_fraction, config.data.seed)
        length = config.data.sequence_length
        self.train = make_training_windows(text.train, length, config.data.stride)
        self.held_out = make_held_out_windows(text.held_out, length)
        self.units_per_example = length
        self._checksum = text.checksum
        self._baselines = compute_baselines(text)

    def identity(self) -> dict[str, Any]:
        data = self._config.data
        return {
            "seed": data.seed,
            "test_fraction": data.test_fraction,
            "sequence_length": data.sequence_length,
            "stride": data.stride,
            "checksum of the text": self._checksum,
        }

    def measures(self, means: Measures) -> dict[str, float]:
        loss = means["loss"]
        return {
            "loss": loss,
            "bits_per_byte": loss / math.log(2),
            # Limited, since exp(710) raises OverflowError.
            "perplexity": math.exp(min(loss, 700.0)),
            "bytes": means[WEIGHT],
        }

    def in_words(self, measures: Measures) -> str:
        return (
            f"held out {measures['bits_per_byte']:.3f} bits per byte, perplexity "
            f"{measures['perplexity']:.2f}, on {measures['bytes']:.0f} bytes"
        )

    def headline(self, measures: Measures) -> str:
        return f"bits per byte {measures['bits_per_byte']:.3f}"

    def metrics(self, measures: Measures) -> dict[str, Any]:
        return {
            "bits_per_byte": measures["bits_per_byte"],
            "baseline_bits_per_byte": self._baselines,
        }

    def finish(self, strategy: Strategy, model: Any) -> tuple[dict[str, Any], str]:
        """Generate text with the trained model."""
        asked = self._config.generate
        counted = (
            f"counting bytes takes {self._baselines['unigram']:.3f} bits per byte, "
            f"counting pairs {self._baselines['bigram']:.3f}"
        )
        if not asked.bytes:
            return {}, counted
        made = generate(
            strategy,
            model,
            asked.prompt,
            asked.bytes,
            context_length=self._config.data.sequence_length,
            temperature=asked.temperature,
            seed=asked.seed,
        )
        text = asked.prompt + made.decode(errors="replace")
        shown = text.replace(SEPARATOR.decode(), "\n\n")
        return {"sample": text}, f"{counted}\n\n{shown}\n"
