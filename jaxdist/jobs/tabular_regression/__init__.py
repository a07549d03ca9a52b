"""The tabular_regression task: a target from a table of numbers with missing values."""

from jaxdist.jobs.tabular_regression._task import TableConfig as TableConfig
from jaxdist.jobs.tabular_regression._task import TableTask as TableTask

TASK = TableTask
