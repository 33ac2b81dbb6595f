"""Where the log goes and what a line of it looks like."""

import datetime
import json
import logging
import sys

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (ISO 8601, UTC), level, logger, message and, where there is one, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        entry = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def set_up_logging(log_format: str) -> None:
    """Our own messages from INFO on, those of others from WARNING on, to stderr. log_format: text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.captureWarnings(log_format == "json")
    logging.getLogger("paxpage").setLevel(logging.INFO)
