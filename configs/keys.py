"""Collects API keys from settings and from key files, such as container secrets."""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from pathlib import Path

from .options import ConfigError, all_options
from .paths import shown
from .schema import Config

_MAX_BYTES = 1 << 20  # size of a key file; a larger one was probably named by mistake


def with_keys(config: Config) -> Config:
    """Add the keys in the configuration's key files to the keys that it lists.

    Raises ConfigError if a file cannot be read or holds no key, or if an HTTP header could not
    carry a key. The error never shows a key, because it goes to a terminal or a log.
    """
    config = _with_group_key(config)
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


def _with_group_key(config: Config) -> Config:
    """Read the secret of the hosts from its file, which must hold that one key."""
    hosts = config.hosts
    if hosts.group_key_file is None:
        return config
    keys = _read("group_key_file", hosts.group_key_file)
    if len(keys) > 1 or hosts.group_key not in (None, keys[0]):
        raise ConfigError("--group-key-file and --group-key must name one key together")
    return replace(config, hosts=replace(hosts, group_key=keys[0]))


def _read(name: str, path: str) -> tuple[str, ...]:
    """The keys in a file, one per line.

    Raises ConfigError if there are none, because the server would then be open to everyone."""
    label = f"{all_options()[name].flag} {shown(path)[1:-1]}"
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{label} cannot be read: {why.lower()}") from None
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{label} is larger than 1 MiB; it must contain one key per line")
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"{label} is not UTF-8 text; it must contain one key per line") from None
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ConfigError(f"{label} contains no key; it must contain one key per line")
    return _checked(name, keys)


def _checked(name: str, keys: tuple[str, ...]) -> tuple[str, ...]:
    """The keys, stripped of surrounding spaces; ConfigError if an HTTP header cannot carry one."""
    for key in keys:
        if any(unicodedata.category(character) == "Cc" for character in key.strip()):
            why = "a key contains a control character, which an HTTP header cannot carry"
            raise ConfigError(f"{all_options()[name].flag}: {why}")
        try:
            key.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            why = "a key contains half of a surrogate pair, which is not a character"
            raise ConfigError(f"{all_options()[name].flag}: {why}") from None
    return tuple(key.strip() for key in keys)
