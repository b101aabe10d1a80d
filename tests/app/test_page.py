"""Between the form and the engine: what is shown is what runs."""

from __future__ import annotations

import socket
from typing import Any

import pytest

import app.__main__
import app.page
from app.form import (
    changes_text,
    form_options,
    form_values,
    make_sides,
    parse_changes,
    parse_rows,
    parse_runs,
    preset_sides,
    table_rows,
)
from app.page import first_page, make_app, usable_tiers
from app.presets import PRESETS, Preset, preset
from reference.frontend.engine_args import EngineArgs

every_preset = pytest.mark.parametrize("chosen", PRESETS, ids=[chosen.key for chosen in PRESETS])


@every_preset
@pytest.mark.parametrize("model", ["scripted", "smollm2-135m"])
def test_the_form_of_a_preset_runs_the_sides_of_the_preset(chosen: Preset, model: str) -> None:
    sides = preset_sides(chosen, model, "reference")
    assert len(sides) == len(chosen.sides)
    for index, (side, expected) in enumerate(zip(sides, chosen.sides, strict=True)):
        workload = chosen.workload(index, model == "scripted")
        assert EngineArgs(**side.workload.config) == EngineArgs(**workload.config)
        assert side.is_static == expected.is_static


@every_preset
def test_the_table_gives_back_the_requests(chosen: Preset) -> None:
    assert parse_rows(table_rows(chosen.requests)) == chosen.requests


def test_rows_without_a_prompt_are_passed_over() -> None:
    rows = [["", "hello", None, None, None, 3, None, None, None], ["", "", 0, 0, 1, 4, 0, 1, ""]]
    (request,) = parse_rows(rows)
    assert (request.request_id, request.prompt, request.arrival_step) == ("r1", "hello", 0)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], "There is no request"),
        ([["a", "x", 0, 0, 1, "many", 0, 1, ""]], "Request 1 of the table"),
        ([["a", "x", 0, 0, 0, 0, 0, 1, ""]], "Request 1 of the table"),
        ([["a", "x", 0, 0, 1, 1, 0.5, 2, ""]], "Request 1 of the table: top_p"),
        ([["a", "x", 0, 0, 1, 1, 0.5, 1, "one"]], "Request 1 of the table"),
        ([["a", "x", 0, 0, 1, 1, 0, 1, ""], ["a", "y", 0, 0, 1, 1, 0, 1, ""]], "'a' is used twice"),
    ],
)
def test_a_wrong_row_is_named(rows: list[list[Any]], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_rows(rows)


def test_a_number_that_is_missing_is_named() -> None:
    values = form_values({}, is_static=False)
    values[0] = None
    with pytest.raises(ValueError, match="block_size must be a whole number"):
        form_options(values)


def test_zero_leaves_an_option_to_the_engine() -> None:
    values = form_values({}, is_static=True)
    assert form_options(values) == ({}, True)


def test_changes_are_json_or_a_plain_word() -> None:
    text = "block_size = 8\n\npreemption_mode = swap\nenable_prefix_caching = false"
    expected = {"block_size": 8, "preemption_mode": "swap", "enable_prefix_caching": False}
    assert parse_changes(text) == expected
    assert changes_text(preset("copy")) == ""


def test_a_line_of_dashes_stands_between_the_runs_to_compare_with() -> None:
    runs = parse_runs(changes_text(preset("blocksize")))
    assert runs == [{"block_size": 16, "num_blocks": 17}, {"block_size": 8, "num_blocks": 33}]
    assert parse_runs("---\n\nblock_size = 8\n---\n") == [{"block_size": 8}]
    with pytest.raises(ValueError, match="At most 3 runs"):
        parse_runs("\n---\n".join(["block_size = 8"] * 3))


def test_both_tiers_get_the_same_workload() -> None:
    chosen = preset("copy")
    sides = make_sides("both", chosen.requests, form_values(chosen.options, False), [{"block_size": 8}])
    assert [side.tier for side in sides] == ["reference", "fast"]
    assert sides[0].workload == sides[1].workload


def test_without_the_extension_the_page_offers_reference_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    load = app.page.load_tier

    def broken(name: str) -> Any:
        if name == "fast":
            raise ValueError("The tier 'fast' cannot be loaded: No module named 'fast._cpu'")
        return load(name)

    monkeypatch.setattr(app.page, "load_tier", broken)
    assert usable_tiers() == ["reference"]
    tier = next(block for block in make_app().blocks.values() if getattr(block, "elem_id", "") == "tier")
    assert [value for _, value in tier.choices] == ["reference"]


def test_the_first_page_needs_nobody_to_press_anything() -> None:
    page, runs = first_page()
    assert page["autoplay"]
    assert page["title"] == PRESETS[0].title
    assert page["sides"] == [side.title for side in PRESETS[0].sides]
    assert all(run.is_done for run in runs)


def test_a_port_that_is_taken_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert app.__main__.run(["--port", str(port)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    sentence = f"Port {port} is taken or not allowed at 127.0.0.1; choose another with --port.\n"
    assert told.err == sentence
