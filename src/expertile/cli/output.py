"""Places to write to, tried before anything is measured."""

from __future__ import annotations

import os
from pathlib import Path


def check_folder(option: str, folder: Path) -> Path:
    """`folder`, made if it is not there. ValueError names `option` if it is a file or cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{option}: expected a folder, got {str(folder)!r}, which is or lies below a file") from None
    except OSError as error:
        raise ValueError(f"{option}: cannot make the folder {str(folder)!r}: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{option}: cannot write into the folder {str(folder)!r}: permission denied")
    return folder


def check_file(option: str, path: Path) -> Path:
    """`path`, its folder made if it is not there. ValueError names `option` if no file can be written there."""
    if path.is_dir():
        raise ValueError(f"{option}: expected a file, got the folder {str(path)!r}")
    check_folder(option, path.parent)
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{option}: cannot write to {str(path)!r}: permission denied")
    return path
