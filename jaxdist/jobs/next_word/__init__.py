"""The next_word task: a large table of embeddings, of which each step changes a few rows."""

from jaxdist.jobs.next_word._task import NextWordConfig as NextWordConfig
from jaxdist.jobs.next_word._task import NextWordTask as NextWordTask

TASK = NextWordTask
