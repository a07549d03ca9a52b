"""Trace, analyse, compile, call."""

from jaxdist.program._options import RunOptions as RunOptions
from jaxdist.program._program import CompiledProgram as CompiledProgram
from jaxdist.program._program import Program as Program
from jaxdist.program._replication import TracedCollective as TracedCollective
from jaxdist.program._runner import Runner as Runner
