"""Reads compiled programs from HLO text."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist.hlo._collectives import CompiledCollective as CompiledCollective
    from jaxdist.hlo._collectives import collectives as collectives
    from jaxdist.hlo._groups import decoded as decoded
    from jaxdist.hlo._known import EXCHANGES as EXCHANGES
    from jaxdist.hlo._known import KINDS as KINDS
    from jaxdist.hlo._known import categories as categories
    from jaxdist.hlo._known import unknown as unknown
    from jaxdist.hlo._repeated import RepeatedGather as RepeatedGather
    from jaxdist.hlo._repeated import repeated_gathers as repeated_gathers
    from jaxdist.hlo._schedule import Schedule as Schedule
    from jaxdist.hlo._schedule import schedule as schedule
    from jaxdist.hlo._text import num_participants as num_participants
    from jaxdist.hlo._work import Work as Work
    from jaxdist.hlo._work import work as work

_open_late(__name__)
