"""What a contributor touches to add a strategy, an all-reduce, a partition, a task, a primitive,
an optimizer update, a field of a server's request, a cluster environment, a kind of value, a
schedule of pipelines or a kind of attention.

Each `Addition` is a small one that works: the files below `jaxdist/` that are new, those that are
edited, and a program that uses the result. `tests/test_additions.py` applies them to a copy of the
package and runs the programs. `make size` prints how many files each one touches.
"""

from tools.additions.addition import Addition as Addition
from tools.additions.axes import ATTENTION, SCHEDULE
from tools.additions.cluster import ENVIRONMENT, FIELD
from tools.additions.engine import ALL_REDUCE, PRIMITIVE, STRATEGY, UPDATE
from tools.additions.jobs import PARTITION, TASK
from tools.additions.values import KIND

ADDITIONS = (
    STRATEGY,
    ALL_REDUCE,
    PARTITION,
    TASK,
    PRIMITIVE,
    UPDATE,
    FIELD,
    ENVIRONMENT,
    KIND,
    SCHEDULE,
    ATTENTION,
)
