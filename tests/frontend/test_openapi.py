"""The API keeps what its own document says, whatever is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import given as given_any
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from pdd_runtime.frontend.keys import operator_key
from pdd_runtime.pipeline import Finish
from tests.frontend.test_doors import access, by
from tests.frontend.test_keys import line

Start = Callable[..., Awaitable[Any]]
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
EXAMPLES = 40
"""For each body and each kind of data, right and wrong."""


@pytest.mark.timeout(300)
async def test_whatever_is_sent_is_answered_as_the_document_says(given: Start) -> None:
    server = await given(b"ok", Finish("length", 0), context=100_000)
    document = (await server.client.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    await asyncio.to_thread(_attack, document, server.url)


@pytest.mark.timeout(300)
async def test_with_keys_too_and_the_document_says_where_they_are_asked_for(given: Start, tmp_path: Path) -> None:
    """Requests of the one key soon are too many: their refusals are as the document says, too."""
    limited = access(tmp_path, line("user", "u", requests_per_minute=3, max_tokens=5, priority=0))
    server = await given(b"ok", Finish("length", 0), context=100_000, access=limited)
    document = (await server.client.get("/openapi.json")).json()
    secured = {
        path for path, operations in document["paths"].items() if all("security" in one for one in operations.values())
    }
    assert secured == set(document["paths"]) - {"/health", "/ready"}
    for key in ("u", operator_key("secret")):
        await asyncio.to_thread(_attack, document, server.url, key, 5)
    assert 429 in [end.line.status for end in server.service.recent().ended]


def _attack(document: dict[str, Any], url: str, key: str = "", examples: int = EXAMPLES) -> None:
    schema = schemathesis.openapi.from_dict(document)
    for result in schema.get_all_operations():
        operation = result.ok()
        takes_body = operation.method == "post"
        for mode in schemathesis.GenerationMode:
            # Nothing can be wrong about a request without a body: its path is any text.
            if takes_body or mode.is_positive:
                _send(operation.as_strategy(generation_mode=mode), url, examples if takes_body else 5, key)


def _send(cases: st.SearchStrategy[Any], url: str, examples: int, key: str) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given_any(case=cases)
    def send(case: Any) -> None:
        response = case.call(base_url=url, timeout=10, headers=by(key) if key else None)
        case.validate_response(response, checks=CHECKS)

    send()
