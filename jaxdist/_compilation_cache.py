"""`config.compilation_cache`, which sets the folder in which JAX keeps compiled programs."""

import os
import tempfile
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from jaxdist._called import called, refuse
from jaxdist._validate import as_path

_LEAST_SECONDS = "jax_persistent_cache_min_compile_time_secs"


@called("config.compilation_cache")
def compilation_cache(directory: str | os.PathLike[str] | None) -> None:
    """Keep compiled programs in a folder, where later processes find them.

    It sets JAX's own compilation cache (`jax_compilation_cache_dir`), for programs of jaxdist and
    of JAX. By default JAX leaves out programs that compile in less than a second; here every
    program is kept, unless `JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS` is set. A program is found
    again if its operations, shapes, devices, XLA's flags and the versions of JAX and XLA are the
    same. Steps are still traced. In a job of several processes, process 0 writes and all read, so
    use a folder that all processes see.

    Anyone who can write into the folder can run code in your process. On a CPU, programs are for
    machines with the same instructions: use another folder for another kind of machine.

    Cost:
        The time and the disk space to write each new program; nothing is deleted, unless
        `JAX_COMPILATION_CACHE_MAX_SIZE` limits the bytes.

    Args:
        directory: A local folder; it is created if it does not exist. None turns the cache off.
            For a bucket, which JAX itself can use, set `JAX_COMPILATION_CACHE_DIR` instead.

    Raises:
        ArgumentError: The folder cannot be created or written, or it has a scheme.
        ArgumentTypeError: `directory` is not a path.

    Source:
        https://docs.jax.dev/en/latest/persistent_compilation_cache.html

    Example:
        >>> import jaxdist, tempfile, os
        >>> folder = tempfile.mkdtemp()
        >>> jaxdist.config.compilation_cache(folder)
        >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.run(lambda x: x * 2, (3.0,))
        Array(6., dtype=float32, weak_type=True)
        >>> len(os.listdir(folder)) > 0
        True
        >>> jaxdist.config.compilation_cache(None)
    """
    if directory is None:
        path = None
    else:
        path = os.path.abspath(as_path("directory", directory, "cache"))
        _check_writable(path)
        if _LEAST_SECONDS.upper() not in os.environ:
            jax.config.update(_LEAST_SECONDS, 0.0)
    jax.config.update("jax_compilation_cache_dir", path)
    # Without this, JAX continues to use its previous folder.
    jax_cache.reset_cache()


def _check_writable(path: str) -> None:
    # JAX would only log a warning for each program, and compile it again.
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise refuse(
            f"directory={path!r}, which cannot be written: {error}.",
            "JAX writes each program that it compiles into a file of this folder.",
            "Pass a folder that you may write.",
        ) from error
