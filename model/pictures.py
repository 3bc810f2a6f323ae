"""What the command lines ask of a place for a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def check_place(option: str, path: Path) -> None:
    """Refuses a file that cannot be written to."""
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ValueError(f"{option} must be a file in a folder that is there, got {path}")


def check_picture(option: str, path: Path) -> None:
    """Refuses a picture that cannot be drawn there."""
    check_place(option, path)
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"{option} must end in .png, .pdf or .svg, got {path}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{option} needs matplotlib (pip install .[plot]), got none")
