"""What a compiled program communicates, compared with what the step asked for."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._program.report.compiled_program import CompiledProgram as CompiledProgram
    from jaxdist._program.report.explanation import Explanation as Explanation
    from jaxdist._program.report.group_cost import find_spread as find_spread
    from jaxdist._program.report.group_cost import predict_seconds as predict_seconds
    from jaxdist._program.report.matching import CompiledRow as CompiledRow
    from jaxdist._program.report.program_text import describe_slots as describe_slots
    from jaxdist._program.report.program_text import text as text

_open_late(__name__)
