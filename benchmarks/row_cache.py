"""The first step of a second process compiles nothing, with a compilation cache.

Claim: with `config.compilation_cache(folder)`, a second process finds every program of its first
step, also the small ones. The first step of `fit` is timed without a cache, with an empty one and
with a full one, each in a process of its own; reading data, tracing and the step are in all three.
"""

import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import jax
import optax

import jaxdist
from benchmarks._bench import Bench
from benchmarks._lines import CountLine, Line, NoteLine
from benchmarks._process import ROOT
from benchmarks.row_fit import LOSS, MODELS, make_examples

ROW = "cache"
_EVENTS = "/jax/compilation_cache/"


def first_step(model: str, folder: str) -> dict[str, float]:
    """The seconds of the first step of this process, and how many programs it found and wrote."""
    counts: collections.Counter[str] = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
    if folder:
        jaxdist.config.compilation_cache(folder)
    jaxdist.testing.virtual_devices(8)
    kind = MODELS[model]
    with jaxdist.MirroredStrategy().scope():
        trained = jaxdist.fit.Model(kind())
        trained.compile(optax.sgd(0.01), LOSS)
    x, y = make_examples(kind, 1)
    # What making the model has compiled is no part of the step.
    before = collections.Counter(counts)
    began = time.perf_counter()
    trained.fit(x, y, kind.batch, verbose=0)
    seconds = time.perf_counter() - began
    step = counts - before
    return {
        "seconds": seconds,
        "asked": step[_EVENTS + "compile_requests_use_cache"],
        "found": step[_EVENTS + "cache_hits"],
    }


def _measure(model: str, folder: str) -> dict[str, float]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX")}
    command = [sys.executable, "-m", "benchmarks.row_cache", model, folder]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**kept, "JAX_PLATFORMS": "cpu"},
    )
    return json.loads(done.stdout.splitlines()[-1])


def run(bench: Bench) -> Iterator[Line]:
    """Measure each model."""
    for model in ("Dense",) if bench.options.is_smoke else tuple(MODELS):
        bench.options.report(f"row {ROW}: {model}")
        with tempfile.TemporaryDirectory() as folder:
            without, empty, full = (_measure(model, f) for f in ("", folder, folder))
        asked = f"{full['asked']} of {full['asked']} programs"
        found = f"{full['found']} of {full['asked']} programs" if empty["asked"] else "no cache"
        yield CountLine(ROW, f"{model} N=8", "second process", "", found, asked)
        yield NoteLine(
            ROW,
            f"first step of {model}: {without['seconds']:.2f} s without a cache, "
            f"{empty['seconds']:.2f} s with an empty one, {full['seconds']:.2f} s with a full one",
        )


if __name__ == "__main__":
    print(json.dumps(first_step(*sys.argv[1:])))
