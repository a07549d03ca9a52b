"""The next word as a task: its examples, and how to describe its results."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, final

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.jobs import CheckpointConfig, Curve, Data, JobConfig, OutputConfig, Task, section
from jaxdist.jobs.next_word._model import ModelConfig, NextWordNet, evaluation_step, train_step
from jaxdist.jobs.next_word._words import NUM_FEATURES, load_examples
from jaxdist.training import WEIGHT

_RUN = "runs/embedding_parameter_server"


@dataclasses.dataclass(frozen=True)
class NextWordConfig(JobConfig):
    """The sections of `configs/embedding_parameter_server.toml`."""

    task: Literal["next_word"] = "next_word"
    model: ModelConfig = section(ModelConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig, directory=f"{_RUN}/checkpoints")
    output: OutputConfig = section(OutputConfig, directory=_RUN)


@final
class NextWordTask(Task[NextWordConfig]):
    """Predicts the next word in Python's documentation from hashes of the words before it.

    Example:
        >>> task = NextWordTask(NextWordConfig())
        >>> task.batch(4)["features"].shape
        (4, 6)
    """

    config_type = NextWordConfig
    title = "next word"
    examples = "words"
    unit = "words"
    curve = Curve("accuracy", "held-out accuracy (%)", factor=100.0)
    in_words = "held-out accuracy {accuracy:.2%}, loss {loss:.4f} on {words:.0f} words"
    headline = "accuracy {accuracy:.2%}"
    train_step = staticmethod(train_step)
    evaluation_step = staticmethod(evaluation_step)

    def make_model(self, rngs: nnx.Rngs) -> NextWordNet:
        return NextWordNet(self.config.model, rngs=rngs)

    def batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            "features": jax.ShapeDtypeStruct((rows, NUM_FEATURES), jnp.int32),
            "label": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }

    def load(self) -> Data:
        own, model = self.config.data, self.config.model
        train, held_out, checksum = load_examples(
            model.rows, model.classes, own.test_fraction, own.seed
        )
        identity = {"seed": own.seed, "test_fraction": own.test_fraction, "checksum": checksum}
        return Data(train, held_out, identity)

    def measures(self, means: Mapping[str, float]) -> dict[str, float]:
        return {
            "loss": means["loss"],
            "accuracy": means["accuracy"],
            "words": means[WEIGHT],
        }
