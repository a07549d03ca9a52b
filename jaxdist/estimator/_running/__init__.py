"""Training, evaluation and prediction."""

from jaxdist.estimator._running.evaluate import run_evaluation as run_evaluation
from jaxdist.estimator._running.evaluate import run_prediction as run_prediction
from jaxdist.estimator._running.folder import CheckpointChoice as CheckpointChoice
from jaxdist.estimator._running.folder import ModelFolder as ModelFolder
from jaxdist.estimator._running.input import InputFn as InputFn
from jaxdist.estimator._running.input import make_input_fn as make_input_fn
from jaxdist.estimator._running.input import rename_input as rename_input
from jaxdist.estimator._running.input import split_batch as split_batch
from jaxdist.estimator._running.input import take_local as take_local
from jaxdist.estimator._running.progress import read_summaries as read_summaries
from jaxdist.estimator._running.progress import write_summary as write_summary
from jaxdist.estimator._running.train import Training as Training
from jaxdist.estimator._running.train import count_processes as count_processes
from jaxdist.estimator._running.train import run_training as run_training
