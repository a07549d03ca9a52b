"""The GPUs of a host, as Slurm and CUDA show them."""

import shutil
import subprocess
from collections.abc import Mapping

from jaxdist.errors import ClusterError


def list_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    Cost:
        Without that variable, the command nvidia-smi, if there is one.

    Raises:
        ClusterError: nvidia-smi fails.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # CUDA reads them up to the first that is none, such as -1 or NoDevFiles.
        names = [name.strip() for name in visible.split(",")]
        return [name for name in names if name and name not in ("-1", "NoDevFiles", "none")]
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    shown = subprocess.run([command, "--list-gpus"], capture_output=True, text=True, check=False)
    if shown.returncode:
        said = " ".join((shown.stdout + shown.stderr).split())[:200]
        raise ClusterError(
            f"SlurmClusterResolver called nvidia-smi, which ended with code {shown.returncode}: "
            f"{said}\n\ngpus_per_node is counted by it where CUDA_VISIBLE_DEVICES is not set."
            "\n\nPass gpus_per_node, for instance gpus_per_node=0 on hosts without GPUs."
        )
    return [
        str(i)
        for i, line in enumerate(
            line for line in shown.stdout.splitlines() if line.startswith("GPU ")
        )
    ]
