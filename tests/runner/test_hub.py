"""What the hub answers becomes one sentence, for weights and tokenizers alike."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from huggingface_hub import errors

from slipstream.configs.schema import ModelConfig
from slipstream.runner.hub import HubError, download, find_model
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
    with pytest.raises(HubError, match=words) as weights:
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
