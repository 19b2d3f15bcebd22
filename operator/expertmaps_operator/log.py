"""Log lines as text or JSON, to standard error."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

_NOISY = ("kopf", "asyncio", "urllib3", "kubernetes")


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name.removeprefix("expertmaps_operator."),
            "message": record.getMessage(),
        }
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Time, level, part and message; a message stays one line."""

    def format(self, record: logging.LogRecord) -> str:
        part = record.name.removeprefix("expertmaps_operator.")
        message = " ".join(record.getMessage().split())
        return f"{_time(record)} {record.levelname:<7} {part}: {message}"


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def configure(form: str) -> None:
    """Set up logging; `form` is json or text."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in _NOISY:
        # The client logs whole bodies of answers at DEBUG; kopf logs every event at INFO.
        logging.getLogger(name).setLevel(logging.WARNING)
