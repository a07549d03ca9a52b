"""Training loops, checkpoints, evaluation and the main job, for those who want them."""

from jaxdist.training._checkpoints import Checkpoints as Checkpoints
from jaxdist.training._checkpoints import Restored as Restored
from jaxdist.training._config import LoadedConfig as LoadedConfig
from jaxdist.training._config import load_config as load_config
from jaxdist.training._evaluate import evaluate as evaluate
from jaxdist.training._evaluate import weighted_sums as weighted_sums
from jaxdist.training._extras import EXTRAS as EXTRAS
from jaxdist.training._extras import require_extra as require_extra
from jaxdist.training._job import Job as Job
from jaxdist.training._job import JobStep as JobStep
from jaxdist.training._loop import Every as Every
from jaxdist.training._loop import LoopEnd as LoopEnd
from jaxdist.training._loop import run_loop as run_loop
from jaxdist.training._metrics import versions as versions
from jaxdist.training._steps import accumulate_gradients as accumulate_gradients
from jaxdist.training._steps import multi_step as multi_step
from jaxdist.training._tasks import TASKS as TASKS
from jaxdist.training._tasks import kind_of as kind_of
from jaxdist.training._tasks import load_job as load_job
from jaxdist.training._tasks import load_job_config as load_job_config
from jaxdist.training._tasks import make_strategy as make_strategy
from jaxdist.training._train import TrainingReport as TrainingReport
from jaxdist.training._train import train as train
from jaxdist.training.digits import DigitsConfig as DigitsConfig
from jaxdist.training.digits import DigitsJob as DigitsJob
from jaxdist.training.digits import mirrored_strategy as mirrored_strategy
