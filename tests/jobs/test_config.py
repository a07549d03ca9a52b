"""Configuration files and overrides: accepted values, and the error for each mistake."""

import dataclasses
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.errors import ConfigError
from jaxdist.jobs import DigitsConfig, load_config, load_job_config
from jaxdist.jobs._config.schema import CompilerConfig
from jaxdist.jobs._config.sources import find_lines

ROOT = Path(__file__).parents[2]


def _file(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


def _problem(folder: Path, text: str, *overrides: str) -> str:
    path = _file(folder, text)
    with pytest.raises(ConfigError) as caught:
        load_config(DigitsConfig, path, overrides)
    return str(caught.value)


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load_config(DigitsConfig, _file(tmp_path, "")).values == DigitsConfig()


def test_the_shipped_file_names_every_entry_of_the_schema() -> None:
    path = ROOT / "configs" / "digits_mirrored.toml"
    document = tomllib.loads(path.read_text())
    schema = dataclasses.asdict(DigitsConfig())
    # The keys of this section are those of the compiler.
    assert document.pop("compiler") == {}
    assert schema.pop("compiler") == {"options": ()}
    assert {s: set(body) for s, body in document.items()} == {
        s: set(body) for s, body in schema.items()
    }
    assert load_job_config(path) == load_config(DigitsConfig, path)


def test_a_task_decides_the_sections_and_an_unknown_one_is_named_with_its_line(
    tmp_path: Path,
) -> None:
    assert load_job_config(_file(tmp_path, "")).values == DigitsConfig()
    with pytest.raises(ConfigError, match=r"job\.toml, line 2: there is no task 'digit'(.|\n)*Did"):
        load_job_config(_file(tmp_path, "\ntask = 'digit'\n"))
    with pytest.raises(ConfigError, match=r"line 1: there is no task 3"):
        load_job_config(_file(tmp_path, "task = 3\n"))
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_job_config(_file(tmp_path, "task = \n"))
    assert "task must be 'digits', and 'x' (string)" in _problem(tmp_path, "task = 'x'\n")
    assert "task is an entry before the sections" in _problem(tmp_path, "[task]\na = 1\n")


def test_values_take_their_types_from_the_schema(tmp_path: Path) -> None:
    text = """
[strategy]
devices = ["cpu:0", "cpu:1"]
[model]
channels = [4, 8]
[optimizer]
learning_rate = 1
schedule = "constant"
[output]
picture = ""
"""
    values = load_config(DigitsConfig, _file(tmp_path, text)).values
    assert values.strategy.devices == ("cpu:0", "cpu:1")
    assert values.model.channels == (4, 8)
    assert values.optimizer.learning_rate == 1.0
    assert isinstance(values.optimizer.learning_rate, float)
    assert values.output.picture == ""


def test_the_section_of_the_compiler_takes_any_option_and_overrides_win(tmp_path: Path) -> None:
    text = "[compiler]\nxla_b = 2\nxla_a = true\n"
    loaded = load_config(DigitsConfig, _file(tmp_path, text), ["compiler.xla_b=3"])
    assert loaded.values.compiler.options == (("xla_a", True), ("xla_b", 3))
    assert loaded.origin("compiler.xla_a").endswith("line 3")
    assert loaded.origin("compiler.xla_b") == "--set compiler.xla_b=3"
    assert loaded.values == dataclasses.replace(
        DigitsConfig(), compiler=CompilerConfig((("xla_b", 3), ("xla_a", True)))
    )
    assert "line 2: [compiler] was given" in _problem(tmp_path, "[compiler]\nxla_b = [2]\n")
    assert "line 1: [compiler] was given" in _problem(tmp_path, "[compiler]\nxla.b = 2\n")
    assert "'--xla_b'" in _problem(tmp_path, '[compiler]\n"--xla_b" = 2\n')


def test_overrides_win_over_the_file_and_the_last_one_over_all(tmp_path: Path) -> None:
    path = _file(tmp_path, "[training]\nsteps = 5\n")
    overrides = [
        "training.steps=6",
        "training.steps = 7",
        "output.directory=runs/here",
        'strategy.devices=["cpu:1"]',
        "training.donate=true",
        "checkpoint.directory=2024",
    ]
    loaded = load_config(DigitsConfig, path, overrides)
    assert loaded.values.training.steps == 7
    assert loaded.values.output.directory == "runs/here"
    assert loaded.values.strategy.devices == ("cpu:1",)
    assert loaded.values.training.donate is True
    assert loaded.values.checkpoint.directory == "2024"
    assert loaded.origin("training.steps") == "--set training.steps = 7"


def test_origins_name_file_and_line_and_defaults(tmp_path: Path) -> None:
    path = _file(tmp_path, "# job\n[data]\n\nbatch_size = 64\n")
    loaded = load_config(DigitsConfig, path)
    assert loaded.origin("data.batch_size") == f"{path}, line 4"
    assert loaded.origin("data.seed") == "data.seed (default)"


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_valid_one(tmp_path: Path) -> None:
    message = _problem(tmp_path, "[data]\nseed = 1\nbatchsize = 64\n")
    assert f"{tmp_path / 'job.toml'}, line 3: unknown key 'batchsize' in [data]" in message
    assert "batch_size, test_fraction, seed" in message
    assert "Did you mean 'batch_size'?" in message


def test_a_key_in_the_wrong_section_is_sent_to_the_right_one(tmp_path: Path) -> None:
    message = _problem(tmp_path, "[data]\nlearning_rate = 0.1\n")
    assert "line 2: unknown key 'learning_rate' in [data]" in message
    assert "Did you mean 'optimizer.learning_rate'?" in message


def test_an_unknown_section_is_named_with_the_nearest_valid_one(tmp_path: Path) -> None:
    message = _problem(tmp_path, "[trainin]\nsteps = 3\n")
    assert "unknown section [trainin]" in message
    assert "Did you mean 'training.steps'?" in message


def test_a_key_outside_a_section_is_sent_to_its_section(tmp_path: Path) -> None:
    message = _problem(tmp_path, "\nsteps = 3\n")
    assert "line 2: unknown section 'steps' outside a section" in message
    assert "Did you mean 'training.steps'?" in message


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("data.batch_size='64'", "data.batch_size must be an integer, and '64' (string)"),
        ("data.batch_size=64.0", "must be an integer, and 64.0 (float)"),
        ("training.seed=true", "must be an integer, and true (boolean)"),
        ("training.donate=1", "must be true or false, and 1 (integer)"),
        ("optimizer.learning_rate=fast", "must be a number, and 'fast' (string)"),
        ("optimizer.schedule=cosin", "must be 'cosine' or 'constant', and 'cosin' (string)"),
        ("model.channels=16", "must be a list of integers, and 16 (integer)"),
        ("model.channels=[16, 2.5]", "must be a list of integers, and [16, 2.5] (list)"),
        ("strategy.devices=cpu", "must be 'auto' or a list of strings, and 'cpu' (string)"),
        ("output.directory=[]", "must be a string, and [] (list)"),
        ("optimizer.learning_rate=1979-05-27", "must be a number, and datetime.date"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_the_option(
    tmp_path: Path, entry: str, words: str
) -> None:
    message = _problem(tmp_path, "", entry)
    assert f"--set {entry}: " in message
    assert words in message


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("data.batch_size=-8", "data.batch_size must lie between 1 and 2147483647, and -8"),
        ("training.steps=0", "training.steps must lie between 1 and"),
        ("data.test_fraction=1.0", "must lie between 0 and 1, exclusive, and 1.0"),
        ("data.test_fraction=0", "must lie between 0 and 1, exclusive, and 0"),
        ("optimizer.learning_rate=0", "must be more than 0"),
        ("optimizer.learning_rate=nan", "must be finite, and nan"),
        ("optimizer.learning_rate=inf", "must be finite, and inf"),
        ("optimizer.weight_decay=-0.1", "must be at least 0"),
        ("model.channels=[]", "model.channels must not be empty"),
        ("model.channels=[8, 8, 8, 8]", "has a length that must lie between 1 and 3"),
        ("model.channels=[8, 0]", "model.channels must lie between 1 and 4096, and [8, 0]"),
        ("checkpoint.directory=''", "checkpoint.directory must not be empty"),
        ("strategy.devices=[]", "strategy.devices must not be empty"),
        ("checkpoint.keep=0", "checkpoint.keep must lie between 1"),
    ],
)
def test_a_value_out_of_range_is_named_with_the_range(
    tmp_path: Path, entry: str, words: str
) -> None:
    message = _problem(tmp_path, "", entry)
    assert f"--set {entry}: " in message
    assert words in message


def test_a_wrong_value_in_the_file_is_named_with_its_line(tmp_path: Path) -> None:
    message = _problem(tmp_path, '[training]\nsteps = 10\nseed = "x"\n')
    assert "job.toml, line 3: training.seed must be an integer" in message


def test_all_problems_are_listed_at_once_and_nothing_is_started(tmp_path: Path) -> None:
    message = _problem(tmp_path, "[data]\nbatchsize = 1\n[x]\ny = 1\n", "training.steps=0")
    assert "(3 problems)" in message
    assert "line 2" in message
    assert "line 4" in message
    assert "--set training.steps=0" in message
    assert message.endswith("Nothing was started.")


@pytest.mark.parametrize("text", ["steps", "training.steps", "=3", "training=3", "training.=3"])
def test_an_override_that_is_none_says_how_one_is_written(tmp_path: Path, text: str) -> None:
    assert f"--set {text}: an override is written section.key=value" in _problem(tmp_path, "", text)


def test_an_override_cannot_smuggle_in_a_second_entry(tmp_path: Path) -> None:
    message = _problem(tmp_path, "", "training.steps=3\nother = 4")
    assert "training.steps must be an integer" in message


def test_text_that_is_no_toml_is_named_with_its_line(tmp_path: Path) -> None:
    message = _problem(tmp_path, "[data]\nseed = = 3\n")
    assert "job.toml is not valid TOML" in message
    assert "line 2" in message


def test_a_file_that_is_missing_a_directory_or_no_text_is_named(tmp_path: Path) -> None:
    _file(tmp_path, "")
    with pytest.raises(ConfigError, match=r"does not exist(.|\n)*job\.toml"):
        load_config(DigitsConfig, tmp_path / "jib.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(DigitsConfig, tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.toml' cannot be read"):
        load_config(DigitsConfig, tmp_path / "binary.toml")


def test_a_section_given_as_a_value_is_an_error(tmp_path: Path) -> None:
    assert "line 1: [data] is a section, and 3 was given" in _problem(tmp_path, "data = 3\n")
    assert "[data] is a section" in _problem(tmp_path, "[[data]]\nseed = 1\n")


def test_lines_are_found_under_comments_dotted_keys_and_multi_line_strings() -> None:
    text = '# [data]\na.b = 1\n[ data ] # here\nx = """\nseed = 1\n"""\n"seed" = 2\n'
    assert find_lines(text) == {
        ("a", "b"): 2,
        ("data",): 3,
        ("data", "x"): 4,
        ("data", "seed"): 7,
    }


_NAMES = st.text("abcdefgh_", min_size=1, max_size=6)


@given(st.dictionaries(_NAMES, st.dictionaries(_NAMES, st.integers()), min_size=1))
def test_every_entry_of_a_document_is_found_on_its_line(
    document: dict[str, dict[str, int]],
) -> None:
    lines, expected = [], {}
    for section, body in document.items():
        lines += ["", f"[{section}]"]
        expected[(section,)] = len(lines)
        for key, value in body.items():
            lines.append(f"{key} = {value}")
            expected[(section, key)] = len(lines)
    assert find_lines("\n".join(lines)) == expected
