"""`slipstream serve`: run the server until a signal stops it."""

from __future__ import annotations

import argparse
import os

from ...configs.load import add_flags, load_config

SUMMARY = "serve a model over HTTP with the OpenAI API"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    config = load_config(args, os.environ)
    from ..startup.launch import serve

    return serve(config)
