"""Finds the tokenizer files of a model, which may be a folder, hub id or GGUF file.

The result is always a folder with a tokenizer.json. A source without one is converted once, in a
child process, and kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ...configs.model.hub import HubError, download
from ...configs.paths import PathError, local_path
from .gguf_metadata import GGUFError, read_gguf_metadata

HUB_FILES = [
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"),
    *("generation_config.json", "chat_template.jinja", "chat_template.json", "added_tokens.json"),
    *("additional_chat_templates/*.jinja", "tokenizer.model", "spiece.model", "*.tiktoken"),
    *("vocab.json", "merges.txt", "vocab.txt", "sentencepiece.bpe.model", "tiktoken.model"),
    *("tekken.json", "encoding/encoding_dsv4.py"),  # the program is read, never run
]
_VOCABULARIES = (
    *("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"),
    *("sentencepiece.bpe.model", "tiktoken.model", "tekken.json"),
)
_CONVERTER_VERSION = "2"  # part of the cache key; increase it when the conversion changes
_CONVERT_SECONDS = 300


class TokenizerLoadError(Exception):
    """The tokenizer cannot be found, converted or read; the text is one sentence."""


def find_tokenizer_folder(source: str, revision: str | None = None) -> Path:
    """A folder with the tokenizer.json of `source`, converted if needed.

    Raises TokenizerLoadError."""
    try:
        path = local_path(source)
    except PathError as error:
        raise TokenizerLoadError(f"{error}.") from None
    if path is not None and path.is_file():
        if path.suffix == ".gguf":
            return converted(path)
        raise TokenizerLoadError(f"{source} is a file, but not a .gguf file.")
    if path is None:
        if source.endswith(".gguf") or source.startswith(("/", ".", "~")):
            raise TokenizerLoadError(f"{source} does not exist.")
        path = _snapshot(source, revision)
    return _in_folder(path)


def _in_folder(path: Path) -> Path:
    if (path / "tokenizer.json").is_file():
        return path
    if any((path / name).is_file() for name in _VOCABULARIES):
        return converted(path)
    if files := sorted(path.glob("*.gguf")):
        return converted(files[0])
    raise TokenizerLoadError(
        f"{path} contains no tokenizer.json, tokenizer.model, tekken.json or .gguf file."
    )


def _snapshot(repo: str, revision: str | None) -> Path:
    try:
        return download(repo, revision, HUB_FILES)
    except HubError as error:
        raise TokenizerLoadError(str(error)) from error


def cache_root() -> Path:
    """The folder in which converted tokenizers are cached."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "slipstream" / "tokenizers"


def converted(source: Path) -> Path:
    """The cached tokenizer folder for a GGUF file or a folder with another vocabulary format.

    The first call converts it. Raises TokenizerLoadError if that fails."""
    folder = cache_root() / _identity(source)
    if (folder / "tokenizer.json").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    except OSError:  # the cache cannot be written; keep the result for this process only
        scratch = Path(tempfile.mkdtemp(prefix="slipstream-tokenizer-"))
        folder = scratch / "tokenizer"
        scratch = scratch / "converting"
        scratch.mkdir()
    try:
        _convert(source, scratch)
        scratch.rename(folder)
    except OSError:  # another process has finished first, with the same result
        if not (folder / "tokenizer.json").is_file():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _identity(source: Path) -> str:
    """A cache key that changes with the path, size or time of any file to be converted."""
    path = source.resolve()
    names = [path] if path.is_file() else [path / name for name in HUB_FILES]
    digest = hashlib.sha256(_CONVERTER_VERSION.encode())
    for name in names:
        if name.is_file():
            stat = name.stat()
            digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return f"{path.stem}-{digest.hexdigest()[:16]}"


def _convert(source: Path, folder: Path) -> None:
    if source.is_file():
        try:
            read_gguf_metadata(source, long_arrays=False)
        except GGUFError as error:  # reported at once, before a child spends time on its imports
            raise TokenizerLoadError(str(error)) from error
    package = Path(__file__).parents[3]  # the folder that contains `slipstream`
    path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    module = f"{__package__}.tokenizer_convert"
    command = [sys.executable, "-m", module, str(source.absolute()), str(folder)]
    child_end, our_end = os.pipe()  # closes when this process exits, and the child then exits, too
    try:
        child = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": path, "TRANSFORMERS_VERBOSITY": "error"},
            stdin=child_end,
            capture_output=True,
            text=True,
            timeout=_CONVERT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise TokenizerLoadError(
            f"Converting the tokenizer of {source} took longer than {_CONVERT_SECONDS} s."
        ) from error
    finally:
        os.close(child_end)
        os.close(our_end)
    if child.returncode or not (folder / "tokenizer.json").is_file():
        lines = child.stderr.strip().splitlines() or [f"status {child.returncode}"]
        reason = re.sub(r"^[\w.]+(Error|Exception): ", "", lines[-1]).rstrip(".")
        raise TokenizerLoadError(f"The tokenizer of {source} cannot be converted: {reason}.")
