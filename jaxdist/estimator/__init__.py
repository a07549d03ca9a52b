"""`Estimator` and `train_and_evaluate`: a model in a folder, trained by one process or by many."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist.estimator import experimental as experimental
    from jaxdist.estimator._estimator import Estimator as Estimator
    from jaxdist.estimator._export import Exported as Exported
    from jaxdist.estimator._export import load_export as load_export
    from jaxdist.estimator._exporters import BestExporter as BestExporter
    from jaxdist.estimator._exporters import Exporter as Exporter
    from jaxdist.estimator._exporters import FinalExporter as FinalExporter
    from jaxdist.estimator._exporters import LatestExporter as LatestExporter
    from jaxdist.estimator._hooks import CheckpointSaverListener as CheckpointSaverListener
    from jaxdist.estimator._hooks import SessionRunContext as SessionRunContext
    from jaxdist.estimator._hooks import SessionRunHook as SessionRunHook
    from jaxdist.estimator._hooks import SessionRunValues as SessionRunValues
    from jaxdist.estimator._model.building import get_global_step as get_global_step
    from jaxdist.estimator._model.building import get_module as get_module
    from jaxdist.estimator._model.spec import EstimatorSpec as EstimatorSpec
    from jaxdist.estimator._model.spec import ModeKeys as ModeKeys
    from jaxdist.estimator._own_task import TaskType as TaskType
    from jaxdist.estimator._run_config import DistributeConfig as DistributeConfig
    from jaxdist.estimator._run_config import RunConfig as RunConfig
    from jaxdist.estimator._running.folder import WarmStartSettings as WarmStartSettings
    from jaxdist.estimator._specs import EvalSpec as EvalSpec
    from jaxdist.estimator._specs import TrainSpec as TrainSpec
    from jaxdist.estimator._train_and_evaluate import train_and_evaluate as train_and_evaluate

_open_late(__name__)
