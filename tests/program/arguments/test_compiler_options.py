"""Compiler options of a step: who compiles with them, and which are refused."""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import PerReplica, RunOptions
from jaxdist._program.arguments import compiler_options
from jaxdist.errors import ArgumentError, ArgumentTypeError, ContextError

# A known effect on the compiled text: a fusion is left out.
NO_FUSION = {"xla_disable_hlo_passes": "fusion,fusion-wrapper"}
_SHARDY = "jax_use_shardy_partitioner"
FAST = {"xla_cpu_enable_fast_math": True}


def _step(x: Any) -> Any:
    total = jaxdist.get_replica_context().all_reduce("sum", jnp.sin(x) * 2 + 1)
    return total


def _rows(replicas: int = 2) -> PerReplica:
    return PerReplica(list(np.arange(replicas * 3, dtype=np.float32).reshape(replicas, 3)))


def _expected(replicas: int = 2) -> Any:
    rows = np.arange(replicas * 3, dtype=np.float32).reshape(replicas, 3)
    return (np.sin(rows) * 2 + 1).sum(0)


def _two() -> Any:
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.mark.parametrize(
    "given",
    [FAST, tuple(FAST.items()), [*FAST.items()], {"xla_cpu_enable_fast_math": np.bool_(True)}],
    ids=["mapping", "pairs", "list", "numpy"],
)
def test_all_spellings_of_one_option_are_one_program_that_gives_the_numbers(given: Any) -> None:
    strategy = _two()
    for options in (FAST, given, given):
        result = strategy.run(_step, (_rows(),), options=RunOptions(compiler_options=options))
        np.testing.assert_allclose(result, _expected(), rtol=1e-6)
    assert len(strategy._runner.compilations) == 1


def test_other_options_are_another_program_and_the_compiler_has_them() -> None:
    strategy = _two()
    texts = []
    for given in ({}, NO_FUSION):
        options = RunOptions(compiler_options=given)
        np.testing.assert_allclose(
            strategy.run(_step, (_rows(),), options=options), _expected(), rtol=1e-6
        )
        texts.append(strategy.lower(_step, (_rows(),), options=options).compile().as_text())
    assert len(strategy._runner.compilations) == 2
    # Which operations are fused depends on the version of XLA.
    assert len({text.count(" fusion(") for text in texts}) == 2


def test_a_function_with_several_options_is_no_function_that_is_made_again(
    recwarn: pytest.WarningsRecorder,
) -> None:
    strategy = _two()
    for width in (0, 128, 256, 512):
        options = RunOptions(compiler_options={"xla_cpu_prefer_vector_width": width})
        strategy.run(_step, (_rows(),), options=options)
    assert not recwarn.list


def test_the_cache_of_compiled_programs_tells_options_apart(tmp_path: Path) -> None:
    jaxdist.config.compilation_cache(tmp_path)
    counts = []
    for given in ({}, FAST, {}, FAST):
        _two().lower(_step, (_rows(),), options=RunOptions(compiler_options=given)).compile()
        counts.append(sum("step" in path.name for path in tmp_path.glob("*-cache")))
    assert counts == [1, 2, 2, 2]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"xla_no_such_option": 1}, "No such compile option: 'xla_no_such_option'"),
        ({"xla_cpu_prefer_vector_width": "wide"}, "'wide' is not a valid int32 value"),
        ({"fdo_profile": "x"}, "another type than the option"),
    ],
    ids=["name", "value", "type"],
)
@pytest.mark.parametrize("how", ["run", "compile", "function"])
def test_an_option_that_the_compiler_refuses_is_named(
    given: dict[str, Any], words: str, how: str
) -> None:
    strategy, options = _two(), RunOptions(compiler_options=given)
    calls = {
        "run": lambda: strategy.run(_step, (_rows(),), options=options),
        "compile": lambda: strategy.lower(_step, (_rows(),), options=options).compile(),
        "function": lambda: jaxdist.function(lambda x: strategy.run(_step, (x,), options=options))(
            _rows()
        ),
    }
    with pytest.raises(ArgumentError) as error:
        calls[how]()
    assert words in str(error.value)
    assert next(iter(given)) in str(error.value)


def test_an_error_of_the_step_stays_what_it_is_beside_options() -> None:
    def fail(x: Any) -> Any:
        raise TypeError("mine")

    strategy, options = _two(), RunOptions(compiler_options=FAST)
    with pytest.raises(TypeError, match="mine"):
        strategy.run(fail, (_rows(),), options=options)
    outer = jaxdist.function(lambda x: strategy.run(fail, (x,), options=options))
    with pytest.raises(TypeError, match="mine"):
        outer(_rows())


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        (5, ArgumentTypeError, "compiler_options=5"),
        ("xla_a=1", ArgumentTypeError, "compiler_options='xla_a=1'"),
        (("a", "b"), ArgumentTypeError, "compiler_options=('a', 'b')"),
        ({"xla_a": [1]}, ArgumentTypeError, "xla_a = [1]"),
        ({"xla_a": None}, ArgumentTypeError, "xla_a = None"),
        ({3: 1}, ArgumentTypeError, "the name 3"),
        ({"xla_a": b"x"}, ArgumentTypeError, "xla_a = b'x'"),
        ({"xla_a": 1 << 70}, ArgumentTypeError, "xla_a = "),
        ({"--xla_a": 1}, ArgumentError, "Pass 'xla_a'"),
        ({"": 1}, ArgumentError, "the name ''"),
        ((("xla_a", 1), ("xla_a", 2)), ArgumentError, "xla_a twice"),
    ],
    ids=repr,
)
def test_what_is_no_option_is_refused_before_anything_is_traced(
    given: Any, kind: type[Exception], words: str
) -> None:
    traced = []
    with pytest.raises(kind) as error:
        _two().run(traced.append, (1.0,), options=RunOptions(compiler_options=given))
    assert words in str(error.value)
    assert not traced


def test_a_function_around_steps_is_compiled_with_their_options() -> None:
    strategy = _two()

    @jaxdist.function
    def both(x: Any) -> Any:
        first = strategy.run(_step, (x,), options=RunOptions(compiler_options=NO_FUSION))
        return first, strategy.run(_step, (x,))

    for result in both(_rows()):
        np.testing.assert_allclose(result, _expected(), rtol=1e-6)
    [compiled] = both._known.values()
    assert compiled.options == NO_FUSION


def test_two_steps_of_a_function_with_two_values_of_an_option_are_an_error() -> None:
    strategy = _two()

    @jaxdist.function
    def both(x: Any) -> Any:
        off = RunOptions(compiler_options={"xla_cpu_enable_fast_math": False})
        first = strategy.run(_step, (x,), options=RunOptions(compiler_options=FAST))
        return first, strategy.run(_step, (x,), options=off)

    with pytest.raises(ContextError) as error:
        both(_rows())
    for words in ("fast_math=false", "another step", "fast_math=true"):
        assert words in str(error.value)


def test_equal_bits_refuse_an_option_that_would_lose_them_and_warn_of_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_options, "_LOGGED", set())
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"], deterministic=True)
    needed = strategy.lower(_step, (_rows(strategy.num_replicas_in_sync),)).compiler_options
    [(name, value)] = needed.items()
    # XLA tells the names of passes apart by case.
    upper = RunOptions(compiler_options={name: value.upper()})
    with pytest.raises(ArgumentError, match="deterministic=True"):
        strategy.run(_step, (_rows(strategy.num_replicas_in_sync),), options=upper)
    passes = RunOptions(compiler_options={"xla_disable_hlo_passes": "dce"})
    rows = _rows(strategy.num_replicas_in_sync)
    outer = jaxdist.function(lambda x: strategy.run(_step, (x,), options=passes))
    for call in (lambda: strategy.run(_step, (rows,), options=passes), lambda: outer(rows)):
        with pytest.raises(ArgumentError) as error:
            call()
        assert "With deterministic=True" in str(error.value)
        assert "Leave xla_disable_hlo_passes out" in str(error.value)
    with caplog.at_level(logging.WARNING, "jaxdist"):
        for _ in range(2):
            strategy.run(_step, (rows,), options=RunOptions(compiler_options=FAST))
    [record] = caplog.records
    assert (
        "deterministic=True with compiler_options xla_cpu_enable_fast_math=true" in record.message
    )


def test_other_disabled_passes_leave_the_partitioner_of_jax(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    lower = jax.stages.Lowered.compile

    def compile_and_note(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(getattr(jax.config, _SHARDY))
        return lower(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_and_note)
    _two().run(_step, (_rows(),), options=RunOptions(compiler_options=NO_FUSION))
    assert seen == [getattr(jax.config, _SHARDY)]


def test_reports_show_the_options() -> None:
    program = _two().lower(_step, (_rows(),), options=RunOptions(compiler_options=FAST))
    shown = "xla_cpu_enable_fast_math=true"
    assert shown in repr(program)
    assert f"compiled with {shown}" in str(program.explain())
    assert program.compiler_options == FAST
    plain = _two().lower(_step, (_rows(),))
    assert "compiler options" not in repr(plain)
    assert "compiled with" not in str(plain.explain())


def test_plans_of_slices_are_compiled_with_the_options_and_say_so() -> None:
    pytest.importorskip("libtpu")
    args = (jnp.ones((256, 256)), PerReplica(list(jnp.ones((2, 8, 256)))))

    def plan(**given: Any) -> Any:
        options = RunOptions(compiler_options=given)
        program = _two().lower(lambda w, x: x @ w, args, options=options)
        return program.compile_for("v5e:1x2", quick=True)

    assert (
        "Compiled with xla_tpu_scoped_vmem_limit_kib=20000."
        in plan(xla_tpu_scoped_vmem_limit_kib=20000).notes
    )
    assert not any("Compiled with" in note for note in plan().notes)
    with pytest.raises(ArgumentError, match="No such compile option: 'xla_tpu_nothing'"):
        plan(xla_tpu_nothing=1)
