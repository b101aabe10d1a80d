"""What `make demo` prints, and that it notices when the tiers differ."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from reference.frontend.demo import QUESTIONS, TierRun, main, make_workload, print_comparison, run_tier
from tests.tiny_models import make_tiny_llama


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[TierRun, TierRun]:
    model = str(make_tiny_llama(tmp_path_factory.mktemp("model")))
    return run_tier("reference", make_workload(), model), run_tier("fast", make_workload(), model)


def printed(runs: tuple[TierRun, TierRun]) -> tuple[bool, str]:
    file = io.StringIO()
    equal = print_comparison(Console(file=file, width=80), runs)
    return equal, file.getvalue()


def test_equal_tiers_are_said_to_be_equal_for_every_prompt_and_in_the_last_line(
    runs: tuple[TierRun, TierRun],
) -> None:
    equal, text = printed(runs)
    assert equal
    assert text.count("equal on both tiers") == len(QUESTIONS)
    assert "DIFFERENT" not in text
    assert text.splitlines()[-1].startswith("All tokens are equal")
    for question in QUESTIONS:
        assert question in text
    assert all(
        cell_len(line) <= 80 for line in text.split("\n")
    )  # a random model also writes marks of no width


def test_later_prompts_are_shown_with_the_blocks_they_found_in_the_cache(
    runs: tuple[TierRun, TierRun],
) -> None:
    first, *later = (runs[0].outputs[f"r{i}"].num_cached_tokens for i in range(len(QUESTIONS)))
    assert first == 0
    assert all(cached >= 32 and cached % 16 == 0 for cached in later)
    shared = runs[0].block_table("r0")[: later[0] // 16]
    assert runs[0].block_table("r1")[: len(shared)] == shared
    assert f"cached       {later[0]} of" in printed(runs)[1]


def test_another_token_is_shown_beside_the_right_one_and_fails_the_demo(
    runs: tuple[TierRun, TierRun],
) -> None:
    first, second = runs
    output = second.outputs["r2"]
    completion = replace(output.outputs[0], token_ids=[7, *output.outputs[0].token_ids[1:]])
    changed = replace(second, outputs={**second.outputs, "r2": replace(output, outputs=[completion])})
    equal, text = printed((first, changed))
    assert not equal
    assert text.count("DIFFERENT") == 1
    assert text.count("equal on both tiers") == len(QUESTIONS) - 1
    assert "The tiers differ" in text


def test_another_schedule_fails_the_demo_although_all_tokens_are_equal(
    runs: tuple[TierRun, TierRun],
) -> None:
    first, second = runs
    trace = replace(second.traces[3], preempted=("r1",))
    changed = replace(second, traces=[*second.traces[:3], trace, *second.traces[4:]])
    equal, text = printed((first, changed))
    assert not equal
    assert "The tiers differ" in text


def test_a_model_that_cannot_be_fetched_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("reference.frontend.model_loader.resolve_model", _refuse)
    assert main() == 2
    assert capsys.readouterr().err == "The model could not be fetched.\n"


def _refuse(name: str) -> Path:
    raise ValueError("The model could not be fetched.")
