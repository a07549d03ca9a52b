"""The task of the page on tasks, as files of a user: `sine.py` and `sine.toml`."""

from pathlib import Path

from tests.test_documentation import ROOT, read_blocks


def write_own_task(folder: Path) -> Path:
    """Write the files of the page into a folder, and return the configuration."""
    blocks = read_blocks((ROOT / "docs" / "how-to" / "tasks.md").read_text())
    for language, name in {"python": "sine.py", "toml": "sine.toml"}.items():
        lines = next(block.lines for block in blocks if block.language == language)
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder / "sine.toml"
