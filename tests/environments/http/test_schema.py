"""Whatever the OpenAPI document allows, and what it does not: no answer is the server's fault, and each is
as the document says.
"""

from contextlib import suppress

import httpx
import pytest

from agent_peft.environments import load_environment

schemathesis = pytest.importorskip("schemathesis")

# schemathesis draws by itself, so that the same requests are sent each time
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)


@pytest.mark.slow
def test_no_request_is_answered_with_500(serving):
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis.errors import Unsatisfiable
    from schemathesis import checks

    served = load_environment({"kind": "db_bench", "generate": {"num_tasks": 8}})
    url = serving({"train": served}).url
    document = schemathesis.openapi.from_url(f"{url}/openapi.json")
    chosen = [getattr(checks, name, None) or checks.CHECKS.get_one(name) for name in CHECKS]
    tried = set()
    for operation in (found.ok() for found in document.get_all_operations()):
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):

            @settings(
                max_examples=8,
                derandomize=True,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def told(case):
                case.call_and_validate(checks=chosen, timeout=20)
                tried.add((case.path, mode))  # noqa: B023 (called before the loop continues)

            with suppress(Unsatisfiable):  # what asks for nothing cannot be asked wrongly
                told()
    negative = {path for path, mode in tried if mode is schemathesis.GenerationMode.NEGATIVE}
    assert "/api/ping" in {path for path, _ in tried}
    assert negative >= {"/tasks", "/demonstration", "/examples"}
    assert httpx.post(f"{url}/api/ping", trust_env=False).status_code == 200
