"""Names of dataset functions: they are sent by name, and not as programs."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxdist._called import refuse
from jaxdist._validate import format_lines, show
from jaxdist.errors import NotFoundError

_MAIN = "__main__"


def describe_script() -> str:
    """Return the name of the script, or of the module, that this process runs."""
    main = sys.modules[_MAIN]
    spec = getattr(main, "__spec__", None)
    return spec.name if spec is not None else os.path.basename(getattr(main, "__file__", ""))


def list_names(function: Any) -> list[str]:
    """Return the names by which other processes find a function, as `module:qualname`.

    Args:
        function: The function.

    Raises:
        ArgumentError: It has no such name: it is a lambda, a function inside of another one, or no
            function at all.
    """
    module = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", None)
    names = []
    if isinstance(module, str) and isinstance(qualname, str):
        names += [f"{module}:{qualname}"] if _find(module, qualname) is function else []
    # A script that imports the function knows it by a name of its own.
    main = vars(sys.modules[_MAIN])
    names += [f"{_MAIN}:{name}" for name, value in main.items() if value is function]
    if names:
        return list(dict.fromkeys(names))
    raise refuse(
        f"{show(function)}.",
        "The workers are other processes. They call a dataset function by its name, so it is "
        "defined by `def` at the top of a module or of the script: no lambda, no function inside "
        "of another one, no method, no partial, no dataset.",
        "Write def dataset_fn(): ... at the top of the script, above the line that starts "
        "jaxdist.Server, and pass dataset_fn.",
    )


def check_modules(modules: Sequence[str]) -> None:
    """Check that the modules of dataset functions exist; only packages around them are imported.

    Raises:
        ArgumentError: One does not exist, or its package cannot be imported.
    """
    for name in modules:
        reason = _find_fault(name)
        if reason is not None:
            raise refuse(
                f"the module {name!r}, and {reason}.",
                "A worker imports the modules whose dataset functions it may call.",
                "Check the name; it is written as in `import`: my_package.my_data. Install the "
                "package, or set PYTHONPATH to the folder that has it, where the worker starts.",
            )


def _find_fault(module: str) -> str | None:
    """Return why a module cannot be imported; None if it can."""
    if module in sys.modules:
        return None
    try:
        # This imports the packages that contain it.
        found = importlib.util.find_spec(module)
    except ImportError as error:
        return f"this process cannot import it: {error}"
    except ValueError:
        found = None
    return None if found is not None else "this process has no such module"


def find_function(
    names: Sequence[str], script: str, modules: Sequence[str], worker: int
) -> Callable[[], Any]:
    """Return the function that a coordinator names.

    Args:
        names: Its names.
        script: The script of the coordinator.
        modules: The modules whose functions it may call.
        worker: The number of this worker, for errors.

    Raises:
        NotFoundError: This process has no such function, or may not call it.
    """
    reasons = []
    for name in names:
        module, _, qualname = name.partition(":")
        if module == _MAIN and describe_script() != script:
            reasons.append(
                f"{name}: the coordinator runs {script!r}, and this worker {describe_script()!r}"
            )
        elif module != _MAIN and module not in modules:
            reasons.append(f"{name}: the worker was started without --module {module}")
        else:
            if module != _MAIN:
                importlib.import_module(module)
            found = _find(module, qualname)
            if callable(found):
                return found
            where = "above the line that starts jaxdist.Server" if module == _MAIN else "there"
            reasons.append(f"{name}: it is not defined {where}")
    raise NotFoundError(
        f"Worker {worker} was asked for a dataset function that it does not have:\n"
        f"{format_lines(reasons)}\n\n"
        "A worker calls functions of the script that it runs itself, and of the modules that it "
        "was started with.\n\n"
        "Define the function in the script above the line that starts jaxdist.Server; or start "
        "workers with `jaxdist server --module my_data`, or jaxdist.Server(..., "
        "modules=['my_data'])."
    )


def _find(module: str, qualname: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found
