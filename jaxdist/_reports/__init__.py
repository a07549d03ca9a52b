"""Shows tables, pictures and numbers as text, and plans of steps for TPUs and GPUs."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._reports.colours import PALETTE as PALETTE
    from jaxdist._reports.colours import choose_colours as choose_colours
    from jaxdist._reports.grid import Grid as Grid
    from jaxdist._reports.grid_picture import CHIP_INCHES as CHIP_INCHES
    from jaxdist._reports.grid_picture import Joined as Joined
    from jaxdist._reports.grid_picture import Places as Places
    from jaxdist._reports.grid_picture import draw_plane as draw_plane
    from jaxdist._reports.grid_picture import list_patches as list_patches
    from jaxdist._reports.grid_picture import make_legend as make_legend
    from jaxdist._reports.lines import print_items as print_items
    from jaxdist._reports.lines import print_line as print_line
    from jaxdist._reports.notebook import LiveOutput as LiveOutput
    from jaxdist._reports.notebook import as_fixed_width as as_fixed_width
    from jaxdist._reports.notebook import can_redraw as can_redraw
    from jaxdist._reports.notebook import has_notebook as has_notebook
    from jaxdist._reports.notebook import is_in_cell as is_in_cell
    from jaxdist._reports.notebook import is_of_notebook as is_of_notebook
    from jaxdist._reports.notebook import make_console as make_console
    from jaxdist._reports.notebook import name_cells as name_cells
    from jaxdist._reports.parts import DividedWork as DividedWork
    from jaxdist._reports.parts import Expected as Expected
    from jaxdist._reports.parts import Memory as Memory
    from jaxdist._reports.parts import Times as Times
    from jaxdist._reports.parts import Traffic as Traffic
    from jaxdist._reports.parts import sum_bytes as sum_bytes
    from jaxdist._reports.picture import Picture as Picture
    from jaxdist._reports.picture import make_figure as make_figure
    from jaxdist._reports.picture import picture_path as picture_path
    from jaxdist._reports.plan import CAVEAT as CAVEAT
    from jaxdist._reports.plan import SlicePlan as SlicePlan
    from jaxdist._reports.sweep import Candidate as Candidate
    from jaxdist._reports.sweep import Sweep as Sweep
    from jaxdist._reports.tables import Block as Block
    from jaxdist._reports.tables import Report as Report
    from jaxdist._reports.tables import Table as Table
    from jaxdist._reports.tables import as_html as as_html
    from jaxdist._reports.tables import as_text as as_text
    from jaxdist._reports.tables import find_screen_width as find_screen_width
    from jaxdist._reports.tables import join_items as join_items
    from jaxdist._reports.terminal_bar import TerminalBar as TerminalBar
    from jaxdist._reports.words import plural as plural
    from jaxdist._reports.words import seconds as seconds
    from jaxdist._reports.words import share as share
    from jaxdist._reports.words import shorten_source as shorten_source
    from jaxdist._reports.words import size as size

_open_late(__name__)
