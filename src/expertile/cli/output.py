"""Places to write to, tried before anything is measured; and answers as JSON."""

import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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


def print_json(data: Any) -> None:
    """`data` to standard output: dataclasses as objects, paths as text, numbers that JSON has not as null."""
    escaped = (sys.stdout.encoding or "utf-8").lower() not in ("utf-8", "utf8")
    print(json.dumps(_plain(data), ensure_ascii=escaped, indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
