"""What must hold between entries of the main job, checked before anything is started."""

from pathlib import Path

from jaxdist.errors import ConfigError
from jaxdist.training._config import LoadedConfig
from jaxdist.training._extras import require_extra
from jaxdist.training._schema import DigitsConfig


def check_job(loaded: LoadedConfig[DigitsConfig], *, num_replicas: int, num_images: int) -> None:
    """Refuse entries that do not go together, and make the output directory.

    Raises:
        ConfigError: The batch does not fit the replicas or the data; warm-up outlasts training;
            the output directory cannot be made.
        MissingExtraError: A picture is wanted and matplotlib is missing.
    """
    if loaded.values.output.picture:
        require_extra("matplotlib", "draw the learning curve (output.picture)")
    _check_batch_size(loaded, num_replicas, num_images)
    _check_warmup(loaded)
    _make_directory(loaded)


def _check_batch_size(loaded: LoadedConfig[DigitsConfig], replicas: int, rows: int) -> None:
    size, where = loaded.values.data.batch_size, loaded.origin("data.batch_size")
    if size > rows:
        raise ConfigError(
            f"{where}: data.batch_size is {size}, and there are {rows} images to train on.\n\n"
            f"Set data.batch_size to {max(replicas, rows - rows % replicas)} or less."
        )
    if size % replicas:
        low, high = size - size % replicas, size + -size % replicas
        values = [v for v in (low, high) if 0 < v <= rows]
        raise ConfigError(
            f"{where}: data.batch_size is {size}, and {replicas} replicas cannot share it "
            f"equally: {size} is not a multiple of {replicas}.\n\n"
            f"Set data.batch_size to {' or '.join(map(str, values)) or 'a multiple'}."
        )


def _check_warmup(loaded: LoadedConfig[DigitsConfig]) -> None:
    warmup, steps = loaded.values.optimizer.warmup_steps, loaded.values.training.steps
    if warmup > steps:
        raise ConfigError(
            f"{loaded.origin('optimizer.warmup_steps')}: optimizer.warmup_steps is {warmup}, and "
            f"training.steps is {steps}, so the learning rate would never get there.\n\n"
            f"Set optimizer.warmup_steps to {steps // 10} or training.steps above {warmup}."
        )


def _make_directory(loaded: LoadedConfig[DigitsConfig]) -> None:
    folder = loaded.values.output.directory
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{loaded.origin('output.directory')}: output.directory {folder!r} cannot be made: "
            f"{error}.\n\nGive a directory that you may write to."
        ) from error
