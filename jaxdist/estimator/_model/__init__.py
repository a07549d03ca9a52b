"""The functions and classes of a model function, and the model that is built from it."""

from jaxdist.estimator._model.building import Built as Built
from jaxdist.estimator._model.building import build as build
from jaxdist.estimator._model.building import get_global_step as get_global_step
from jaxdist.estimator._model.building import get_module as get_module
from jaxdist.estimator._model.model_fn import ModelFn as ModelFn
from jaxdist.estimator._model.model_fn import make_model_fn as make_model_fn
from jaxdist.estimator._model.spec import EstimatorSpec as EstimatorSpec
from jaxdist.estimator._model.spec import ModeKeys as ModeKeys
from jaxdist.estimator._model.spec import as_pair as as_pair
from jaxdist.estimator._model.spec import check_spec as check_spec
from jaxdist.estimator._model.spec import count_rows as count_rows
