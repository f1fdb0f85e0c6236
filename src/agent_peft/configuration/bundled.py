"""The configurations that are installed with the package, without torch: a shell completes their names."""

from __future__ import annotations

from pathlib import Path


def bundled_configs() -> dict[str, Path]:
    """Their files, by name."""
    package = Path(__file__).parent.parent
    folders = (package / "configs", package.parent.parent / "configs")  # in a wheel; in the repository
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}
