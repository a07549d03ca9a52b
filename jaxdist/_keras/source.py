"""Accesses modules of Keras, which only the functions that need them import."""

import importlib
import sys
from typing import Any

# Classes of objects with variables: their modules inside `keras.src`, and their names.
WITH_VARIABLES = (
    ("backend.common.variables", "Variable"),
    ("layers.layer", "Layer"),
    ("metrics.metric", "Metric"),
    ("optimizers.base_optimizer", "BaseOptimizer"),
    ("random.seed_generator", "SeedGenerator"),
)


def keras_module(name: str) -> Any:
    """Return a module inside `keras.src`. A model exists, so Keras is imported already."""
    return importlib.import_module(f"keras.src.{name}")


def is_keras_imported() -> bool:
    """Whether the import of Keras is complete."""
    module = sys.modules.get("keras")
    spec = getattr(module, "__spec__", None)
    return module is not None and not getattr(spec, "_initializing", False)
