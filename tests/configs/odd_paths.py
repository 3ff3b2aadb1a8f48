"""Places where no model is, whatever one may find there; for tests of what is said of them."""

from __future__ import annotations

import os
from pathlib import Path

CONFIG = '{"model_type": "llama", "vocab_size": 61, "hidden_size": 32}'


def odd_paths(folder: Path) -> dict[str, str]:
    """Name -> words of the sentence about it. Opening some of them would wait for ever."""
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
        "/tmp/\ud800": "'/tmp/\\ud800' is nothing that a file or a model can be called",
        "/tmp/\0": "'/tmp/\\x00' is nothing that a file or a model can be called",
        f"{folder}/pipe": "pipe' is neither a file nor a folder",
        f"{folder}/loop": "loop' is a link that leads back to itself",
        f"{folder}/config-pipe": "config.json' is no file that can be read",
        f"{folder}/weights-pipe": "model.safetensors' is no file that can be read",
        f"{folder}/empty": "no config.json",
    }
