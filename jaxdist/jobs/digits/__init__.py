"""The digits task: a convolutional net on scikit-learn's handwritten digits."""

from jaxdist.jobs.digits._job import DigitsJob as DigitsJob
from jaxdist.jobs.digits._schema import DigitsConfig as DigitsConfig
from jaxdist.jobs.digits._strategy import mirrored_strategy as mirrored_strategy
from jaxdist.jobs.digits._task import DigitsTask as DigitsTask
