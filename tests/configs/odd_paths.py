"""Names and paths that cannot be a model, for tests of the errors about them."""

from __future__ import annotations

import os
from pathlib import Path

CONFIG = '{"model_type": "llama", "vocab_size": 61, "hidden_size": 32}'


def odd_paths(folder: Path) -> dict[str, str]:
    """Make odd files in `folder`; return name -> words of the error about it.

    Some of the files are pipes, so opening them would block forever."""
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder / "back")
    (folder / "back").symlink_to(folder / "loop")
    for name in ("config-pipe", "weights-pipe", "empty"):
        (folder / name).mkdir()
    os.mkfifo(folder / "config-pipe" / "config.json")
    (folder / "weights-pipe" / "config.json").write_text(CONFIG)
    (folder / "weights-pipe" / "model.safetensors").symlink_to(folder / "pipe")
    return {
        "/dev/null": "'/dev/null' is neither a file nor a folder",
        f"/{'a' * 10_000}": f"'/{'a' * 99}…{'a' * 100}' is too long to be the name of",
        f"owner/{'a' * 10_000}": "is too long to be the name of a file or a model",
        "/tmp/\ud800": "'/tmp/\\ud800' is not a valid name of a file or a model",
        "/tmp/\0": "'/tmp/\\x00' is not a valid name of a file or a model",
        f"{folder}/pipe": "pipe' is neither a file nor a folder",
        f"{folder}/loop": "loop' is a link that leads back to itself",
        f"{folder}/config-pipe": "config.json' is not a regular file",
        f"{folder}/weights-pipe": "model.safetensors' is not a regular file",
        f"{folder}/empty": "no config.json",
    }
