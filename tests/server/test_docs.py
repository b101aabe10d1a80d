"""README and docs/server.md: the examples run as they are printed, and the table is what the server does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reference.frontend.engine_args import DEFAULT_MODEL
from tests.server.processes import ServerProcess, running
from tools.compat_table import table

ROOT = Path(__file__).resolve().parents[2]


def example(language: str) -> str:
    """The block of this language in README's section on the server."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Serve it")[1].split("\n## ")[0]
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert "localhost:8000" in block
    return str(block)


@pytest.fixture(scope="module")
def embedded() -> Iterator[ServerProcess]:
    with running(DEFAULT_MODEL, "fast") as server:
        yield server


def run_example(server: ServerProcess, language: str, *command: str) -> str:
    """As printed, but for the port."""
    text = example(language).replace("http://localhost:8000", server.url)
    done = subprocess.run([*command, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.embedded
def test_the_curl_commands_of_the_readme_work_as_printed(embedded: ServerProcess) -> None:
    output = run_example(embedded, "bash", "bash", "-e")
    models, completion = (json.JSONDecoder().raw_decode(output[i:])[0] for i in starts_of_objects(output)[:2])
    assert models["data"][0]["id"] == DEFAULT_MODEL
    assert completion["choices"][0]["text"].startswith(" Paris")
    deltas = [
        json.loads(line)["choices"][0]["delta"]
        for line in re.findall(r"^data: (\{.*)$", output, re.MULTILINE)
    ]
    assert "".join(delta.get("content", "") for delta in deltas) == "The capital of France is Paris."
    assert output.rstrip().endswith("data: [DONE]")


def starts_of_objects(output: str) -> list[int]:
    """Where the JSON objects begin that stand side by side."""
    starts, position = [], 0
    while output[position : position + 1] == "{":
        starts.append(position)
        _, position = json.JSONDecoder().raw_decode(output, position)
    return starts


@pytest.mark.embedded
def test_the_openai_example_of_the_readme_works_as_printed(embedded: ServerProcess) -> None:
    assert run_example(embedded, "python", sys.executable).startswith("The capital of France is Paris. ")


@pytest.mark.embedded
def test_the_reference_answer_of_the_embedded_model(embedded: ServerProcess) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "return_token_ids": True,
    }
    answer = embedded.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["token_ids"] == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 37
    assert answer["usage"]["completion_tokens"] == 8


@pytest.mark.embedded
def test_the_example_of_the_async_engine_works_as_printed() -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    (code,) = (block for block in blocks if "AsyncLLM" in block)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 20


def test_the_table_of_fields_is_what_the_protocol_says() -> None:
    page = (ROOT / "docs/server.md").read_text(encoding="utf-8")
    assert table() in page, "run `python tools/compat_table.py` and put its output into docs/server.md"
