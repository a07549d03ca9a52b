"""A partition and a task that `jaxdist train` and `jaxdist plan` know."""

from tools.additions.addition import Addition

PARTITION = Addition(
    "a partition",
    {
        "jobs/_rows_first.py": '''"""The partition `rows_first`."""

from jaxdist.partition import Rules, fsdp


def rows_first(least: int) -> Rules:
    """Return rules that shard parameters of `least` bytes or more."""
    return fsdp(min_bytes=least)
'''
    },
    {
        "jobs/_partitions.py": (
            (
                "from jaxdist import partition\n",
                "from jaxdist.jobs._rows_first import rows_first\n",
            ),
            (
                '        "fsdp_tensor_parallel": Partition(\n',
                '        "rows_first": Partition(rows_first, is_sharded=True),\n',
            ),
        )
    },
    """
import json
from pathlib import Path
from jaxdist import jobs
from jaxdist.cli import main
Path("run.toml").write_text('[strategy]\\npartition = "rows_first"\\nwhole_below = 0\\n')
sets = [
    "training.steps=2", "optimizer.warmup_steps=0", "output.picture=",
    "checkpoint.directory=saved", "output.directory=written",
]
assert main(["train", "run.toml", *(w for s in sets for w in ("--set", s))]) == 0
assert len(json.loads(Path("written/metrics.json").read_text())["losses"]) == 2
job = jobs.load_job("run.toml")
assert job.rules[0] == "rows_first"
strategy = jobs.make_strategy(job.config)
found = job.lower(strategy, 4, "rows_first").compile().explain()
assert "all-gather" in str(found), found
""",
    "partition must be",
)

TASK = Addition(
    "a task",
    {
        "jobs/line/__init__.py": '''"""The line task: a line through points."""

from jaxdist.jobs.line._task import LineTask as LineTask

TASK = LineTask
''',
        "jobs/line/_model.py": '''"""A line, and its steps."""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from jaxdist.jobs import entry
from jaxdist.training import reduce_and_update, weighted_sums


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Whether the line has a bias."""

    bias: bool = entry(True, change="never")


def squared_errors(line, batch):
    """Return the squared error of each row `[b]`."""
    return (line(batch["x"]) - batch["y"])[:, 0] ** 2


def train_step(line, optimizer, batch):
    """Update the line in place, and return the mean loss."""
    total, grads = nnx.value_and_grad(lambda n: jnp.sum(squared_errors(n, batch)))(line)
    count, total = reduce_and_update(line, optimizer, grads, batch["x"].shape[0], total)
    return total / count


def evaluation_step(line, batch, mask):
    """Return the sums over the rows of all replicas."""
    return weighted_sums({"loss": squared_errors(line, batch)}, mask)
''',
        "jobs/line/_task.py": '''"""The line as a task."""

import dataclasses
from typing import Literal

import jax
import numpy as np
from flax import nnx

from jaxdist.jobs import Curve, Data, JobConfig, Task, section, split_rows
from jaxdist.jobs.line._model import ModelConfig, evaluation_step, train_step


@dataclasses.dataclass(frozen=True)
class LineConfig(JobConfig):
    """The sections of `line.toml`."""

    task: Literal["line"] = "line"
    model: ModelConfig = section(ModelConfig)


class LineTask(Task[LineConfig]):
    """A line through 100 points."""

    config_type = LineConfig
    title = "line"
    examples = "points"
    unit = "points"
    curve = Curve("loss", "held-out loss")
    in_words = "held-out loss {loss:.3f}"
    headline = "loss {loss:.3f}"
    train_step = staticmethod(train_step)
    evaluation_step = staticmethod(evaluation_step)

    def make_model(self, rngs):
        return nnx.Linear(1, 1, use_bias=self.config.model.bias, rngs=rngs)

    def batch(self, rows):
        shape = jax.ShapeDtypeStruct((rows, 1), "float32")
        return {"x": shape, "y": shape}

    def load(self):
        x = np.linspace(-1, 1, 100, dtype=np.float32)[:, None]
        asked = self.config.data
        parts = split_rows({"x": x, "y": 3 * x + 1}, asked.test_fraction, asked.seed)
        return Data(*parts, {"seed": asked.seed, "test_fraction": asked.test_fraction})

    def measures(self, means):
        return {"loss": means["loss"]}
''',
        "../configs/line.toml": """task = "line"

[data]
batch_size = 16

[optimizer]
learning_rate = 0.1

[training]
steps = 60
""",
    },
    {},
    """
import json
from pathlib import Path
from jaxdist import jobs
from jaxdist.cli import main
sets = ["output.picture=", "checkpoint.directory=saved", "output.directory=written"]
assert main(["train", "configs/line.toml", *(w for s in sets for w in ("--set", s))]) == 0
losses = json.loads(Path("written/metrics.json").read_text())["losses"]
assert losses[-1] < 0.2 < losses[0], losses
job = jobs.load_job("configs/line.toml", ["model.bias=false"])
job.lower(jobs.make_strategy(job.config), 2, "replicated").compile()
""",
    "configs/line.toml'",
)
