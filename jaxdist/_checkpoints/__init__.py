"""Checkpoints on disk: each is complete or absent, and a damaged one is reported by name."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._checkpoints.checkpoints import Checkpoints as Checkpoints
    from jaxdist._checkpoints.errors import make_step_error as make_step_error
    from jaxdist._checkpoints.files import read_dict as read_dict
    from jaxdist._checkpoints.files import replace_file as replace_file
    from jaxdist._checkpoints.folder_lock import JobLock as JobLock
    from jaxdist._checkpoints.group import agree_on_result as agree_on_result
    from jaxdist._checkpoints.group import find_group as find_group
    from jaxdist._checkpoints.interrupts import Interrupts as Interrupts
    from jaxdist._checkpoints.leaves import find_plain_leaves as find_plain_leaves
    from jaxdist._checkpoints.leaves import put_into as put_into
    from jaxdist._checkpoints.leaves import to_plain as to_plain
    from jaxdist._checkpoints.opening import delete_step as delete_step
    from jaxdist._checkpoints.opening import find_damage as find_damage
    from jaxdist._checkpoints.opening import find_folder as find_folder
    from jaxdist._checkpoints.opening import list_steps as list_steps
    from jaxdist._checkpoints.opening import lock_folder as lock_folder
    from jaxdist._checkpoints.parts import read_saved_notes as read_saved_notes
    from jaxdist._checkpoints.restore import Restored as Restored
    from jaxdist._checkpoints.survivors import keep_states as keep_states
    from jaxdist._checkpoints.survivors import save_after as save_after

_open_late(__name__)
