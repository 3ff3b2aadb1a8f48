"""Key files: read at start-up, one key per line, and an empty one never opens the server."""

from __future__ import annotations

import argparse
import os
import threading
from pathlib import Path

import pytest

from slipstream.configs.load import add_flags, load_config
from slipstream.configs.options import ConfigError
from slipstream.configs.schema import Config


def load(*argv: str, **environ: str) -> Config:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return load_config(parser.parse_args(argv), environ)


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    path = tmp_path / "secrets"
    path.write_bytes("\ufefffirst\r\n\n  with, comma  \nключ\n".encode())
    return path


FOUND = ("first", "with, comma", "ключ")


def test_keys_of_a_file_join_the_others(secrets: Path) -> None:
    server = load(
        "--api-key-file", str(secrets), "--api-key", "given", SLIPSTREAM_ADMIN_API_KEY="root"
    ).server
    assert server.api_key == ("given", *FOUND) and server.admin_api_key == ("root",)
    server = load(SLIPSTREAM_API_KEY_FILE=str(secrets)).server
    assert server.api_key == FOUND and server.admin_api_key == ()
    server = load(SLIPSTREAM_ADMIN_API_KEY_FILE=str(secrets)).server
    assert server.api_key == () and server.admin_api_key == FOUND
    assert load(SLIPSTREAM_API_KEY_FILE="").server.api_key == ()  # compose: an unset variable


def test_a_pipe_works_as_a_key_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("a\nb\n",), daemon=True)
    writer.start()
    assert load("--api-key-file", str(pipe)).server.api_key == ("a", "b")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: no such file"),
        (b"", "contains no key"),
        (b" \n\t\r\n", "contains no key"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b"a\x00b", "control character"),
        (b"k\n" * (1 << 20), "larger than 1 MiB"),
    ],
)
def test_a_file_without_usable_keys_is_one_sentence(
    content: bytes | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "secrets"
    if content is not None:
        path.write_bytes(content)
    for flag in ("--api-key-file", "--admin-api-key-file"):
        with pytest.raises(ConfigError, match=words) as error:
            load(flag, str(path))
        assert flag in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read: is a directory"):
        load("--api-key-file", str(tmp_path))


@pytest.mark.parametrize("name", ["api_key", "admin_api_key"])
@pytest.mark.parametrize("key", ["secret\nkey", "secret\x1b", "secret\ud800"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(name: str, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({name: (key,)})
    assert f"--{name.replace('_', '-')}" in str(error.value) and "secret" not in str(error.value)
