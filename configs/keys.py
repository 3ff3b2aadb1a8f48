"""Owns where API keys come from: settings, and files such as the secrets of a container engine."""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from pathlib import Path

from .options import ConfigError, all_options
from .paths import shown
from .schema import Config

_MAX_BYTES = 1 << 20  # of a file with keys; a larger one is another file


def with_keys(config: Config) -> Config:
    """The configuration with the keys of its key files beside those it has; else ConfigError.

    No error shows a key: its text goes to a terminal or a log.
    """
    server = config.server
    api_key = _checked("api_key", server.api_key)
    admin_api_key = _checked("admin_api_key", server.admin_api_key)
    if server.api_key_file is not None:
        api_key += _read("api_key_file", server.api_key_file)
    if server.admin_api_key_file is not None:
        admin_api_key += _read("admin_api_key_file", server.admin_api_key_file)
    if api_key == server.api_key and admin_api_key == server.admin_api_key:
        return config
    return replace(config, server=replace(server, api_key=api_key, admin_api_key=admin_api_key))


def _read(name: str, path: str) -> tuple[str, ...]:
    """The keys in a file, one a line. A file without any would open the server: an error."""
    label = f"{all_options()[name].flag} {shown(path)[1:-1]}"
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{label} cannot be read: {why.lower()}") from None
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{label} is larger than 1 MiB: it must hold one key a line")
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"{label} is not UTF-8 text: it must hold one key a line") from None
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ConfigError(f"{label} holds no key: it must hold one key a line")
    return _checked(name, keys)


def _checked(name: str, keys: tuple[str, ...]) -> tuple[str, ...]:
    """The keys without spaces around; ConfigError for one that no HTTP header can carry."""
    for key in keys:
        if any(unicodedata.category(character) == "Cc" for character in key.strip()):
            why = "a key holds a control character, which no HTTP header can carry"
            raise ConfigError(f"{all_options()[name].flag}: {why}")
        try:
            key.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            why = "a key holds half of a surrogate pair, which is not a character"
            raise ConfigError(f"{all_options()[name].flag}: {why}") from None
    return tuple(key.strip() for key in keys)
