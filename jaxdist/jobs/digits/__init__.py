"""The digits task: a convolutional net on scikit-learn's handwritten digits."""

from jaxdist.jobs.digits._model import ModelConfig as ModelConfig
from jaxdist.jobs.digits._task import DigitsConfig as DigitsConfig
from jaxdist.jobs.digits._task import DigitsTask as DigitsTask

TASK = DigitsTask
