import threading

import pytest

from agent_peft.policies.engine.daemon_threads import DaemonThreads


def test_shutdown_after_an_interrupt_before_the_start(monkeypatch):
    """SIGINT can come while a thread is made. The error that follows must stay KeyboardInterrupt."""

    def interrupted(thread):
        raise KeyboardInterrupt

    threads = DaemonThreads(2, "environment")
    assert threads.submit(lambda: 3).result(10) == 3
    monkeypatch.setattr(threads._idle, "acquire", lambda blocking: False)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupted)
        threads.submit(lambda: 4)
    threads.shutdown(10)
