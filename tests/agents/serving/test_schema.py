"""Whatever the OpenAPI document allows, and what it does not: no answer is the server's fault, and each is
as the document says.
"""

from contextlib import suppress

import pytest

schemathesis = pytest.importorskip("schemathesis")

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

    url = serving(rows=4, max_tokens=24).url
    document = schemathesis.openapi.from_url(f"{url}/openapi.json")
    chosen = [getattr(checks, name, None) or checks.CHECKS.get_one(name) for name in CHECKS]
    tried, statuses = set(), set()
    for operation in (found.ok() for found in document.get_all_operations()):
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):

            @settings(
                max_examples=6,
                derandomize=True,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def told(case):
                answer = case.call(timeout=60)
                case.validate_response(answer, checks=chosen)
                tried.add((case.path, mode))  # noqa: B023 (called before the loop continues)
                statuses.add(answer.status_code)

            with suppress(Unsatisfiable):  # what asks for nothing cannot be asked wrongly
                told()
    negative = {path for path, mode in tried if mode is schemathesis.GenerationMode.NEGATIVE}
    assert negative >= {"/v1/chat/completions", "/v1/completions"}
    assert statuses >= {200, 400, 404}
