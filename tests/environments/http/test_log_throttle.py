"""A log that strangers cannot fill."""

import logging
from importlib import import_module

from agent_peft.environments.http.guard import LINES, MESSAGE, TRACEBACK, LogThrottle, throttled
from agent_peft.environments.http.server import LOGGERS

logger = logging.getLogger("tests.throttled")


def test_the_same_line_comes_a_few_times_a_minute_and_the_next_says_how_many_were_left_out(caplog):
    now = [0.0]
    throttle = LogThrottle(lambda: now[0])
    logger.addFilter(throttle)
    try:
        for number in range(LINES + 100):
            logger.warning("connection %d", number)
        logger.warning("another line")
        assert len(caplog.messages) == LINES + 1
        now[0] = 61.0
        for _ in range(2):
            logger.warning("and one more")  # of this place in the code, the first
        assert "left out" not in caplog.text
    finally:
        logger.removeFilter(throttle)


def test_how_many_were_left_out(caplog):
    now = [0.0]
    throttle = LogThrottle(lambda: now[0])
    logger.addFilter(throttle)
    try:
        for number in range(LINES + 101):
            now[0] = 61.0 if number == LINES + 100 else 0.0
            logger.warning("connection %d", number)
    finally:
        logger.removeFilter(throttle)
    assert caplog.messages[-1] == f"connection {LINES + 100} (100 more lines like this were left out)"


def test_no_line_is_long_or_forged(caplog):
    with throttled(["tests.throttled"]):
        logger.warning("episode %s\n2026 root: forged \x1b[31m", "e" * 100_000)
        try:
            raise ValueError("first\n2026 root: forged \x1b[31m" + "x" * 100_000)
        except ValueError:
            logger.exception("it broke")
    assert len(caplog.messages[0]) <= MESSAGE
    told = caplog.records[1].exc_text
    assert len(told) < 2 * TRACEBACK
    assert all(line.startswith("| ") for line in told.splitlines())
    assert "\x1b" not in caplog.text
    assert not logger.filters


def test_the_loggers_that_are_throttled_are_those_of_modules_that_log():
    ours = [name for name in LOGGERS if name.startswith("agent_peft.")]
    assert ours
    assert all(import_module(name).logger.name == name for name in ours)
