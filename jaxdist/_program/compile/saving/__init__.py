"""Compiled programs in files."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._program.compile.saving.saved import Identity as Identity
    from jaxdist._program.compile.saving.saved import SavedProgram as SavedProgram
    from jaxdist._program.compile.saving.saved import check_path as check_path
    from jaxdist._program.compile.saving.saved import describe_saved as describe_saved
    from jaxdist._program.compile.saving.saved import read_saved as read_saved
    from jaxdist._program.compile.saving.saved import save_program as save_program

_open_late(__name__)
