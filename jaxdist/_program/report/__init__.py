"""Reports what a compiled program communicates, compared with what the step requested."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._program.report.compiled_program import CompiledProgram as CompiledProgram
    from jaxdist._program.report.compiled_program import describe_slots as describe_slots
    from jaxdist._program.report.compiled_program import text as text
    from jaxdist._program.report.explanation import Explanation as Explanation
    from jaxdist._program.report.explanation import list_divided_work as list_divided_work
    from jaxdist._program.report.group_cost import find_spread as find_spread
    from jaxdist._program.report.group_cost import predict_seconds as predict_seconds
    from jaxdist._program.report.matching import CompiledRow as CompiledRow

_open_late(__name__)
