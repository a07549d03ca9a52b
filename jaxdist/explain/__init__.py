"""Plans of steps for slices of TPUs: values, tables and pictures."""

from jaxdist.explain._assignment import Picture as Picture
from jaxdist.explain._assignment import picture_path as picture_path
from jaxdist.explain._parts import Memory as Memory
from jaxdist.explain._parts import Times as Times
from jaxdist.explain._parts import Traffic as Traffic
from jaxdist.explain._plan import CAVEAT as CAVEAT
from jaxdist.explain._plan import SlicePlan as SlicePlan
from jaxdist.explain._sweep import Candidate as Candidate
from jaxdist.explain._sweep import Sweep as Sweep
from jaxdist.explain._tables import Report as Report
from jaxdist.explain._tables import Table as Table
from jaxdist.explain._tables import as_html as as_html
from jaxdist.explain._tables import as_rich as as_rich
from jaxdist.explain._tables import as_text as as_text
from jaxdist.explain._words import seconds as seconds
from jaxdist.explain._words import size as size
