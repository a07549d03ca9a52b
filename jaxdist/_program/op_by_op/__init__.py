"""The executor of `run_eagerly`: one thread for each replica, one operation after the other."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._program.op_by_op.eagerly import EAGERLY as EAGERLY
    from jaxdist._program.op_by_op.eagerly import run_eagerly as run_eagerly
    from jaxdist._program.op_by_op.eagerly import steps_run_eagerly as steps_run_eagerly
    from jaxdist._program.op_by_op.executor import OpByOpStep as OpByOpStep
    from jaxdist._program.op_by_op.executor import Outcome as Outcome
    from jaxdist._program.op_by_op.invalid_numbers import has_kind as has_kind
    from jaxdist._program.op_by_op.invalid_numbers import kind_of as kind_of
    from jaxdist._program.op_by_op.invalid_numbers import not_found_error as not_found_error
    from jaxdist._program.op_by_op.invalid_numbers import remedy as remedy
    from jaxdist._program.op_by_op.rendezvous import move_to_one_axis as move_to_one_axis

_open_late(__name__)
