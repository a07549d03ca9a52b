"""The jobs of `jaxdist train` and `jaxdist plan`: configurations, tasks, runs and their files."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist.jobs._config.load import LoadedConfig as LoadedConfig
    from jaxdist.jobs._config.load import load_config as load_config
    from jaxdist.jobs._config.schema import BatchConfig as BatchConfig
    from jaxdist.jobs._config.schema import CheckpointConfig as CheckpointConfig
    from jaxdist.jobs._config.schema import JobConfig as JobConfig
    from jaxdist.jobs._config.schema import OptimizerConfig as OptimizerConfig
    from jaxdist.jobs._config.schema import OutputConfig as OutputConfig
    from jaxdist.jobs._config.schema import StrategyConfig as StrategyConfig
    from jaxdist.jobs._config.schema import TrainingConfig as TrainingConfig
    from jaxdist.jobs._config.schema import entry as entry
    from jaxdist.jobs._config.schema import section as section
    from jaxdist.jobs._names import TASK_NAMES as TASK_NAMES
    from jaxdist.jobs._names import versions as versions
    from jaxdist.jobs._partitions import PARTITIONS as PARTITIONS
    from jaxdist.jobs._plan import plan_job as plan_job
    from jaxdist.jobs._plan import sweep_job as sweep_job
    from jaxdist.jobs._run.finished import TrainingReport as TrainingReport
    from jaxdist.jobs._run.finished import finished_line as finished_line
    from jaxdist.jobs._run.finished import finished_run as finished_run
    from jaxdist.jobs._run.train import train as train
    from jaxdist.jobs._strategy import count_cpu_devices as count_cpu_devices
    from jaxdist.jobs._strategy import has_cluster as has_cluster
    from jaxdist.jobs._strategy import is_chief as is_chief
    from jaxdist.jobs._strategy import is_server_task as is_server_task
    from jaxdist.jobs._strategy import make_strategy as make_strategy
    from jaxdist.jobs._tables import Table as Table
    from jaxdist.jobs._task import Curve as Curve
    from jaxdist.jobs._task import Data as Data
    from jaxdist.jobs._task import Task as Task
    from jaxdist.jobs._task import split_rows as split_rows
    from jaxdist.jobs._tasks import TASKS as TASKS
    from jaxdist.jobs._tasks import kind_of as kind_of
    from jaxdist.jobs._tasks import load_job as load_job
    from jaxdist.jobs._tasks import load_job_config as load_job_config
    from jaxdist.jobs.digits import DigitsConfig as DigitsConfig

_open_late(__name__)
