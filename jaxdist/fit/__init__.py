"""`fit.Model`: a Flax NNX module with `compile`, `fit`, `evaluate` and `predict`."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist.fit._callbacks.averages import SwapEMAWeights as SwapEMAWeights
    from jaxdist.fit._callbacks.base import Callback as Callback
    from jaxdist.fit._callbacks.base import LambdaCallback as LambdaCallback
    from jaxdist.fit._callbacks.files import CSVLogger as CSVLogger
    from jaxdist.fit._callbacks.files import JSONLogger as JSONLogger
    from jaxdist.fit._callbacks.files import Profiler as Profiler
    from jaxdist.fit._callbacks.saving import ModelCheckpoint as ModelCheckpoint
    from jaxdist.fit._callbacks.stopping import EarlyStopping as EarlyStopping
    from jaxdist.fit._callbacks.stopping import LearningRateScheduler as LearningRateScheduler
    from jaxdist.fit._callbacks.stopping import ReduceLROnPlateau as ReduceLROnPlateau
    from jaxdist.fit._callbacks.tracking import TensorBoard as TensorBoard
    from jaxdist.fit._callbacks.tracking import Tracker as Tracker
    from jaxdist.fit._callbacks.tracking import TrackerLogger as TrackerLogger
    from jaxdist.fit._history import History as History
    from jaxdist.fit._history import Summary as Summary
    from jaxdist.fit._model import Model as Model
    from jaxdist.fit._step.class_metrics import Accuracy as Accuracy
    from jaxdist.fit._step.class_metrics import BinaryAccuracy as BinaryAccuracy
    from jaxdist.fit._step.class_metrics import Precision as Precision
    from jaxdist.fit._step.class_metrics import Recall as Recall
    from jaxdist.fit._step.class_metrics import TopKAccuracy as TopKAccuracy
    from jaxdist.fit._step.metrics import Mean as Mean
    from jaxdist.fit._step.metrics import Metric as Metric
    from jaxdist.fit._step.metrics import RootMeanSquaredError as RootMeanSquaredError

_open_late(__name__)
