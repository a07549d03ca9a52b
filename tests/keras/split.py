"""A strategy with logical devices, and a model whose kernels rules of tensor parallelism split."""

from typing import Any

import jax
import keras
from keras import layers

import jaxdist
from tests.keras.models import CLASSES, FEATURES

HIDDEN = 8


def make_strategy(data: int = 4, model: int = 2) -> jaxdist.MirroredStrategy:
    mesh = jax.make_mesh(
        (data, model),
        ("data", "model"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[: data * model],
    )
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))


def make_model() -> Any:
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(HIDDEN, activation="relu", name="up"),
            layers.Dense(CLASSES, activation="softmax", name="down"),
        ]
    )


def compile_model() -> dict[str, Any]:
    return {
        "optimizer": keras.optimizers.Adam(0.01),
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
    }
