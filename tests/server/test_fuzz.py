"""Requests that nobody would write: schemathesis draws them from the server's own description of itself."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.server.processes import ServerProcess, eventually, running

CASES = {"fast": 1000, "reference": 200}  # the server is the same; only the engine behind it differs
PATHS = {
    "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/v1/models/{name}", "/health",
    "/version", "/metrics", "/reset_prefix_cache",
}  # fmt: skip


def requests_of(schema: Any) -> st.SearchStrategy[Any]:
    """Requests that fit the description, and requests that do not."""
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in operations} == PATHS
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    # Generating is where things can go wrong: half of all cases.
    bodies = [o for o in operations if "completions" in o.path]
    strategies = [o.as_strategy(generation_mode=mode) for o in bodies for mode in modes]
    strategies += [
        o.as_strategy(generation_mode=GenerationMode.POSITIVE) for o in operations if o not in bodies
    ]
    return st.one_of(strategies)


def fuzz(server: ServerProcess, num_cases: int) -> dict[int, int]:
    """Send the requests; returns how often each status was the answer."""
    schema = schemathesis.openapi.from_dict(server.get("/openapi.json").json())
    seen: dict[int, int] = {}

    @settings(
        max_examples=num_cases,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=requests_of(schema))
    def send(case: Any) -> None:
        response = case.call(base_url=server.url)
        assert response.status_code < 500, (
            f"{response.status_code}: {response.text}\n{case.as_curl_command()}"
        )
        seen[response.status_code] = seen.get(response.status_code, 0) + 1

    send()
    return seen


def test_no_request_that_can_be_drawn_breaks_the_server(model: Path, tier_name: str) -> None:
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    options = ("--enable-dev-endpoints", "--max-model-len", "32", "--max-sequences", "2", "--no-access-log")
    with running(model, tier_name, *options) as server:
        seen = fuzz(server, CASES[tier_name])
        assert sum(seen.values()) >= CASES[tier_name]
        assert seen[200] > 20
        assert seen[400] > 50
        eventually(server.is_idle, "no request and no block is left", 10)
        answer = server.post("/v1/completions", {"prompt": "still here", "max_tokens": 3, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert "Traceback" not in server.log
