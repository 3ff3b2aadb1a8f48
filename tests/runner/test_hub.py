"""What the hub answers becomes one sentence, for weights and tokenizers alike."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from huggingface_hub import errors

from slipstream.configs.hub import download
from slipstream.configs.schema import Config, ModelConfig, SpeculativeConfig
from slipstream.runner import load_target, startup
from slipstream.runner.errors import ModelLoadError
from slipstream.runner.hub import find_model
from slipstream.server.tokenizer_source import TokenizerLoadError, find_tokenizer_folder

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
    def give(repo: str, revision: str | None, allow_patterns: list[str]) -> str:
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

    def load(target: ModelConfig) -> None:
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
