"""Trains Keras models on the replicas of a strategy. Does not import Keras itself."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._keras.forward.states import Law as Law
    from jaxdist._keras.functions import take_batches as take_batches
    from jaxdist._keras.listing import find_aggregations as find_aggregations
    from jaxdist._keras.listing import is_keras_object as is_keras_object
    from jaxdist._keras.listing import list_for_rules as list_for_rules
    from jaxdist._keras.listing import list_variables as list_variables
    from jaxdist._keras.models import give_back_after_errors as give_back_after_errors
    from jaxdist._keras.models import has_own as has_own
    from jaxdist._keras.models import is_call_on_batch as is_call_on_batch
    from jaxdist._keras.models import name_of as name_of
    from jaxdist._keras.patch import install as install
    from jaxdist._keras.place import count_rows as count_rows
    from jaxdist._keras.place import place_batch as place_batch
    from jaxdist._keras.rows import OnlyReplica as OnlyReplica
    from jaxdist._keras.rows import Rows as Rows
    from jaxdist._keras.rows import use_rows as use_rows
    from jaxdist._keras.shares import add_to_metrics as add_to_metrics
    from jaxdist._keras.shares import compute_loss as compute_loss
    from jaxdist._keras.source import change_keras as change_keras
    from jaxdist._keras.source import keras_module as keras_module
    from jaxdist._keras.step import Step as Step

_open_late(__name__)
