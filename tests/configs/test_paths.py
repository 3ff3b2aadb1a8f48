"""Errors about names that cannot be a model, from everything that looks for one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.configs.paths import PathError, local_path
from slipstream.configs.schema import Config, ModelConfig
from slipstream.runner.errors import ModelLoadError
from slipstream.runner.loading.hub import find_model
from slipstream.server.commands import main
from slipstream.server.startup.model_files import ModelFilesError, check_model_files
from slipstream.server.text.tokenizer_source import TokenizerLoadError, find_tokenizer_folder

from .odd_paths import odd_paths

FINDERS: list[Callable[[str], object]] = [
    lambda name: find_model(ModelConfig(name)),
    lambda name: check_model_files(Config(model=ModelConfig(name))),
    find_tokenizer_folder,
]
ERRORS = (ModelLoadError, ModelFilesError, TokenizerLoadError)


@pytest.mark.parametrize("find", FINDERS)
def test_each_odd_name_gives_one_sentence(tmp_path: Path, find: Callable[[str], object]) -> None:
    for name, words in odd_paths(tmp_path).items():
        if words == "no config.json" and find is not FINDERS[0]:
            continue  # the server's checks report something else that the folder lacks
        with pytest.raises(ERRORS) as caught:
            find(name)
        message = str(caught.value)
        assert words in message and "\n" not in message and len(message) < 400


@pytest.mark.parametrize("as_drafter", [False, True])
def test_the_command_line_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], as_drafter: bool
) -> None:
    for name, words in odd_paths(tmp_path).items():
        drafter = json.dumps({"method": "eagle3", "model": name})
        assert main(["serve", "-sc", drafter] if as_drafter else ["serve", name]) == 2
        message = capsys.readouterr().err
        what = "drafter" if as_drafter else "model"
        assert message.startswith(f"slipstream serve: error: the {what} ")
        assert words in message and message.count("\n") == 1 and len(message) < 400


def test_existing_paths_are_found_and_others_may_be_hub_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "config.json")
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "gone")  # reported by whoever reads it
    assert local_path(str(tmp_path)) == tmp_path
    assert local_path(str(tmp_path / "config.json")) == tmp_path / "config.json"
    for name in (
        "",
        "owner/name",
        str(tmp_path / "none"),
        f"{tmp_path}/config.json/x",
        "~no one/x",
    ):
        assert local_path(name) is None


def test_an_unreadable_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(PathError, match="cannot be read: permission denied$"):
        local_path(str(tmp_path))
