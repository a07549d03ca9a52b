"""Compiles MaxText's training step as its own `train_compile` does, and keeps the compiled text.

`python -m tools.maxtext.compile_step FOLDER key=value ...` writes `step.hlo` and `memory.json` into
the folder. It runs in a process of its own, because MaxText changes settings of JAX.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main(folder: str, settings: list[str]) -> None:
    """Compile the step of a configuration of MaxText."""
    import jax
    from maxtext.trainers.pre_train import train_compile  # pyrefly: ignore[missing-import]

    out = Path(folder)

    def compile_and_keep(
        fn: Any,
        args: Any,
        kwargs: Any,
        mesh: Any,
        in_shardings: Any,
        out_shardings: Any,
        static_argnums: Any,
        donate_argnums: Any,
        config: Any,
        rules: Any,
    ) -> Any:
        with jax.set_mesh(mesh), rules:
            jitted = jax.jit(
                fn,
                in_shardings=in_shardings,
                out_shardings=out_shardings,
                static_argnums=static_argnums,
                donate_argnums=donate_argnums,
            )
            lowered = jitted.lower(*args, **kwargs)
        flags = train_compile.max_utils.parse_libtpu_flags_to_dict(config.compile_xla_flags)
        compiled = lowered.compile(compiler_options=flags)
        used: Any = compiled.memory_analysis()
        found = {
            "arguments": used.argument_size_in_bytes,
            "temporaries": used.temp_size_in_bytes,
            "peak": used.peak_memory_in_bytes,
        }
        (out / "step.hlo").write_text(str(compiled.as_text()))
        (out / "memory.json").write_text(json.dumps(found))
        return compiled

    train_compile.jit_and_compile = compile_and_keep
    train_compile.main(["train_compile", *settings])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
