"""One server process a tier for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.server.processes import ServerProcess, running
from tests.tiny_models import make_tiny_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("served"), max_position=128)


@pytest.fixture(scope="session")
def started_servers() -> Iterator[tuple[ExitStack, dict[str, ServerProcess]]]:
    with ExitStack() as stack:
        yield stack, {}


@pytest.fixture
def server(
    tier_name: str, model: Path, started_servers: tuple[ExitStack, dict[str, ServerProcess]]
) -> ServerProcess:
    stack, servers = started_servers
    if tier_name not in servers:
        options = ("--served-model-name", "tiny", "--enable-dev-endpoints", "--trust-request-chat-template")
        servers[tier_name] = stack.enter_context(running(model, tier_name, *options))
    return servers[tier_name]
