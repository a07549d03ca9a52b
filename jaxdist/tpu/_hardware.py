"""`HardwareFeature`: the embedding hardware of each generation of TPUs."""

import enum
from typing import final

from jaxdist._called import called
from jaxdist._validate import check_text


class EmbeddingFeature(enum.Enum):
    """The hardware of a chip for embedding tables."""

    UNSUPPORTED = "UNSUPPORTED"
    V1 = "V1"
    V2 = "V2"


# SparseCores per chip: cloud.google.com/tpu/docs, pages v4, v5p and v6e. V1 is the earlier
# technique, which uses the TensorCores of v2 and v3.
_FEATURES = {
    "v2": (EmbeddingFeature.V1, 0),
    "v3": (EmbeddingFeature.V1, 0),
    "v4": (EmbeddingFeature.V2, 4),
    "v5p": (EmbeddingFeature.V2, 4),
    "v6e": (EmbeddingFeature.V2, 2),
}
# JAX's `device_kind`, if it differs from the name of the generation.
_KINDS = {"v5": "v5p", "v5 lite": "v5e", "v5lite": "v5e", "v6 lite": "v6e"}


@final
class HardwareFeature:
    """The features of the chips of a generation besides matrix products.

    Args:
        kind: The generation, such as `v5e`, or JAX's `device_kind`, such as `TPU v5 lite`.

    Example:
        >>> feature = jaxdist.tpu.experimental.HardwareFeature("TPU v5")
        >>> feature.embedding_feature.name, feature.num_embedding_devices_per_chip
        ('V2', 4)

    Source:
        `tf.tpu.experimental.HardwareFeature`.
    """

    EmbeddingFeature = EmbeddingFeature

    @called("HardwareFeature")
    def __init__(self, kind: str) -> None:
        check_text("kind", kind, "v5e")
        name = kind.removeprefix("TPU ").lower()
        self._feature, self._devices = _FEATURES.get(
            _KINDS.get(name, name), (EmbeddingFeature.UNSUPPORTED, 0)
        )

    @property
    def embedding_feature(self) -> EmbeddingFeature:
        """The hardware for embedding tables."""
        return self._feature

    @property
    def num_embedding_devices_per_chip(self) -> int:
        """Number of SparseCores of a chip."""
        return self._devices
