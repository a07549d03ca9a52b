"""Documented names under `tf.distribute.experimental`."""

from jaxdist._not_there import explain_missing as _explain_missing
from jaxdist._collectives import CollectiveAllReduce as CollectiveAllReduce
from jaxdist._collectives import CollectiveHints as CollectiveHints
from jaxdist._collectives import CommunicationImplementation as CommunicationImplementation
from jaxdist._collectives import CommunicationOptions as CommunicationOptions
from jaxdist.data import ValueContext as ValueContext
from jaxdist._strategies import TPUStrategy as TPUStrategy

# Its older name.
CollectiveCommunication = CommunicationImplementation

_explain_missing(__name__)
