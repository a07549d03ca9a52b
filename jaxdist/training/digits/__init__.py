"""The digits task: a convolutional net on scikit-learn's handwritten digits."""

from jaxdist.training.digits._job import DigitsJob as DigitsJob
from jaxdist.training.digits._schema import DigitsConfig as DigitsConfig
from jaxdist.training.digits._strategy import mirrored_strategy as mirrored_strategy
from jaxdist.training.digits._task import DigitsTask as DigitsTask
