"""Every answer of the hub becomes one sentence, for weights and tokenizers alike."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

from slipstream.configs.model.hub import download
from slipstream.configs.model.model_config import ARCHITECTURES
from slipstream.configs.schema import Config, ModelConfig, SpeculativeConfig
from slipstream.runner.errors import ModelLoadError
from slipstream.runner.loading.hub import find_model
from slipstream.runner.loading.weights import resolve_model
from slipstream.runner.models import registry
from slipstream.runner.startup import assembly as startup
from slipstream.runner.startup import load_target
from slipstream.server.text.tokenizer_source import TokenizerLoadError, find_tokenizer_folder

REPLY = httpx.Response(403, request=httpx.Request("GET", "https://hub.invalid"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.HFValidationError("odd"), "'owner/name' is neither a local folder nor a hub id"),
        (errors.GatedRepoError("403", response=REPLY), "owner/name is gated: .* set HF_TOKEN"),
        (
            errors.RepositoryNotFoundError("404", response=REPLY),
            "owner/name is neither a local folder nor a model on the hub",
        ),
        (errors.RevisionNotFoundError("404", response=REPLY), "has no revision 'v1' on the hub"),
        (
            errors.LocalEntryNotFoundError("no"),
            "owner/name at v1 is neither .* download cache, and the hub cannot be reached",
        ),
        (errors.HfHubHTTPError("500\nlong", response=REPLY), "could not be fetched .* hub: 500"),
        (OSError(28, "No space left on device"), "could not be fetched .*No space left on device"),
    ],
)
def test_every_refusal_of_the_hub_is_one_sentence(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(ModelLoadError, match=words) as weights:
        find_model(ModelConfig("owner/name", revision="v1"))
    with pytest.raises(TokenizerLoadError, match=words) as tokenizer:
        find_tokenizer_folder("owner/name", "v1")
    assert str(weights.value) == str(tokenizer.value)
    assert "\n" not in str(weights.value) and str(weights.value).endswith(".")


def test_a_repository_gives_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def give(repo: str, revision: str | None, allow_patterns: list[str], **_: object) -> str:
        assert (repo, revision, allow_patterns) == ("owner/name", None, ["*.json"])
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", give)
    assert download("owner/name", None, ("*.json",)) == tmp_path


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    config = ModelConfig(str(tmp_path))
    with pytest.raises(ModelLoadError, match="has no config.json"):
        find_model(config)
    (tmp_path / "a.gguf").touch()
    assert find_model(config) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelLoadError, match="holds 2 .gguf files; name one of them"):
        find_model(config)
    (tmp_path / "config.json").touch()
    assert find_model(config) == tmp_path
    with pytest.raises(ModelLoadError, match="holds 2 .gguf files"):
        find_model(ModelConfig(str(tmp_path), load_format="gguf"))


def test_a_drafter_is_looked_for_before_the_target_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = Config(speculative=SpeculativeConfig(method="eagle3", model="heads/nope"))

    class Loaded(Exception):
        pass

    def load(target: ModelConfig, downloading: object) -> None:
        raise Loaded

    monkeypatch.setattr(load_target, "resolve_model", load)
    with pytest.raises(
        ModelLoadError, match="^the drafter heads/nope is neither a local folder nor"
    ):
        startup.assemble(config, lambda progress: None)
    own = SpeculativeConfig(method="my.drafters:Mine", model="anything")  # reads the name itself
    for speculative in (SpeculativeConfig(), SpeculativeConfig(method="ngram"), own):
        with pytest.raises(Loaded):
            startup.assemble(Config(speculative=speculative), lambda progress: None)


class Hub:
    """A fake repository on the hub, which copies the requested files."""

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        self.folder, self.files = folder, files
        self.given: list[str] = []

    def snapshot(
        self,
        repo: str,
        revision: str | None,
        allow_patterns: list[str],
        ignore_patterns: list[str] | None,
        tqdm_class: Any,
    ) -> str:
        names = filter_repo_objects(
            list(self.files), allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        names = [name for name in names if name not in self.given]
        total = sum(len(self.files[name]) for name in names)
        bar = tqdm_class(desc="bytes", total=total, unit="B", name="snapshot", disable=False)
        for name in names:
            (self.folder / name).write_text(self.files[name])
            self.given.append(name)
            bar.update(len(self.files[name]))
        time.sleep(0.3)
        bar.close()
        return str(self.folder)


LLAMA = json.dumps({"model_type": "llama"})
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})


@pytest.mark.parametrize("index", [None, INDEX, "[]", "{"])
def test_only_weights_that_will_be_read_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: str | None
) -> None:
    files = {"config.json": LLAMA, "tokenizer.json": "{}", "readme.md": ""}
    files |= {f"{name}.safetensors": "x" * 50 for name in ("model-1", "model-2", "consolidated")}
    files |= {"onnx/model.safetensors": "x", "extra.safetensors": "x"}
    files |= {} if index is None else {"model.safetensors.index.json": index}
    hub = Hub(tmp_path, files)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot)
    told: list[tuple[int, int]] = []
    find_model(ModelConfig("owner/name"), progress=lambda done, total: told.append((done, total)))
    weights = [name for name in hub.given if name.endswith(".safetensors")]
    extra = [] if index is INDEX else ["extra.safetensors"]
    assert weights == ["model-1.safetensors", "model-2.safetensors", *extra]
    assert hub.given[0] == "config.json" and "readme.md" not in hub.given
    total = 100 + len(extra)
    assert told and all(pair == (total, total) for pair in told)


def test_a_config_that_cannot_be_served_is_refused_before_its_weights_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path, {"config.json": '{"model_type": "phi"}', "model.safetensors": "x"})
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot)
    with pytest.raises(ModelLoadError, match="architecture phi is not supported"):
        resolve_model(ModelConfig("owner/name"))
    assert hub.given == ["config.json"]


def test_downloads_print_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hub = Hub(tmp_path, {"config.json": LLAMA})
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot)
    download("owner/name", None, ["*.json"])
    assert capfd.readouterr() == ("", "")


def test_the_architectures_that_configs_name_are_those_that_the_worker_builds() -> None:
    assert set(registry.ARCHITECTURES) == set(ARCHITECTURES)
