"""Checkpoints of several processes: written together, or by one survivor alone."""

from jaxdist._checkpoints.processes.group import Group as Group
from jaxdist._checkpoints.processes.group import agree_on_result as agree_on_result
from jaxdist._checkpoints.processes.group import check_same_steps as check_same_steps
from jaxdist._checkpoints.processes.group import find_group as find_group
from jaxdist._checkpoints.processes.joint_save import JointSave as JointSave
from jaxdist._checkpoints.processes.survivors import Survivor as Survivor
from jaxdist._checkpoints.processes.survivors import add_survivor as add_survivor
from jaxdist._checkpoints.processes.survivors import keep_states as keep_states
from jaxdist._checkpoints.processes.survivors import remove_survivor as remove_survivor
from jaxdist._checkpoints.processes.survivors import save_after as save_after
