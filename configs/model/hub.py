"""Downloads files from the Hugging Face hub, and turns its failures into one-sentence errors.

The server downloads tokenizers with it, the worker downloads models.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

Progress = Callable[[int, int], None]  # (bytes so far, total bytes)
_REPORT_SECONDS = 0.2  # between two calls of `progress`


class HubError(Exception):
    """A file could not be downloaded; the text is one sentence."""


class _Counted:
    """Counts the bytes of a download's files together; safe to call from several threads."""

    def __init__(self) -> None:
        self.done = self.total = 0
        self._lock = threading.Lock()

    def take(self, done: int, total: int) -> None:
        with self._lock:
            if done >= self.done:
                self.done, self.total = done, max(total, done)


def download(
    repo: str,
    revision: str | None,
    patterns: Sequence[str],
    ignored: Sequence[str] = (),
    progress: Progress | None = None,
) -> Path:
    """Download a repository's files that match `patterns`, unless they are cached.

    Returns the folder that holds them. Prints nothing; calls `progress` a few times a second in
    this thread. Raises HubError if the files cannot be downloaded.
    """
    from huggingface_hub import snapshot_download

    counted = _Counted()
    fetch = partial(
        snapshot_download,
        repo,
        revision=revision,
        allow_patterns=list(patterns),
        ignore_patterns=list(ignored) or None,
        tqdm_class=_silent_bar(counted),
    )
    with _sentences(repo, revision):
        if progress is None:
            return Path(fetch())
        with ThreadPoolExecutor(1, "download") as thread:
            job = thread.submit(fetch)
            while not wait([job], _REPORT_SECONDS).done:
                if counted.total:
                    progress(counted.done, counted.total)
            return Path(job.result())


def download_config(repo: str, revision: str | None) -> Path:
    """The path of a repository's config.json, downloaded unless it is cached.

    Raises HubError if the repository has none or it cannot be downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with contextlib.suppress(HFValidationError):  # `download` reports it
        cached = try_to_load_from_cache(repo, "config.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached)
    path = download(repo, revision, ["config.json"]) / "config.json"
    if not path.exists():
        raise HubError(f"{repo} on the hub has no config.json, so it cannot be served.")
    return path


def _silent_bar(counted: _Counted) -> type[Any]:
    """A tqdm class for huggingface_hub that draws nothing and adds its bytes to `counted`."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts = options.get("unit") == "B"
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0  # a disabled bar would not count
            if self._counts:
                counted.take(int(self.n), int(self.total or 0))
            return None

    return Bar


@contextlib.contextmanager
def _sentences(repo: str, revision: str | None) -> Iterator[None]:
    """Raise HubError, with one sentence, for any exception of huggingface_hub in this context."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = repo if revision is None else f"{repo} at {revision}"
    try:
        yield
    except HFValidationError as error:
        raise HubError(f"{repo!r} is neither a local folder nor a hub id (owner/name).") from error
    except GatedRepoError as error:
        raise HubError(
            f"{repo} is gated: request access on the hub, and set HF_TOKEN to your access token."
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
