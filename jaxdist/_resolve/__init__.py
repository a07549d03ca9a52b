"""Shows for `jaxdist resolve` which task this process would be, and what looks wrong.

It starts nothing: JAX accesses no device, and only `probe` connects to another process.
"""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._resolve.findings import Finding as Finding
    from jaxdist._resolve.findings import Network as Network
    from jaxdist._resolve.report import Report as Report
    from jaxdist._resolve.report import choose_source as choose_source
    from jaxdist._resolve.report import make_report as make_report
    from jaxdist._resolve.report import make_resolver as make_resolver

_open_late(__name__)
