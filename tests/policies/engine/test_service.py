"""The thread that computes for a server: its end."""

from __future__ import annotations

import threading

import pytest

from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.engine.service import Service
from agent_peft.types import InfrastructureError


class Asked:
    """A request for nothing: it ends as soon as the engine looks at it. It keeps what it hears."""

    seed = 0

    def __init__(self):
        self.heard = []

    @property
    def prompt(self):
        self.heard.append("over")

    def fail(self, error):
        self.heard.append(error)


@pytest.fixture
def service(make_policy):
    return Service({"mine": make_policy("llama")}, EngineConfig(rows=1), 32)


def test_what_is_submitted_after_the_end_fails_at_once(service):
    service.close()
    late = Asked()
    service.submit("mine", late)
    (error,) = late.heard
    assert isinstance(error, InfrastructureError) and str(error) == "the server is stopping"


def test_no_request_is_lost_while_the_service_closes(service):
    requests, half = [Asked() for _ in range(1000)], threading.Event()

    def ask():
        for number, request in enumerate(requests):
            service.submit("mine", request)
            if number == 500:
                half.set()

    client = threading.Thread(target=ask)
    client.start()
    assert half.wait(60)
    service.close()
    client.join(60)
    assert not client.is_alive() and all(request.heard for request in requests)
