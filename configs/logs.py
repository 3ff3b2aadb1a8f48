"""Owns how log lines look, the same in the server and in the worker."""

from __future__ import annotations

import json
import logging
import time


class _JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(level: str, form: str, process: str) -> None:
    """Send the logs of this process to stderr; `form` is "text" or "json"."""
    handler = logging.StreamHandler()
    text = logging.Formatter(f"%(asctime)s %(levelname)-7s {process} %(name)s: %(message)s")
    handler.setFormatter(_JsonFormatter(process) if form == "json" else text)
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
