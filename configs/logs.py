"""Formats log lines alike in server and worker, and adds the id of the request they belong to.

A thread writes the access log, so that the event loop only queues its lines.
"""

from __future__ import annotations

import atexit
import json
import logging
import queue
import threading
import time
from contextvars import ContextVar
from logging.handlers import QueueHandler, QueueListener

ACCESS_LOGGER = "slipstream.access"
# The id of the HTTP request that the running task serves; its log lines carry the id.
request_id: ContextVar[str] = ContextVar("request_id", default="")


class _JsonFormatter(logging.Formatter):
    """Formats each record as a JSON object on one line."""

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
        if found := getattr(record, "request_id", "") or request_id.get():
            line["request_id"] = found
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _TextFormatter(logging.Formatter):
    """Formats a record as one line of text, with a traceback's lines indented below it.

    A message may contain text of a client. Its unprintable characters are escaped, so that it can
    neither forge a log line nor control a terminal.
    """

    def format(self, record: logging.LogRecord) -> str:
        record.asctime = self.formatTime(record, self.datefmt)
        record.message = one_line(record.getMessage().rstrip())
        found = getattr(record, "request_id", "") or request_id.get()
        lines = [self.formatMessage(record) + (f" id={found}" if found else "")]
        if record.exc_info:
            lines += self.formatException(record.exc_info).split("\n")
        if record.stack_info:
            lines += record.stack_info.split("\n")
        return "\n    ".join([lines[0], *map(one_line, lines[1:])])


def one_line(text: str) -> str:
    """The text with each unprintable character replaced by an escape such as `\\n` or `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def configure_logging(level: str, form: str, process: str) -> None:
    """Send the logs of this process to stderr; `form` is "text" or "json", `process` its name.

    A record's `fields`, a dict passed in `extra`, become members of the JSON object.
    """
    handler = logging.StreamHandler()
    text = _TextFormatter(f"%(asctime)s %(levelname)-7s {process} %(name)s: %(message)s")
    handler.setFormatter(_JsonFormatter(process) if form == "json" else text)
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    if level == "info":  # a line for each request to the hub would break up the progress bars
        for name in ("httpx", "httpx2"):
            logging.getLogger(name).setLevel(logging.WARNING)
    _queue_access_log(handler)


def _queue_access_log(handler: logging.Handler) -> None:
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    listener = QueueListener(lines, handler)
    log = logging.getLogger(ACCESS_LOGGER)
    log.handlers = [_LazyQueueHandler(lines, listener)]
    log.propagate = False


class _LazyQueueHandler(QueueHandler):
    """Starts the writing thread at the first line; a process that logs nothing has no thread."""

    def __init__(
        self, lines: queue.SimpleQueue[logging.LogRecord], listener: QueueListener
    ) -> None:
        super().__init__(lines)
        self._listener = listener
        self._started = False

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return the record unformatted: the thread formats it, in this same process."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue the record; the first one starts the thread, which stops when the process exits."""
        if not self._started:
            self._started = True
            self._listener.start()
            atexit.register(self._listener.stop)
        super().enqueue(record)


def share_bars_between_threads() -> None:
    """Set tqdm's lock; call this before the process draws its first bar.

    A lock between threads is enough, because only one of our processes draws bars."""
    from tqdm import tqdm

    if not hasattr(tqdm, "_lock"):
        tqdm.set_lock(threading.RLock())
