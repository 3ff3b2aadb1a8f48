"""What all nodes must have in common: the version of this package and the model's files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from ...configs.model.hub import HubError, download_config
from ...configs.paths import PathError, local_path
from ...configs.schema import Config
from ..version import version
from .node_messages import Join

_HEAD_BYTES = 1 << 20  # of a GGUF file: its metadata, or most of it
_MAX_CONFIG_BYTES = 16 << 20
_WEIGHTS = (".safetensors", ".gguf")


class HostsError(Exception):
    """This node cannot join or go on. The message is one sentence for the user."""


def model_digest(name: str, revision: str | None) -> str:
    """A digest of a model's config and of the names and sizes of its weight files.

    Of a model on the hub only config.json counts. Returns "" if it cannot be read.
    """
    try:
        path = local_path(name)
        if path is None:
            return _digest([download_config(name, revision).read_bytes()])
        return _digest(_parts(path))
    except (PathError, HubError, OSError):
        return ""


def _parts(path: Path) -> Iterator[bytes]:
    if path.is_file():
        with path.open("rb") as file:
            yield file.read(_HEAD_BYTES)
        yield str(path.stat().st_size).encode()
        return
    if (path / "config.json").is_file():
        with (path / "config.json").open("rb") as file:
            yield file.read(_MAX_CONFIG_BYTES)
    for file_path in sorted(path.iterdir()):
        if file_path.name.endswith(_WEIGHTS):
            yield f"{file_path.name} {file_path.stat().st_size}".encode()


def _digest(parts: Iterator[bytes] | list[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.hexdigest()


def membership(config: Config, node: int, nnodes: int) -> Join:
    """What a node says of itself when it joins; the first node compares it with its own."""
    model = config.model
    digest = model_digest(model.model, model.revision)
    return Join(version(), node, nnodes, model.model, digest)


def disagreement(own: Join, other: Join, num_slots: int) -> str | None:
    """One sentence if a node cannot join the first one, whose membership is `own`.

    `num_slots` is the number of devices that each node needs.
    """
    name = f"node {other.node}"
    if other.version != own.version:
        return (
            f"{name} has slipstream {other.version} and node 0 has {own.version}: install the "
            "same version on all nodes"
        )
    if other.nnodes != own.nnodes:
        return (
            f"{name} was started with --nnodes {other.nnodes} and node 0 with --nnodes "
            f"{own.nnodes}: give all nodes the same number"
        )
    if not 0 < other.node < own.nnodes:
        return f"{name} cannot join: --node-rank must be 1 to {own.nnodes - 1}"
    if other.model != own.model:
        return f"{name} serves {other.model} and node 0 {own.model}: name the same model"
    if own.digest and other.digest and own.digest != other.digest:
        return (
            f"the files of {own.model} on {name} are not those on node 0: copy the same model to "
            "all nodes"
        )
    if 0 < other.num_devices < num_slots:
        return f"{name} shows {other.num_devices} GPUs, but each node needs {num_slots}"
    return None
