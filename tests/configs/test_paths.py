"""What is said of places where no model can be, by whoever is asked to find one there."""

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
def test_each_odd_place_is_one_sentence(tmp_path: Path, find: Callable[[str], object]) -> None:
    for name, words in odd_paths(tmp_path).items():
        if words == "no config.json" and find is not FINDERS[0]:
            continue  # what others lack there is another sentence
        with pytest.raises(ERRORS) as caught:
            find(name)
        told = str(caught.value)
        assert words in told and "\n" not in told and len(told) < 400


@pytest.mark.parametrize("as_drafter", [False, True])
def test_the_command_line_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], as_drafter: bool
) -> None:
    for name, words in odd_paths(tmp_path).items():
        drafter = json.dumps({"method": "eagle3", "model": name})
        assert main(["serve", "-sc", drafter] if as_drafter else ["serve", name]) == 2
        told = capsys.readouterr().err
        what = "drafter" if as_drafter else "model"
        assert told.startswith(f"slipstream serve: error: the {what} ")
        assert words in told and told.count("\n") == 1 and len(told) < 400


def test_what_is_there_is_found_and_what_is_not_may_be_an_id(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "config.json")
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "gone")  # said by whoever needs it
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


def test_a_folder_that_may_not_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(PathError, match="cannot be read: permission denied$"):
        local_path(str(tmp_path))
