"""Early stopping, as in `tf.estimator.experimental`."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist.estimator._early_stopping import (
        make_early_stopping_hook as make_early_stopping_hook,
    )
    from jaxdist.estimator._early_stopping import read_eval_metrics as read_eval_metrics
    from jaxdist.estimator._early_stopping import stop_if_higher_hook as stop_if_higher_hook
    from jaxdist.estimator._early_stopping import stop_if_lower_hook as stop_if_lower_hook
    from jaxdist.estimator._early_stopping import (
        stop_if_no_decrease_hook as stop_if_no_decrease_hook,
    )
    from jaxdist.estimator._early_stopping import (
        stop_if_no_increase_hook as stop_if_no_increase_hook,
    )

_open_late(__name__)
