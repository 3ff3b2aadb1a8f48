"""Owns downloads from the model hub, and the sentences that say why there is none.

Both the server, which wants a tokenizer, and the runner, which wants a model, ask here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .bars import share_bars_between_threads


class HubError(Exception):
    """The hub does not give what was asked for; the text is one sentence."""


def download(repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The folder with a repository's files of these patterns, from the cache or from the hub.

    HubError, one sentence, if it cannot be had.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    share_bars_between_threads()
    where = repo if revision is None else f"{repo} at {revision}"
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns)))
    except HFValidationError as error:
        raise HubError(f"{repo!r} is neither a local folder nor a hub id (owner/name).") from error
    except GatedRepoError as error:
        raise HubError(
            f"{repo} is gated: ask for access on the hub, and set HF_TOKEN to a token of yours."
        ) from error
    except RepositoryNotFoundError as error:
        raise HubError(f"{repo} is neither a local folder nor a model on the hub.") from error
    except RevisionNotFoundError as error:
        raise HubError(f"{repo} has no revision {revision!r} on the hub.") from error
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise HubError(
            f"{where} is neither a local folder nor in the download cache, and {why}."
        ) from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise HubError(f"{where} could not be fetched from the hub: {reason}.") from error
