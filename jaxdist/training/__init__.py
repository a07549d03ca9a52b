"""Optional tools: a loop, checkpoints, weights, evaluation, and functions that combine steps."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._checkpoints import Checkpoints as Checkpoints
    from jaxdist._checkpoints import Restored as Restored
    from jaxdist._update import moving_average as moving_average
    from jaxdist._update import use_average as use_average
    from jaxdist._validate import EXTRAS as EXTRAS
    from jaxdist._validate import require_extra as require_extra
    from jaxdist._weights import Weight as Weight
    from jaxdist._weights import export_weights as export_weights
    from jaxdist._weights import load_weights as load_weights
    from jaxdist.training._evaluate import WEIGHT as WEIGHT
    from jaxdist.training._evaluate import Every as Every
    from jaxdist.training._evaluate import LoopEnd as LoopEnd
    from jaxdist.training._evaluate import evaluate as evaluate
    from jaxdist.training._evaluate import run_loop as run_loop
    from jaxdist.training._evaluate import weighted_sums as weighted_sums
    from jaxdist.training._reduce_and_update import reduce_and_update as reduce_and_update
    from jaxdist.training._steps import accumulate_gradients as accumulate_gradients
    from jaxdist.training._steps import multi_step as multi_step

_open_late(__name__)
