"""`train_and_evaluate`, and the part of each task of a job in it."""

from jaxdist.estimator._tasks.early_stopping import (
    make_early_stopping_hook as make_early_stopping_hook,
)
from jaxdist.estimator._tasks.early_stopping import read_eval_metrics as read_eval_metrics
from jaxdist.estimator._tasks.early_stopping import (
    stop_if_higher_hook as stop_if_higher_hook,
)
from jaxdist.estimator._tasks.early_stopping import (
    stop_if_lower_hook as stop_if_lower_hook,
)
from jaxdist.estimator._tasks.early_stopping import (
    stop_if_no_decrease_hook as stop_if_no_decrease_hook,
)
from jaxdist.estimator._tasks.early_stopping import (
    stop_if_no_increase_hook as stop_if_no_increase_hook,
)
from jaxdist.estimator._tasks.train_and_evaluate import train_and_evaluate as train_and_evaluate
