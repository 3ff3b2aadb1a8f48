"""Owns downloads from the model hub, and the sentences that say why there is none.

Both the server, which wants a tokenizer, and the runner, which wants a model, ask here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

Progress = Callable[[int, int], None]  # (bytes so far, bytes in all)
_TELL_SECONDS = 0.2


class HubError(Exception):
    """The hub does not give what was asked for; the text is one sentence."""


class _Counted:
    """Bytes that a download has brought so far, of all its files together."""

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
    """The folder with a repository's files of these patterns, from the cache or from the hub.

    Nothing is printed; `progress` is called now and then, in this thread, with bytes and their
    total. HubError, one sentence, if the files cannot be had.
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
            while not wait([job], _TELL_SECONDS).done:
                if counted.total:
                    progress(counted.done, counted.total)
            return Path(job.result())


def download_config(repo: str, revision: str | None) -> Path:
    """The config.json of a repository, from the cache or from the hub; HubError as `download`."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with contextlib.suppress(HFValidationError):  # `download` says it
        cached = try_to_load_from_cache(repo, "config.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached)
    path = download(repo, revision, ["config.json"]) / "config.json"
    if not path.exists():
        raise HubError(f"{repo} on the hub has no config.json, so it cannot be served.")
    return path


def _silent_bar(counted: _Counted) -> type[Any]:
    """A bar for huggingface_hub that draws nothing and counts bytes."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts = options.get("unit") == "B"
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0  # which a disabled bar would not do
            if self._counts:
                counted.take(int(self.n), int(self.total or 0))
            return None

    return Bar


@contextlib.contextmanager
def _sentences(repo: str, revision: str | None) -> Iterator[None]:
    """Raise HubError for what huggingface_hub raises."""
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
