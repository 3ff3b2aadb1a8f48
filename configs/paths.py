"""Owns which names can be a place of a model on this machine, and the words for those that cannot.

Nothing is opened: a pipe among the files would hold its reader for ever.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_READ = (".json", ".safetensors", ".gguf", ".model", ".jinja", ".txt", ".tiktoken")  # of a folder
_MAX_SHOWN = 200  # characters of a name in a sentence


class PathError(Exception):
    """The name is no place of a model; the text is one sentence, without its full stop."""


def local_path(name: str) -> Path | None:
    """The file or folder of this name; None if there is none, so that it may be a hub id.

    PathError for a device or a pipe, or such a thing among the files of a folder; for a loop of
    links, what may not be read, and what no file can be called.
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
    except ValueError:  # a lone surrogate, a zero byte
        raise PathError(f"{shown(name)} is nothing that a file or a model can be called") from None
    return path


def shown(name: str) -> str:
    """The name in quotes, short and in printable characters."""
    half = _MAX_SHOWN // 2
    return repr(name if len(name) <= _MAX_SHOWN else f"{name[:half]}…{name[-half:]}")


def _check_files(folder: Path) -> None:
    for name in os.listdir(folder):
        if name.endswith(_READ):
            path = folder / name
            if path.exists() and not path.is_file():
                raise PathError(f"{shown(str(path))} is no file that can be read")


def _reason(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "is a link that leads back to itself"
    if error.errno == errno.ENAMETOOLONG:
        return "is too long to be the name of a file or a model"
    return f"cannot be read: {(error.strerror or 'an input error').lower()}"
