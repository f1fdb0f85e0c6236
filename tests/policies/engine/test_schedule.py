"""When answers join, told by futures that the test itself answers."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from agent_peft.policies.engine import schedule
from agent_peft.policies.engine.schedule import DecodeClock, PendingTurn


def ask(conversation: int, due: int, there: bool = False, turn: int = 1) -> PendingTurn:
    answer = PendingTurn(conversation, turn, due, Future())
    if there:
        answer.future.set_result([1])
    return answer


def at(step: int, schedule: schedule.Schedule | None = None) -> DecodeClock:
    clock = DecodeClock(2, schedule)
    for _ in range(step):
        clock.decoded(0.0)
    return clock


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for while something else can be done."""
    for name in ("PATIENCE", "PATIENCE_SHARE", "FIRST_PATIENCE"):
        monkeypatch.setattr(schedule, name, 0.0)


def test_an_answer_that_is_there_early_joins_when_it_is_due(hurried):
    clock, answer = at(3), ask(0, due=4, there=True)
    assert not clock.joins(answer)
    clock.decoded(0.0)
    assert clock.joins(answer) and clock.recorded == []


def test_a_late_answer_holds_nobody_up_and_is_recorded_where_it_joins(hurried):
    clock, answer = at(4), ask(7, due=4, turn=3)
    assert not clock.joins(answer)
    clock.decoded(0.0)
    assert not clock.joins(answer)
    answer.future.set_result([1])
    clock.decoded(0.0)
    assert clock.joins(answer) and clock.recorded == [(7, 3, 6)]


def test_a_hiccup_is_waited_for(monkeypatch):
    monkeypatch.setattr(schedule, "PATIENCE", 30.0)
    clock, answer = at(4), ask(0, due=4)
    timer = threading.Timer(0.05, answer.future.set_result, [[1]])
    timer.start()
    assert clock.joins(answer) and clock.recorded == []
    assert 0 < clock.waited < 30


def test_patience_is_used_up_once_and_grows_with_the_time_spent_decoding(monkeypatch):
    monkeypatch.setattr(schedule, "PATIENCE", 0.05)
    clock = at(4)
    assert not any(clock.joins(ask(number, due=4)) for number in range(20))
    assert 0.05 <= clock.waited < 20 * 0.05
    before = clock.waited
    clock.decoded(0.05 / schedule.PATIENCE_SHARE)
    late = ask(20, due=5)
    assert not clock.joins(late) and clock.waited - before >= 0.04
    before = clock.waited
    clock.decoded(60.0)
    assert not clock.joins(late) and clock.waited == before, "it was waited for once"


def test_with_nothing_to_decode_the_first_answer_is_waited_for_and_no_longer(hurried):
    clock, slow, quick = at(4), ask(0, due=5), ask(1, due=6)
    timer = threading.Timer(0.05, quick.future.set_result, [[1]])
    timer.start()
    clock.skip([slow, quick])
    assert clock.step == 6 and not clock.joins(slow) and clock.joins(quick) and clock.recorded == []


def test_with_nothing_to_decode_the_clock_goes_on_to_what_is_due(hurried):
    clock = at(4)
    clock.skip([ask(0, due=9, there=True), ask(1, due=7, there=True)])
    assert clock.step == 7
    clock.skip([ask(0, due=3, there=True)])
    assert clock.step == 8, "it never goes back, and never asks twice at one step"


def test_a_schedule_is_followed_wherever_the_answers_are():
    schedule = ((0, 1, 9), (1, 2, 6))
    clock = at(4, schedule)
    early = ask(0, due=4, there=True)
    other = ask(1, due=4, there=True, turn=2)
    unnamed = ask(0, due=4, turn=2)
    assert not clock.joins(early) and not clock.joins(other)
    threading.Timer(0.05, unnamed.future.set_result, [[1]]).start()
    assert clock.joins(unnamed), "what the schedule does not name joins when it is due, and is waited for"
    clock.skip([early, other])
    assert clock.step == 6 and clock.joins(other) and not clock.joins(early)
    clock.skip([early])
    assert clock.step == 9 and clock.joins(early)
    assert sorted(clock.recorded) == sorted(schedule), "so that the run can be followed in turn"
