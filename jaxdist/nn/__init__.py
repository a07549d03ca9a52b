"""Losses, random keys, lookups and attention that do not depend on how devices divide the work."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist.nn import schedules as schedules
    from jaxdist.nn._attention.attention import attention as attention
    from jaxdist.nn._attention.positions import positions as positions
    from jaxdist.nn._attention.positions import split_positions as split_positions
    from jaxdist.nn._embedding import embedding_lookup as embedding_lookup
    from jaxdist.nn._experts import experts as experts
    from jaxdist.nn._loss import compute_average_loss as compute_average_loss
    from jaxdist.nn._loss import scale_regularization_loss as scale_regularization_loss
    from jaxdist.nn._pipeline_loss import pipeline_loss as pipeline_loss
    from jaxdist.nn._random import example_keys as example_keys
    from jaxdist.nn._vocabulary_head import vocabulary_head as vocabulary_head

_open_late(__name__)
