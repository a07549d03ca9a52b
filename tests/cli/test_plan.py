"""`jaxdist plan`: its output, its pictures, and its errors."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxdist import errors, jobs
from jaxdist._devices import chips
from jaxdist._reports import Sweep
from jaxdist.cli import main
from jaxdist.jobs import _plan

pytest.importorskip("libtpu")

DIGITS = "configs/digits_mirrored.toml"
SMALL = ["--set", "model.channels=[4]"]
TABLE = "configs/tabular_regression.toml"
TOPICS = "configs/topics_lm_data_parallel.toml"


def test_plan_prints_memory_work_collectives_bounds_and_draws(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "plan.png"
    arguments = ["plan", DIGITS, "--topology", "v5e:2x2", "--slices", "2", "--png", str(picture)]
    assert main([*arguments, *SMALL, "--set", "data.batch_size=64"]) == 0
    out = capsys.readouterr().out
    for words in (
        "v5e:2x2*2: 8 chips, 8 replicas x 1 logical device, replicated",
        "A batch has 64 rows: 8 for each replica",
        "It fits.",
        "DCN",
        "Scaling efficiency",
        "slice 1, z = 0",
        "nothing of this was measured",
        "Drawn: ",
    ):
        assert words in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_options_of_the_compiler_come_from_the_command_and_from_the_configuration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["plan", DIGITS, "--topology", "v5e:1x2", "--quick", *SMALL]
    own = ["--xla", "xla_tpu_scoped_vmem_limit_kib=20000"]
    section = ["--set", "compiler.xla_tpu_enable_latency_hiding_scheduler=false"]
    assert main([*command, *own, *section]) == 0
    shown = "xla_tpu_enable_latency_hiding_scheduler=false, xla_tpu_scoped_vmem_limit_kib=20000"
    assert f"Compiled with {shown}." in capsys.readouterr().out
    assert main(["plan", DIGITS, "--topology", "v5e:1x1", *SMALL, "--sweep", *own]) == 0
    assert "Compiled with xla_tpu_scoped_vmem_limit_kib=20000." in capsys.readouterr().out
    assert main([*command, "--xla", "xla_tpu_nothing=1"]) == 2
    assert "No such compile option: 'xla_tpu_nothing'" in capsys.readouterr().err
    assert main([*command, "--xla", "xla_tpu_nothing"]) == 2
    assert "--xla xla_tpu_nothing was given" in capsys.readouterr().err


def test_a_plan_saves_the_program_of_the_train_step(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "step.program"
    command = ["plan", DIGITS, "--topology", "v5e:1x2", "--quick", *SMALL]
    assert main([*command, "--save", str(path)]) == 0
    assert f"Saved to {path}" in capsys.readouterr().out
    first, header, _ = path.read_bytes().split(b"\n", 2)
    assert first.startswith(b"jaxdist program 1 ")
    assert header.startswith(b'{"name":"train_step"')
    assert main([*command, "--save", str(tmp_path / "none" / "step.program")]) == 2
    assert "--save is" in capsys.readouterr().err
    assert main([*command, "--sweep", "--save", str(path)]) == 2
    assert "A file has one program" in capsys.readouterr().err


def test_a_program_that_does_not_fit_is_not_saved(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "step.program"
    sizes = ["model.layers=2", "model.width=8192", "model.hidden=32768", "data.batch_size=8"]
    overrides = [word for entry in sizes for word in ("--set", entry)]
    command = ["plan", TOPICS, "--topology", "v5e:1x1", "--quick", *overrides]
    assert main([*command, "--save", str(path)]) == 1
    assert f"Not saved to {path}: the program does not fit." in capsys.readouterr().out
    assert not path.exists()


def test_parameters_and_work_of_the_digits_are_those_counted_by_hand() -> None:
    job = jobs.load_job(DIGITS, ["data.batch_size=64"])
    plan = jobs.plan_job(job, "v5e:2x2", quick=True)
    # 3x3 convolutions 1 to 16 and 16 to 32, then 128 to 64 and 64 to 10, all with biases.
    numbers = (9 * 16 + 16) + (9 * 16 * 32 + 32) + (128 * 64 + 64) + (64 * 10 + 10)
    assert plan.memory.parameters == 4 * numbers
    assert 2 * 4 * numbers < plan.memory.optimizer < 2 * 4 * numbers + 16  # and counts
    [traffic] = plan.traffic
    assert (traffic.kind, traffic.link, traffic.devices) == ("all-reduce", "ICI", 4)
    assert 4 * numbers <= traffic.num_bytes <= 4 * numbers + 64  # and the loss
    # Forward and twice that backward, less the padding and the gradient of the images.
    forward = 2 * 8 * (64 * 9 * 16 + 16 * 9 * 16 * 32 + 128 * 64 + 64 * 10)
    assert plan.flops is not None
    assert 2 * forward < plan.flops < 3 * forward


def test_a_table_is_planned_with_its_parameters_counted_by_hand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", TABLE, "--topology", "v5e:2x2", "--quick"]) == 0
    assert "4 chips, 4 replicas x 1 logical device, replicated" in capsys.readouterr().out
    plan = jobs.plan_job(jobs.load_job(TABLE), "v5e:2x2", quick=True)
    # 8 features and their flags to 64 units, and these to the prediction, both with biases.
    assert plan.memory.parameters == 4 * ((16 * 64 + 64) + (64 + 1))
    assert plan.global_rows == 4 * 8


def test_work_of_the_language_model_is_that_counted_by_hand() -> None:
    layers, width, hidden, length, rows, letters = 2, 32, 128, 64, 4, 256
    job = jobs.load_job(
        TOPICS,
        [
            f"model.layers={layers}",
            f"model.width={width}",
            f"model.hidden={hidden}",
            f"data.sequence_length={length}",
            f"data.batch_size={8 * rows}",
        ],
    )
    plan = jobs.plan_job(job, "v5e:2x2", quick=True)
    blocks = 4 * width**2 + 2 * width * hidden  # query, key, value, out; up, down
    attention = 2 * length * width  # scores, and values by scores
    products = layers * (blocks + attention) + width * letters
    # Two operations a product, and twice the forward in the backward.
    assert plan.flops == 3 * 2 * rows * length * products
    assert plan.efficiency is None


def test_sweep_ranks_the_rules_of_a_job_with_one_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", DIGITS, "--topology", "v5e:1x2", "--sweep", *SMALL]) == 0
    out, told = capsys.readouterr()
    assert "1 of 3, replicated, 2 x 1: compiling for v5e:1x2" in told
    assert "with 32 rows in a batch" in out
    assert "replicated" in out
    assert "sharded_update" in out
    assert "fsdp" in out
    assert out.index("\n  1  ") < out.index("\n  2  ") < out.index("\n  3  ")


SMALLEST = [
    "model.layers=1",
    "model.width=32",
    "model.hidden=64",
    "data.sequence_length=16",
    "strategy.whole_below=1024",
]


def test_a_sweep_tries_more_remat_as_long_as_it_is_faster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = jobs.load_job(TOPICS, SMALLEST)
    told: list[str] = []
    found = jobs.sweep_job(job, "v5e:1x2", logical=1, report=told.append)
    tried = {rules: [c.remat for c in found.candidates if c.rules == rules] for rules in job.rules}
    # All fit without remat, and the first that computes something again is not faster.
    assert tried["replicated"] == ["none", "products"]
    assert tried["fsdp"] == ["none", "parameters"]
    for rules in ("replicated", "fsdp"):
        none, more = (c for c in found.candidates if c.rules == rules)
        assert none.seconds is not None
        assert more.seconds is not None
        assert none.seconds <= more.seconds
    assert found.best is not None
    assert found.ranked[0].remat == "none"
    assert "remat" in str(found)
    assert any("remat products, replicated, 2 x 1: compiling" in line for line in told)


def test_a_sweep_goes_on_to_the_remat_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _plan.plan
    fits = {"none": False, "products": False, "layers": True}

    def plan_and_refuse(source: Any, *args: Any, **kwargs: Any) -> Any:
        found = made(source, *args, **kwargs)
        memory = dataclasses.replace(found.memory, fits=fits[order.pop(0)])
        return dataclasses.replace(found, memory=memory)

    order = list(fits)
    monkeypatch.setattr(_plan, "plan", plan_and_refuse)
    job = jobs.load_job(TOPICS, SMALLEST)
    candidates = list(_plan._plan_layout(job, "v5e:1x1", "replicated", 1, 4, lambda _: None))
    assert [c.remat for c in candidates] == ["none", "products", "layers"]
    assert [c.seconds is not None for c in candidates] == [False, False, True]
    text = str(Sweep("topics_lm", "v5e:1x1", 4, tuple(candidates)))
    assert text.count("does not fit into") == 2


def test_two_slices_have_pieces_within_a_slice(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [word for entry in SMALLEST for word in ("--set", entry)]
    arguments = ["plan", TOPICS, "--topology", "v5e:2x2", "--slices", "2", "--quick", *overrides]
    assert main([*arguments, "--rules", "fsdp_in_slice"]) == 0
    out = capsys.readouterr().out
    assert "8 chips, 8 replicas x 1 logical device, fsdp_in_slice" in out
    # Over the network between slices go pieces of a quarter.
    assert "4 x 2" in next(line for line in out.splitlines() if "DCN   all-reduce" in line)


def test_a_sweep_compares_pieces_within_a_slice_where_there_are_several() -> None:
    job = jobs.load_job(TOPICS)
    one, two = (
        {rules for rules, *_ in _plan._list_layouts(job, name, None)}
        for name in ("v5e:2x4", "v5e:2x4*2")
    )
    assert two - one == {"fsdp_in_slice", "fsdp_in_slice_tensor_parallel"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--topology", "v5e:3x2"], "nearest slices"),
        (["--topology", "v5e:64x64"], "largest slice of v5e has 256 chips"),
        (["--topology", "v5e:2x2", "--slices", "512"], "takes 511 slices at most"),
        (["--topology", "v5p:9998x1"], "v5p:16x16x24*2, or fewer chips"),
        (["--topology", "v5e:2x2x2"], "v5e:2x4 for as many chips, or v5e:2x2*2 for"),
        (["--topology", "v5e:2x2*2", "--slices", "2"], "Leave one of the two out"),
        (["--topology", "v5e:2x2", "--slices", "0"], "from 1 up"),
        (["--topology", "h100:2x8", "--slices", "2"], "GPUs have no slices"),
        (["--topology", "v5e:2x2", "--logical", "3x1"], "divides the slice"),
        (
            ["--topology", "v5e:2x2", "--rules", "zero"],
            "rules is one of replicated, sharded_update",
        ),
        (["--topology", "v5e:2x2", "--rules", "replicated", "--sweep"], "tries all rules"),
        (["--topology", "v5e:2x2", "--global-batch", "6"], "Use 4 or 8"),
        (["--topology", "v5e:2x2", "--png", "nowhere/at/all.png"], "does not exist"),
        (["--topology", "v5e:2x2", "--png", "plan.abc"], "Use 'plan.png'."),
        (["--topology", "v5e:2x2", "--png", "plan"], "Use 'plan.png'."),
        (["--topology", "v5e:2x2", "--png", "docs"], "Name a file in it: 'docs/plan.png'"),
    ],
)
def test_what_cannot_be_planned_is_an_error_in_words(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", DIGITS, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_without_libtpu_the_command_that_installs_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chips, "_libtpu_version", lambda: None)
    assert main(["plan", DIGITS, "--topology", "v6e:2x4*3"]) == 2
    assert "pip install libtpu" in capsys.readouterr().err


def test_a_libtpu_that_is_too_old_is_told_with_its_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def old(name: str, num_slices: int, wrap: object) -> list[object]:
        raise chips.NotDescribedError("Invalid TPU external name", "0.0.1")

    monkeypatch.setattr(chips, "describe_slice", old)
    assert main(["plan", DIGITS, "--topology", "tpu7x:2x2x3"]) == 2
    told = capsys.readouterr().err
    assert "libtpu 0.0.1 does not describe 'tpu7x:2x2x3'" in told
    assert "pip install -U libtpu" in told


PLAN = """
import resource, sys
from jaxdist.cli import main
code = main(["plan", sys.argv[1], "--topology", "v5p:16x16x24", "--png", sys.argv[2]])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
sys.exit(code)
"""


@pytest.mark.slow
def test_a_plan_for_6144_chips_is_whole_and_takes_less_than_4_gib(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PLAN, DIGITS, str(picture)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "6,144 chips, 6,144 replicas" in done.stdout
    assert "all-reduce" in done.stdout
    assert picture.stat().st_size > 10_000
    kibibytes = int(done.stdout.split("peak")[-1])
    assert kibibytes < 4 << 20


INTERRUPTED = """
import signal, sys, threading
from jaxdist.cli import main
from jaxdist import Program

first = threading.Lock()

def compile_for_ever(program):
    if first.acquire(blocking=False):
        signal.raise_signal(signal.SIGINT)
    threading.Event().wait()

Program.compile = compile_for_ever
sys.exit(main(["plan", sys.argv[1], "--topology", "v5e:2x2"]))
"""


def test_ctrl_c_does_not_wait_for_the_compiler_and_each_stage_is_told() -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, DIGITS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 130, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("jaxdist plan: ")]
    assert told[-1] == "jaxdist plan: stopped by Ctrl-C"
    assert "compiling for v5e:2x2, and for one device" in told[-2]


def test_errors_of_plan_are_ours() -> None:
    with pytest.raises(errors.ArgumentError, match="rules is one of"):
        jobs.plan_job(jobs.load_job(DIGITS), "v5e:2x2", rules="other")
