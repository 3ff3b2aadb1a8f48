"""Reads configurations from flags, variables and files, as the command line does."""

from __future__ import annotations

import argparse
from pathlib import Path

from slipstream.configs.load import add_flags, load_config
from slipstream.configs.schema import Config


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return parser.parse_args(arguments)


def load(*arguments: str, **environ: str) -> Config:
    return load_config(parse(*arguments), environ)


def yaml_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    return str(path)
