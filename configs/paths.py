"""Decides whether a name is a local path that can hold a model, and says why if it cannot.

No file is opened, because reading from a pipe would block forever.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

# Suffixes of the files in a model's folder that something here reads.
_READ = (".json", ".safetensors", ".gguf", ".model", ".jinja", ".txt", ".tiktoken")
_MAX_SHOWN = 200  # characters of a name in an error


class PathError(Exception):
    """The name cannot be the path of a model; the text is one sentence without its full stop."""


def local_path(name: str) -> Path | None:
    """The file or folder of this name, or None if it does not exist and so may be a hub id.

    Raises PathError for a device or a pipe, also as a file in the folder; for a loop of links; for
    what may not be read; and for a name that no file can have.
    """
    if not name:
        return None
    try:
        name.encode()
        path = Path(os.path.expanduser(name))
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            _check_files(path)
        elif not stat.S_ISREG(mode):
            raise PathError(f"{shown(name)} is neither a file nor a folder")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise PathError(f"{shown(name)} {_reason(error)}") from None
    except ValueError:  # a lone surrogate or a null byte
        raise PathError(f"{shown(name)} is not a valid name of a file or a model") from None
    return path


def shown(name: str) -> str:
    """The name in quotes, shortened in the middle and with unprintable characters escaped."""
    half = _MAX_SHOWN // 2
    return repr(name if len(name) <= _MAX_SHOWN else f"{name[:half]}…{name[-half:]}")


def _check_files(folder: Path) -> None:
    for name in os.listdir(folder):
        if name.endswith(_READ):
            path = folder / name
            if path.exists() and not path.is_file():
                raise PathError(f"{shown(str(path))} is not a regular file")


def _reason(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "is a link that leads back to itself"
    if error.errno == errno.ENAMETOOLONG:
        return "is too long to be the name of a file or a model"
    return f"cannot be read: {(error.strerror or 'an input error').lower()}"
