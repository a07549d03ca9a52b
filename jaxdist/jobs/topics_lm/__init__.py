"""The topics_lm task: a byte-level language model of the text behind Python's `help()`."""

from jaxdist.jobs.topics_lm._generate import generate as generate
from jaxdist.jobs.topics_lm._generate import next_bytes as next_bytes
from jaxdist.jobs.topics_lm._model import Transformer as Transformer
from jaxdist.jobs.topics_lm._model import byte_losses as byte_losses
from jaxdist.jobs.topics_lm._model import evaluation_step as evaluation_step
from jaxdist.jobs.topics_lm._model import train_step as train_step
from jaxdist.jobs.topics_lm._schema import DataConfig as DataConfig
from jaxdist.jobs.topics_lm._schema import ModelConfig as ModelConfig
from jaxdist.jobs.topics_lm._schema import TopicsConfig as TopicsConfig
from jaxdist.jobs.topics_lm._task import TopicsTask as TopicsTask

TASK = TopicsTask
