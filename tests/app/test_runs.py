"""Runs as files, the scripted model, and what a form or a damaged file is answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.files import infer_block_size, load_run, save_run
from app.presets import PRESETS, preset
from app.runs import Recording, make_engine, record
from app.scripted import WordTokenizer
from app.state import make_view
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.trace_file import read_trace, write_trace
from reference.frontend.workload import Workload, WorkloadRequest


def test_words_are_tokens_and_text_comes_back() -> None:
    tokenizer = WordTokenizer()
    text = "a  text with\nodd   spaces and 漢字 <b>"
    ids = tokenizer.encode(text)
    assert len(ids) == 8
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(" stone")[0] == tokenizer.encode("x stone")[1]


def test_a_saved_run_comes_back_equal(tmp_path: Path) -> None:
    chosen = preset("preemption")
    run = record("swap", chosen.workload(1))
    save_run(run, tmp_path / "run.json")
    again = load_run(tmp_path / "run.json")
    assert again == run
    assert make_view(again) == make_view(run)


def test_a_saved_run_is_a_trace_file_to_everybody_else(tmp_path: Path) -> None:
    run = record("x", preset("copy").workload(0))
    save_run(run, tmp_path / "run.json")
    assert read_trace(tmp_path / "run.json") == run.traces


@pytest.mark.parametrize("chosen", PRESETS, ids=[chosen.key for chosen in PRESETS])
def test_the_block_size_of_a_bare_trace_is_found_where_a_table_was_ever_full(chosen: Any) -> None:
    run = record("x", chosen.workload(len(chosen.sides) - 1))
    assert infer_block_size(run.traces) == run.info.block_size


def test_a_bare_trace_is_shown_with_token_ids_for_text(tmp_path: Path) -> None:
    run = record("x", preset("prefix").workload(1))
    write_trace(run.traces, tmp_path / "bare.json")
    view = make_view(load_run(tmp_path / "bare.json"))
    assert [request["id"] for request in view["requests"]] == ["ann", "ben", "cleo", "dan"]
    assert view["num_blocks"] == 40
    assert all(piece.startswith(" #") for piece in view["pieces"])
    assert view["title"] == "bare"


def damage(document: dict[str, Any], how: str) -> str:
    if how == "cut":
        return json.dumps(document)[:400]
    if how == "checksum":
        document["steps"][0]["token_budget"] = 1
    if how == "no block size":
        del document["run"]["block_size"]
    if how == "zero block size":
        document["run"]["block_size"] = 0
    if how == "requests":
        document["run"]["requests"] = [[1]]
    if how == "table":
        document["run"] = []
    return json.dumps(document)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("cut", "only a part of one"),
        ("checksum", "its checksum does not match"),
        ("no block size", "damaged description"),
        ("zero block size", "damaged description"),
        ("requests", "damaged description"),
        ("table", "damaged description"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path: Path, how: str, sentence: str) -> None:
    path = tmp_path / "run.json"
    save_run(record("x", preset("copy").workload(0)), path)
    path.write_text(damage(json.loads(path.read_text()), how))
    with pytest.raises(ValueError, match=sentence):
        load_run(path)


def test_a_run_can_be_shown_before_it_has_ended() -> None:
    recording = Recording("x", preset("chunked").workload(1), "scripted", "reference")
    steps = recording.play()
    for _ in range(4):
        next(steps)
    view = make_view(recording.run(is_done=False))
    assert len(view["steps"]) == 4
    assert not view["is_done"]
    long = view["requests"][2]
    assert len(long["prompt"]) == 51  # words
    assert "end" not in long


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ValueError, match="There is no engine option 'blocksize'"):
        make_engine("scripted", "reference", {"blocksize": 4})


def test_a_prompt_larger_than_the_pool_is_refused_with_its_name() -> None:
    request = WorkloadRequest("big", prompt="word " * 40, params=SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match="Request 'big'"):
        record("x", Workload((request,), {"block_size": 4, "num_blocks": 4}))


@pytest.mark.embedded
def test_the_embedded_model_gives_candidates_for_every_token(tier_name: str) -> None:
    request = WorkloadRequest(
        "paris",
        messages=({"role": "user", "content": "What is the capital of France?"},),
        params=SamplingParams(temperature=0, max_tokens=3),
    )
    run = record("x", Workload((request,), {"num_blocks": 9}), "smollm2-135m", tier_name)
    candidates = run.info.requests[0].candidates
    assert [entries[0][0] for entries in candidates] == ["The", " capital", " of"]
    for entries in candidates:
        assert [p for _, p in entries] == sorted((p for _, p in entries), reverse=True)
        assert 0 < sum(p for _, p in entries) <= 1.001
