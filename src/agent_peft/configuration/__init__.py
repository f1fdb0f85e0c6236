"""The configuration of a run: from YAML and overrides to a ``TrainConfig``, and every key explained. This
module imports no torch, since a shell completes names with it.
"""

from __future__ import annotations

from pathlib import Path

CONFIG, RECORD = "config.yaml", "run.json"  # of a run directory


def bundled_configs() -> dict[str, Path]:
    """The files of the configurations that are installed with the package, by name."""
    package = Path(__file__).parent.parent
    folders = (package / "configs", package.parent.parent / "configs")  # in a wheel; in the repository
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}
