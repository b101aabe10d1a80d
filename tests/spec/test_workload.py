"""The workload file: what it holds, what it refuses, and when its requests come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from reference.contracts.protocols import Tier
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.workload import (
    Workload,
    WorkloadRequest,
    WorkloadRun,
    parse_workload,
    read_workload,
    run_workload,
    write_workload,
)
from tests.scripted import make_engine


def test_every_field_of_a_line_is_read() -> None:
    workload = parse_workload(
        [
            '{"config": {"block_size": 8, "seed": 3}}',
            "",
            '{"id": "a", "prompt": "Hi", "arrival_step": 2, "abort_step": 5, "priority": -1, "cache_salt": "s", '
            '"sampling_params": {"temperature": 0, "max_tokens": 4, "stop": ["x"], "seed": null}}',
            '{"prompt_token_ids": [1, 2]}',
            '{"messages": [{"role": "user", "content": "Hi"}], "abort_step": null}',
        ]
    )
    assert workload.config == {"block_size": 8, "seed": 3}
    first, second, third = workload.requests
    assert first == WorkloadRequest(
        "a",
        prompt="Hi",
        arrival_step=2,
        abort_step=5,
        priority=-1,
        cache_salt="s",
        params=SamplingParams(temperature=0, max_tokens=4, stop=["x"]),
    )
    assert (second.request_id, second.prompt_token_ids) == ("r1", (1, 2))
    assert third.messages == ({"role": "user", "content": "Hi"},)


def test_a_written_workload_reads_back_as_the_same(tmp_path: Path) -> None:
    workload = Workload(
        (
            WorkloadRequest(
                "a", prompt="Grüße [x]", arrival_step=1, params=SamplingParams(temperature=0.5, stop="é")
            ),
            WorkloadRequest("b", prompt_token_ids=(4, 5), abort_step=0, priority=2, cache_salt="s"),
            WorkloadRequest("c", messages=({"role": "user", "content": "Hi"},)),
        ),
        {"block_size": 4},
    )
    write_workload(workload, tmp_path / "w.jsonl")
    assert read_workload(tmp_path / "w.jsonl") == workload


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: it is not valid JSON"),
        ("[]", "line 2: a line must be a JSON object"),
        ("{}", "line 2: a request needs exactly one of 'prompt'"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "line 2: a request needs exactly one of"),
        ('{"prompt": 3}', "line 2: prompt must be text"),
        ('{"prompt": "a", "colour": 1}', "line 2: unknown key 'colour'"),
        ('{"prompt": "a", "arrival_step": -1}', "line 2: arrival_step must be a whole number, got -1"),
        ('{"prompt": "a", "arrival_step": "1"}', "line 2: arrival_step must be a whole number"),
        ('{"prompt": "a", "sampling_params": {"top_p": 0}}', r"line 2: top_p must be in \(0, 1\]"),
        (
            '{"prompt": "a", "sampling_params": {"best_of": 2}}',
            "line 2: unknown sampling parameter 'best_of'",
        ),
        ('{"prompt": "a", "sampling_params": []}', "line 2: sampling_params must be a table"),
        ('{"prompt": "a", "id": "first"}', "line 2: the id 'first' is used twice"),
        ('{"config": {}}', "line 2: the config must be the first line"),
        ('{"prompt": "a", "id": 7}', "line 2: id must be a non-empty text, got 7"),
        ('{"prompt": "a", "arrival_step": true}', "line 2: arrival_step must be a whole number, got True"),
        (
            '{"prompt": "a", "arrival_step": 3, "abort_step": 2}',
            "line 2: abort_step lies before arrival_step",
        ),
        ('{"prompt_token_ids": [1, "2"]}', "line 2: prompt_token_ids must be a list of whole numbers"),
        ('{"messages": [{"role": "user"}]}', "line 2: messages must be a list of"),
        ('{"prompt": "a", "cache_salt": 1}', "line 2: cache_salt must be text"),
        ("[" * 100_000, "line 2: it is not valid JSON"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_workload(['{"prompt": "ok", "id": "first"}', line])


def test_null_means_absent() -> None:
    (request,) = parse_workload(
        [
            '{"id": null, "prompt": "a", "abort_step": null, "sampling_params": {"max_tokens": null, "top_p": null}}'
        ]
    ).requests
    assert request == WorkloadRequest("r0", prompt="a")


def test_a_limit_of_none_is_written_as_a_number_no_model_reaches(tmp_path: Path) -> None:
    request = WorkloadRequest("a", prompt="a", params=SamplingParams(max_tokens=None))
    write_workload(Workload((request,)), tmp_path / "w.jsonl")
    (again,) = read_workload(tmp_path / "w.jsonl").requests
    assert again.params.max_tokens == 2**31 - 1


def test_separators_of_unicode_inside_a_text_do_not_split_a_line(tmp_path: Path) -> None:
    workload = Workload((WorkloadRequest("a", prompt="one\u2028two\x0bthree\x85"),))
    write_workload(workload, tmp_path / "w.jsonl")
    assert read_workload(tmp_path / "w.jsonl") == workload


def test_an_unknown_engine_option_in_the_config_is_refused() -> None:
    with pytest.raises(ValueError, match="line 1: unknown engine option 'gpu'"):
        parse_workload(['{"config": {"gpu": 1}}', '{"prompt": "a"}'])


def test_an_empty_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no request"):
        parse_workload(["", " "])
    with pytest.raises(ValueError, match="cannot be read"):
        read_workload(tmp_path / "missing.jsonl")
    (tmp_path / "bad.jsonl").write_text("nonsense\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl: line 1: it is not valid JSON\.$"):
        read_workload(tmp_path / "bad.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read"):
        read_workload(tmp_path / "binary")


def test_requests_arrive_and_are_aborted_at_their_steps(tier: Tier) -> None:
    engine, _ = make_engine(tier)
    params = SamplingParams(max_tokens=6)
    workload = Workload(
        (
            WorkloadRequest("late", prompt_token_ids=(5, 6, 7), arrival_step=4, params=params),
            WorkloadRequest("first", prompt_token_ids=(8, 9), params=params),
            WorkloadRequest("aborted", prompt_token_ids=(8, 9), abort_step=2, params=params),
        )
    )
    run = WorkloadRun(engine, workload)
    running = []
    while not run.is_done:
        run.step()
        running.append(set(engine.engine_core.scheduler.requests))
    assert running[0] == {"first", "aborted"}
    assert running[2] == {"first"}
    assert "late" not in running[3]
    assert "late" in running[4]
    assert run.finished["aborted"].outputs[0].finish_reason == "abort"
    assert len(run.finished["aborted"].outputs[0].token_ids) == 2
    assert {name: len(run.finished[name].outputs[0].token_ids) for name in ("first", "late")} == {
        "first": 6,
        "late": 6,
    }


def test_steps_in_which_the_engine_is_idle_are_passed_over(tier: Tier) -> None:
    workload = Workload((WorkloadRequest("a", prompt_token_ids=(5, 6), arrival_step=10**12),))
    run = WorkloadRun(make_engine(tier)[0], workload)
    for _ in range(16):  # one token a step
        assert not run.is_done
        run.step()
    assert run.is_done
    assert len(run.finished["a"].outputs[0].token_ids) == 16
    assert run.step_number == 10**12 + 16


def test_every_output_of_a_run_can_be_seen_as_it_comes(tier: Tier) -> None:
    workload = Workload((WorkloadRequest("a", prompt_token_ids=(5, 6)),))
    seen = []
    finished = run_workload(make_engine(tier)[0], workload, on_output=seen.append)
    assert [len(output.outputs[0].token_ids) for output in seen] == list(range(1, 17))
    assert seen[-1] is finished["a"]


def test_a_request_that_is_refused_on_arrival_is_named(tier: Tier) -> None:
    workload = Workload((WorkloadRequest("much", prompt_token_ids=tuple(range(2, 1402))),))
    with pytest.raises(
        ValueError, match=r"Request 'much': The prompt has 1400 tokens, but max_model_len is 1000"
    ):
        run_workload(make_engine(tier)[0], workload)


def test_a_chat_keeps_the_text_that_the_template_made_of_it(tier: Tier) -> None:
    workload = Workload((WorkloadRequest("a", messages=({"role": "user", "content": "Hi"},)),))
    output = run_workload(make_engine(tier)[0], workload)["a"]
    assert output.prompt == "<bos>user\nHi<eos>\n<bos>assistant\n"
    assert output.prompt_token_ids[0] == 0


def test_a_salt_in_the_workload_reaches_the_cache(tier: Tier) -> None:
    def cached(salts: tuple[str | None, str | None]) -> int:
        ids = tuple(range(10, 30))
        requests = tuple(
            WorkloadRequest(f"r{i}", prompt_token_ids=ids, arrival_step=i, cache_salt=salt)
            for i, salt in enumerate(salts)
        )
        engine, _ = make_engine(tier)
        return run_workload(engine, Workload(requests))["r1"].num_cached_tokens

    assert cached(("s", "s")) > 0
    assert cached(("s", "t")) == 0
    assert cached((None, "s")) == 0
