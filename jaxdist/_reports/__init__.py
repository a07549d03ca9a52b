"""What is shown: tables, pictures and numbers as text; plans of steps for TPUs and GPUs."""

from jaxdist._reports.parts import Expected as Expected
from jaxdist._reports.parts import Memory as Memory
from jaxdist._reports.parts import Times as Times
from jaxdist._reports.parts import Traffic as Traffic
from jaxdist._reports.parts import sum_bytes as sum_bytes
from jaxdist._reports.picture import Picture as Picture
from jaxdist._reports.picture import make_figure as make_figure
from jaxdist._reports.picture import picture_path as picture_path
from jaxdist._reports.places import Places as Places
from jaxdist._reports.plan import CAVEAT as CAVEAT
from jaxdist._reports.plan import SlicePlan as SlicePlan
from jaxdist._reports.sweep import Candidate as Candidate
from jaxdist._reports.sweep import Sweep as Sweep
from jaxdist._reports.tables import Report as Report
from jaxdist._reports.tables import Table as Table
from jaxdist._reports.tables import as_html as as_html
from jaxdist._reports.tables import as_text as as_text
from jaxdist._reports.tables import find_screen_width as find_screen_width
from jaxdist._reports.tables import join_items as join_items
from jaxdist._reports.words import plural as plural
from jaxdist._reports.words import seconds as seconds
from jaxdist._reports.words import share as share
from jaxdist._reports.words import size as size
