"""Plans for described GPUs. They need JAX's CUDA plugin, and no GPU."""

import functools
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxdist
from jaxdist import PerReplica, _compat, cost, errors, hlo, jobs, nn, partition
from jaxdist._first_import import hide_driver_lines
from jaxdist._planning import make_target
from jaxdist._planning.needs import Needs, compile_or_get_refusal, read_needs
from jaxdist._planning.slice_axes import Target
from jaxdist._reports import sum_bytes
from jaxdist.jobs._plan import _make_source
from tools import raises
from tools.published import count_model_flops

CONFIGS = Path(__file__).parents[3] / "configs"
needs_plugin = pytest.mark.skipif(
    _compat.find_cuda_plugin() is None, reason="JAX's CUDA plugin is not installed: see cuda-plan"
)
_SMALL = ("model.layers=3", "model.width=128", "model.hidden=512", "data.sequence_length=64")
SHAPE: Any = jax.ShapeDtypeStruct
# configuration, topology, rules, logical devices
PLANS = {
    "data parallel": ("topics_lm_data_parallel", "a100:1x8", "replicated", 1),
    "fsdp": ("topics_lm_fsdp", "h100:4x8", "fsdp", 1),
    "tensor parallel": ("topics_lm_tensor_parallel_4x2", "h200:8x8", "tensor_parallel", 2),
    "fsdp in a domain": ("topics_lm_fsdp", "b200:4x8", "fsdp_in_slice", 1),
    "1,024 GPUs": ("topics_lm_data_parallel", "h100:128x8", "replicated", 1),
    "racks": ("topics_lm_data_parallel", "gb200:2x18x4", "replicated", 1),
}
_BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "f16": 2, "u8": 1, "s8": 1}
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_START = re.compile(
    r"= (?P<shape>.*?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?P<start>-start)?\("
)


@functools.cache
def _plan(name: str) -> tuple[Needs, str, Any, Target]:
    """Return the needs of a plan, the text of its program, its job, and its GPUs."""
    config, topology, rules, logical = PLANS[name]
    job = jobs.load_job(CONFIGS / f"{config}.toml", _SMALL)
    source = _make_source(job, rules)
    target = make_target(topology, logical, source.axes, source.communication)
    program = source.lower(target.strategy, source.rows)
    compiled = compile_or_get_refusal(program)
    assert not isinstance(compiled, str)
    return read_needs(program, target.device, compiled), compiled.as_text(), job, target


def _count_collectives(text: str) -> dict[str, tuple[int, int]]:
    """Count collectives and the bytes of their larger side, line by line, outside of loops."""
    found: dict[str, tuple[int, int]] = {}
    shapes = {
        m[1]: m[2] for m in re.finditer(r"^\s*(?:ROOT )?(%[\w.-]+) = (.*?) [\w-]+\(", text, re.M)
    }
    for line in text.splitlines():
        match = _START.search(line)
        if match is None:
            continue
        operands = re.findall(r"%[\w.-]+", line[match.end() :].split(")")[0])
        given = sum(_count_bytes(shapes[o]) for o in operands)
        result = _count_bytes(match["shape"])
        if match["start"] and match["shape"].startswith("(("):
            result -= given  # JAX 0.12 writes the operands beside the results
        if match["start"] and match["kind"] == "all-gather" and not match["shape"].startswith("(("):
            result -= given
        runs, total = found.get(match["kind"], (0, 0))
        found[match["kind"]] = (runs + 1, total + max(given, result))
    return found


def _count_bytes(shape: str) -> int:
    return sum(
        _BYTES[m[1]] * math.prod(int(n) for n in m[2].split(",") if n)
        for m in _ARRAY.finditer(re.sub(r"\{[^{}]*\}", "", shape))
    )


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_counts_what_the_formulas_and_the_text_say(name: str) -> None:
    needs, text, job, target = _plan(name)
    # The rows of one device. No causal block is skipped.
    flops = count_model_flops(
        job.config.model, job.rows_per_replica, job.config.data.sequence_length
    )
    assert needs.flops == pytest.approx(flops / target.places.num_logical, rel=0.01)
    assert hlo.unknown(text) == ()
    found = {}
    for row in needs.traffic:
        runs, total = found.get(row.kind, (0, 0))
        found[row.kind] = (runs + row.runs, total + row.num_bytes)
    assert found == _count_collectives(text)
    assert needs.times is not None
    assert needs.expected is not None
    assert needs.times.predicted >= needs.times.bound > 0
    assert needs.expected.seconds >= needs.times.bound
    assert needs.memory.fits
    assert needs.memory.limit == int(0.75 * target.chip.hbm_bytes)


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize("name", ["data parallel", "fsdp", "fsdp in a domain"])
def test_state_in_a_plan_is_that_of_the_arrays(name: str) -> None:
    needs, _, job, _ = _plan(name)
    model = job.config.model
    block = 4 * model.width**2 + 2 * model.width * model.hidden
    matrices = 4 * (model.layers * block + 2 * model.width * model.vocabulary)
    pieces = {"data parallel": 1, "fsdp": 32, "fsdp in a domain": 8}[name]
    # Vectors and positions are a few percent more.
    assert matrices / pieces <= needs.memory.parameters <= 1.2 * matrices / pieces
    # Two moments of Adam, and the number of the step.
    assert 0 <= needs.memory.optimizer - 2 * needs.memory.parameters <= 16


@needs_plugin
@pytest.mark.slow
def test_data_parallel_gradients_go_once_over_the_network_and_more_often_over_nvlink() -> None:
    needs, _, _, target = _plan("1,024 GPUs")
    gradients = needs.memory.parameters
    # Between hosts each of 8 GPUs sends its eighth.
    sent = sum_bytes(needs.traffic, "network", target.chip)
    assert sent == pytest.approx(2 * 127 / 128 * gradients / 8, rel=0.01)
    # Inside a host an all-reduce sends 2 * 7 / 8.
    sent = sum_bytes(needs.traffic, "NVLink", target.chip)
    assert sent == pytest.approx(2 * 7 / 8 * gradients, rel=0.01)
    inside, _, _, target = _plan("data parallel")
    assert sum_bytes(inside.traffic, "network", target.chip) == 0
    sent = sum_bytes(inside.traffic, "NVLink", target.chip)
    assert sent == pytest.approx(2 * 7 / 8 * gradients, rel=0.01)


@needs_plugin
def test_a_described_strategy_lowers_and_compiles_and_holds_nothing() -> None:
    strategy = jaxdist.MirroredStrategy("described:h100:2x2")
    x = PerReplica.of_global(SHAPE((8, 16), jnp.float32))

    def step(w: Any, x: Any) -> Any:
        return jaxdist.get_replica_context().all_reduce("sum", w * x.sum(0))

    program = strategy.lower(step, (SHAPE((16,), jnp.float32), x))
    [row] = program.explain().compiled
    assert (row.kind, row.group_size, row.level) == ("all-reduce", 4, "between")
    for call in (
        lambda: strategy.run(lambda: jnp.ones(2)),
        lambda: strategy.reduce("sum", PerReplica(np.arange(4.0)), axis=None),
    ):
        with pytest.raises(errors.DeviceError, match="'described:h100:2x2' is a description"):
            call()
    mesh = Mesh(strategy.mesh.devices.reshape(2, 2), ("data", "model"))
    own = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))
    assert own.layout.described == "described:h100:2x2"
    with pytest.raises(errors.DeviceError, match="is a description of 4 devices"):
        own.run(lambda: jnp.ones(2))
    assert strategy.mesh.devices.ravel().tolist() == (
        jaxdist.MirroredStrategy(["described:h100:2x2"]).mesh.devices.ravel().tolist()
    )


@needs_plugin
def test_cpu_tpu_and_gpu_programs_are_compiled_in_one_process() -> None:
    def step(x: Any) -> Any:
        return jaxdist.get_replica_context().all_reduce("sum", x)

    program = jaxdist.MirroredStrategy().lower(step, (PerReplica(np.ones((8, 4), "float32")),))
    for name, link in (("v5e:2x2", "ICI"), ("h100:1x4", "NVLink"), ("a100-40:2x2", "network")):
        plan = program.compile_for(name, quick=True)
        assert plan.traffic[0].link == link
        assert plan.memory.fits
    assert program.compile().collectives


def _lower_stages() -> Any:
    """A pipeline of 2 stages, whose layers are split over 2 devices of each stage."""
    devices = np.asarray(jax.devices("cpu")[:8], dtype=object).reshape(2, 2, 2)
    mesh = Mesh(devices, ("data", "stage", "model"))
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))
    layers = partition.Stage(partition.Split(1, axis="model"))
    rules = partition.Rules([("layers", layers)], otherwise=partition.Replicate())
    w = jnp.ones((4, 16, 16), jnp.float32)
    params = partition.place(strategy, {"layers": w}, rules)
    rows = PerReplica.of_global(jnp.ones((16, 16), jnp.float32))

    def step(params: Any, rows: Any) -> Any:
        def loss(params: Any) -> Any:
            parts = None, params["layers"], None
            return nn.pipeline_loss(
                lambda _, rows: rows,
                lambda w, x: jnp.tanh(x @ w),
                lambda _, x, rows: jnp.mean(x),
                parts,
                rows,
                micro_batches=4,
            )

        found = jax.value_and_grad(loss)(params)
        return jaxdist.get_replica_context().all_reduce("mean", found)

    return strategy.lower(step, (params, rows))


@needs_plugin
def test_stages_may_be_on_hosts_of_their_own() -> None:
    plan = _lower_stages().compile_for("h100:4x2", logical=4, quick=True)
    found = {(row.axes, row.kind, row.link, row.devices) for row in plan.traffic}
    assert (("stage",), "collective-permute", "network", 2) in found
    assert {link for axes, _, link, _ in found if axes == ("model",)} == {"NVLink"}
    assert plan.work[0].call == "nn.pipeline_loss"


@needs_plugin
def test_a_replica_has_a_part_of_a_domain_or_whole_domains() -> None:
    with pytest.raises(errors.TopologyError, match="Use one of 1, 2, 4, 8, 16, 32, 64, 128") as e:
        _lower_stages().compile_for("h100:16x8", logical=24, quick=True)
    assert "logical=24 for h100:16x8, which has 8 GPUs in an NVLink domain" in str(e.value)


@needs_plugin
def test_a_callback_is_named_with_its_line() -> None:
    def step(x: Any) -> Any:
        jax.debug.print("x = {}", x)
        return x

    program = jaxdist.OneDeviceStrategy("cpu:0").lower(step, (jnp.ones(2),))
    with pytest.raises(errors.DeviceError) as caught:
        program.compile_for("h100:1x1", quick=True)
    assert "it calls jax.debug" in str(caught.value)
    assert "test_plans.py:" in str(caught.value)


@needs_plugin
@pytest.mark.slow
def test_a_sort_of_many_keys_is_planned() -> None:
    program = jaxdist.OneDeviceStrategy("cpu:0").lower(jnp.sort, (SHAPE((100_000,), jnp.float32),))
    assert program.compile_for("h100:1x1", quick=True).memory.fits


@needs_plugin
def test_products_of_eight_bits_have_their_own_peak() -> None:
    def step(x: Any, y: Any) -> Any:
        return jax.lax.dot(x, y, preferred_element_type=jnp.float32)

    times = {}
    for dtype in (jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32):
        shape = SHAPE((512, 512), dtype)
        program = jaxdist.OneDeviceStrategy("cpu:0").lower(step, (shape, shape))
        plan = program.compile_for("h100:1x1", quick=True)
        assert plan.times is not None
        assert plan.flops is not None
        assert plan.flops == 2 * 512**3
        times[jnp.dtype(dtype).name] = plan.flops / plan.times.compute
    chip = cost.CHIPS["h100"]
    assert times["bfloat16"] == pytest.approx(chip.flops)
    assert times["float32"] == pytest.approx(chip.flops_of("f32"))
    # The compiler multiplies in 8 bits, or in 16 after a conversion.
    assert any(times["float8_e4m3fn"] == pytest.approx(n) for n in (chip.fp8_flops, chip.flops))


@needs_plugin
def test_a_step_that_does_not_fit_says_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.0003")  # 25 MB of a GPU

    def step(w: Any, x: Any) -> Any:
        return w + jaxdist.get_replica_context().all_reduce("sum", (x @ w).mean() * w)

    args = (SHAPE((2048, 2048), jnp.float32), PerReplica.of_global(SHAPE((64, 2048), jnp.float32)))
    program = jaxdist.MirroredStrategy().lower(step, args)
    plan = program.compile_for("h100:1x8", quick=True)
    assert not plan.memory.fits
    assert "It does not fit" in str(plan)
    assert any("Donating the state" in advice for advice in plan.advice)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "most")
    with pytest.raises(errors.ArgumentError, match="XLA_PYTHON_CLIENT_MEM_FRACTION is 'most'"):
        program.compile_for("h100:1x8", quick=True)


def test_lines_about_a_missing_driver_are_left_out_and_others_are_kept(
    capfd: pytest.CaptureFixture[str],
) -> None:
    lines = b"one\nI0000 x.cc:31] Could not find cuda drivers on your machine, GPU no\ntwo\n"
    with hide_driver_lines():
        os.write(2, lines)
    assert capfd.readouterr().err == "one\ntwo\n"


@needs_plugin
def test_a_command_writes_nothing_to_stderr() -> None:
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root}
    environment.pop(raises.VARIABLE, None)
    command = [sys.executable, "-m", "jaxdist", "chips"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert "gb200" in done.stdout


@pytest.mark.skipif(_compat.find_cuda_plugin() is not None, reason="JAX's CUDA plugin is installed")
def test_without_the_plugin_the_error_has_the_command() -> None:
    with pytest.raises(errors.MissingExtraError) as caught:
        jaxdist.MirroredStrategy("described:h100:1x8")
    assert "pip install" in str(caught.value)
    assert "nvidia-cuda-nvcc" in str(caught.value)


@needs_plugin
@pytest.mark.parametrize(
    ("logical", "said"), [(3, "Use one of 1, 2, 4, 8"), ("2x2", "are a number")]
)
def test_logical_devices_divide_an_nvlink_domain(logical: Any, said: str) -> None:
    program = jaxdist.OneDeviceStrategy("cpu:0").lower(lambda x: x + 1, (1.0,))
    with pytest.raises((errors.TopologyError, errors.ArgumentTypeError), match=said):
        program.compile_for("h100:4x8", logical=logical)
