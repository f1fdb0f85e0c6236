"""A log that strangers cannot fill: the same line a few times a minute, and no line of any length."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from agent_peft.printable import printable

LINES, SECONDS = 20, 60.0  # lines of one place in the code, and in what time
MESSAGE, TRACEBACK = 1000, 4000  # characters


class LogThrottle(logging.Filter):
    """Lets ``LINES`` lines of each place in the code pass in ``SECONDS``, and says with the next how many
    were left out.

    What strangers wrote stands in a message as escapes, and in a traceback behind a bar, so that it forges no
    line.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._places: dict[tuple[str, int], tuple[float, int]] = {}  # -> when its time began, lines since

    def filter(self, record: logging.LogRecord) -> bool:
        place, now = (record.pathname, record.lineno), self._clock()
        begun, lines = self._places.get(place, (now, 0))
        left_out = ""
        if now - begun > SECONDS:
            left_out = f" ({lines - LINES} more lines like this were left out)" if lines > LINES else ""
            begun, lines = now, 0
        self._places[place] = begun, lines + 1
        if lines >= LINES:
            return False
        record.msg, record.args = printable(record.getMessage().strip(), MESSAGE) + left_out, ()
        if record.exc_info:
            text = logging.Formatter().formatException(record.exc_info)
            text = (
                text if len(text) <= TRACEBACK else "..." + text[-TRACEBACK:]
            )  # what was raised is said at its end
            record.exc_text = "\n".join(f"| {printable(line)}" for line in text.splitlines())
        return True


@contextlib.contextmanager
def throttled(names: Sequence[str]) -> Iterator[None]:
    """These loggers, throttled."""
    throttle = LogThrottle()
    for name in names:
        logging.getLogger(name).addFilter(throttle)
    try:
        yield
    finally:
        for name in names:
            logging.getLogger(name).removeFilter(throttle)
