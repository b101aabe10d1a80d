"""Log-probabilities of the prompt's own tokens, on both tiers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from reference.contracts.logits import PROMPT_ROWS, top_logprobs
from reference.contracts.protocols import Tier
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import ModelRunnerOutput, PromptLogprobs, SchedulerOutput, TokenLogprob
from reference.frontend.cli import main
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.outputs import RequestOutput
from reference.frontend.tiers import load_tier
from tests.factories import Driver, make_config, make_request
from tests.tiny_models import make_tiny_llama

PROMPT = list(range(10, 43))  # 33 tokens
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}

# Other chunks and other tiers add up the same products in another order: logits of this model move by less than 1e-4
# (measured: 2e-5), and a log-probability is the difference of a logit and a mean of logits.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_llama(tmp_path_factory.mktemp("model")))


class Run:
    """An engine, and what its runner reported of prompts."""

    def __init__(self, model: str, tier: Tier, **options: Any) -> None:
        self.schedules: list[SchedulerOutput] = []
        self.parts: list[tuple[str, PromptLogprobs]] = []
        self.engine = LLMEngine.from_engine_args(EngineArgs(model=model, **options), tier, self._on_step)
        self.outputs: list[RequestOutput] = []

    def _on_step(self, schedule: SchedulerOutput, output: ModelRunnerOutput) -> None:
        self.schedules.append(schedule)
        self.parts += output.prompt_logprobs.items()

    def finish(self, requests: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, RequestOutput]:
        for request_id, (prompt, params) in requests.items():
            self.engine.add_request(request_id, prompt, params)
        while self.engine.has_unfinished_requests():
            self.outputs += self.engine.step()
        return {output.request_id: output for output in self.outputs}

    def one(self, prompt: list[int], **params: Any) -> RequestOutput:
        return self.finish({"a": (prompt, SamplingParams(**params))})["a"]


Entry = tuple[int, int, float]  # token id, rank, logprob


def entries(output: RequestOutput) -> list[list[Entry]]:
    """Of the positions 1, 2, ...; position 0 is checked here."""
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    tables = [table for table in output.prompt_logprobs if table is not None]
    assert len(tables) == len(output.prompt_logprobs) - 1
    return [[(token_id, e.rank, e.logprob) for token_id, e in table.items()] for table in tables]


def assert_alike(one: list[list[Entry]], other: list[list[Entry]]) -> None:
    """Equal tokens and ranks in equal order, probabilities within the tolerance."""
    for table, other_table in zip(one, other, strict=True):
        assert [entry[:2] for entry in table] == [entry[:2] for entry in other_table]
        logprobs = [entry[2] for entry in other_table]
        assert [entry[2] for entry in table] == pytest.approx(logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("value", [-1, 21, True, "5", 1.0])
def test_a_bad_number_of_prompt_logprobs_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^prompt_logprobs must be"):
        SamplingParams(prompt_logprobs=value)  # type: ignore[arg-type]


def test_the_best_are_those_of_a_full_stable_sort_whatever_is_equal() -> None:
    """Values from a small set, so that ties stand at every border; some tokens are masked."""
    rng = np.random.default_rng(0)
    for size in (1, 2, 5, 40, 300):
        for num_values in (1, 2, 7, 1000):
            logits = rng.integers(0, num_values, size).astype(np.float32) - 3
            logits[rng.random(size) < 0.2] = -np.inf
            logits[0] = 1.0  # something is left
            order = np.argsort(-logits, kind="stable").tolist()
            sampled = int(rng.integers(size))
            for k in (0, 1, 3, 20):
                first, *others = top_logprobs(logits, sampled, k)
                assert (first.token_id, first.rank) == (sampled, order.index(sampled) + 1)
                assert [e.token_id for e in others] == [t for t in order[:k] if t != sampled]
                assert [e.rank for e in others] == [
                    r for r, t in enumerate(order[:k], start=1) if t != sampled
                ]


def test_60_there_is_one_entry_a_token_and_none_for_the_first(model: str, tier: Tier) -> None:
    output = Run(model, tier).one(PROMPT, prompt_logprobs=3, max_tokens=2, **GREEDY)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 33
    for token_id, table in zip(PROMPT[1:], entries(output), strict=True):
        assert table[0][0] == token_id, "the prompt's own token comes first"
        others = [entry for entry in table if entry[0] != token_id]
        assert [rank for _, rank, _ in others] == [r for r in (1, 2, 3) if r != table[0][1]]
        assert [lp for _, _, lp in others] == sorted((lp for _, _, lp in others), reverse=True)


@pytest.mark.parametrize("num_logprobs", [0, 20])
def test_60_zero_reports_the_prompts_tokens_alone_and_none_reports_nothing(
    model: str, tier: Tier, num_logprobs: int
) -> None:
    output = Run(model, tier).one(PROMPT, prompt_logprobs=num_logprobs, max_tokens=1, **GREEDY)
    assert {len(table) - (table[0][1] > num_logprobs) for table in entries(output)} == {num_logprobs}
    silent = Run(model, tier)
    assert silent.one(PROMPT, max_tokens=1, **GREEDY).prompt_logprobs is None
    assert silent.parts == []


def test_a_prompt_of_one_token_has_nothing_to_report(model: str, tier: Tier) -> None:
    run = Run(model, tier)
    assert run.one([7], prompt_logprobs=5, max_tokens=2, **GREEDY).prompt_logprobs == [None]
    assert run.parts == []


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 32])
def test_60_chunks_of_any_size_give_the_same(model: str, tier: Tier, chunk: int) -> None:
    params: dict[str, Any] = {"prompt_logprobs": 4, "max_tokens": 3, **GREEDY}
    whole = Run(model, tier).one(PROMPT, **params)
    run = Run(model, tier, max_num_batched_tokens=chunk)
    chunked = run.one(PROMPT, **params)
    assert [part.start for _, part in run.parts] == list(range(1, 33, chunk))
    assert_alike(entries(chunked), entries(whole))
    assert chunked.outputs[0].token_ids == whole.outputs[0].token_ids


def test_tokens_are_the_same_with_and_without_them(model: str, tier: Tier) -> None:
    params: dict[str, Any] = {"temperature": 0.9, "seed": 5, "max_tokens": 8, "ignore_eos": True, "n": 3}
    plain = Run(model, tier).one(PROMPT, **params)
    scored = Run(model, tier).one(PROMPT, prompt_logprobs=2, **params)
    assert [c.token_ids for c in scored.outputs] == [c.token_ids for c in plain.outputs]
    assert len(entries(scored)) == 32, "they belong to the request, whatever n is"


def test_b07_with_prefix_caching_both_runs_are_equal_and_others_may_use_the_blocks(
    model: str, tier: Tier
) -> None:
    run = Run(model, tier, block_size=16)
    params = SamplingParams(prompt_logprobs=1, max_tokens=1, **GREEDY)
    first = run.finish({"first": (PROMPT, params)})["first"]
    second = run.finish({"second": (PROMPT, params)})["second"]
    assert len(first.prompt_logprobs or ()) == 33
    assert first.prompt_logprobs == second.prompt_logprobs, "not one bit may differ"
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
    cache = run.engine.metrics.prefix_cache
    assert cache.queries == 0, "who does not look has not missed"
    third = run.finish({"third": (PROMPT, SamplingParams(max_tokens=1, **GREEDY))})["third"]
    assert third.num_cached_tokens == 32
    assert (cache.queries, cache.hits) == (33, 32)


def test_16_a_block_computed_again_is_a_second_block_of_one_hash(tier: Tier) -> None:
    driver = Driver(tier, make_config(block_size=4))
    driver.add(make_request("a", range(2, 11), max_tokens=9))
    driver.step()
    driver.add(make_request("b", range(2, 11), max_tokens=9, prompt_logprobs=0))
    driver.step()
    cache = driver.scheduler.snapshot().cache
    (a, b) = (cache.block_tables[name] for name in "ab")
    assert not set(a) & set(b)
    assert [cache.hashes[block] for block in a[:2]] == [cache.hashes[block] for block in b[:2]]


def test_60_a_prompt_preempted_half_way_is_scored_again_and_reported_once(model: str, tier: Tier) -> None:
    """8 blocks of 4: while `a` grows, `b` starts its prompt and loses its blocks, again and again."""
    params = SamplingParams(prompt_logprobs=2, max_tokens=12, **GREEDY)
    run = Run(model, tier, block_size=4, num_blocks=9, max_num_batched_tokens=8)
    outputs = run.finish({"a": (PROMPT[:15], params), "b": (PROMPT[:20], params)})
    starts = [part.start for name, part in run.parts if name == "b"]
    assert starts.count(1) > 1, "preempted after a chunk was scored, before the prompt was complete"
    for name, length in (("a", 15), ("b", 20)):
        alone = Run(model, tier).one(PROMPT[:length], prompt_logprobs=2, max_tokens=12, **GREEDY)
        assert len(entries(outputs[name])) == length - 1
        assert_alike(entries(outputs[name]), entries(alone))
        assert outputs[name].outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_request_preempted_behind_its_prompt_resumes_without_the_cache_and_reports_nothing_again(
    model: str, tier: Tier
) -> None:
    params = SamplingParams(prompt_logprobs=1, max_tokens=20, **GREEDY)
    run = Run(model, tier, block_size=4, num_blocks=14)
    outputs = run.finish({"a": (PROMPT[:15], params), "b": (PROMPT[1:16], params)})
    assert outputs["b"].metrics.num_preemptions > 0
    resumed = [new for schedule in run.schedules for new in schedule.scheduled_new_reqs]
    assert len(resumed) > 2
    assert {new.num_computed_tokens for new in resumed} == {0}
    assert [name for name, _ in run.parts] == ["a", "b"]
    assert len(entries(outputs["b"])) == 14


def test_both_tiers_report_the_same(model: str) -> None:
    reports = []
    for name in ("reference", "fast"):
        run = Run(model, load_tier(name), block_size=4, num_blocks=20, max_num_batched_tokens=12)
        params = {i: SamplingParams(prompt_logprobs=i, max_tokens=9, **GREEDY) for i in (0, 3, 20)}
        requests = {f"r{i}": (PROMPT[i : i + 8 + i // 2], p) for i, p in params.items()}
        reports.append(run.finish(requests))
    for name, output in reports[0].items():
        assert_alike(entries(output), entries(reports[1][name]))


def test_only_a_few_rows_of_logits_exist_at_a_time(model: str, tier: Tier) -> None:
    run = Run(model, tier)
    language_model = run.engine.engine_core.executor.model_runner.model  # type: ignore[attr-defined]
    compute_logits, sizes = language_model.compute_logits, []

    def counted(hidden: Any) -> Any:
        sizes.append(len(hidden))
        return compute_logits(hidden)

    language_model.compute_logits = counted
    prompt = [2 + i % 300 for i in range(2 * PROMPT_ROWS + 10)]
    # With logprobs: else the fast tier takes the best token of a greedy row without writing its logits.
    output = run.one(prompt, prompt_logprobs=1, logprobs=1, max_tokens=1, **GREEDY)
    assert len(entries(output)) == len(prompt) - 1
    assert sorted(sizes) == [1, 9, PROMPT_ROWS, PROMPT_ROWS]


def test_a_chunk_that_was_scored_is_no_output_and_no_first_token(model: str, tier: Tier) -> None:
    run = Run(model, tier, max_num_batched_tokens=8)
    run.engine.add_request("a", PROMPT, SamplingParams(prompt_logprobs=1, max_tokens=2, **GREEDY))
    assert [run.engine.step() for _ in range(4)] == [[], [], [], []]
    assert len(run.parts) == 4
    assert run.engine.output_processor.states["a"].metrics.ttft_s is None
    (output,) = run.engine.step()
    assert output.metrics.ttft_s is not None
    assert len(entries(output)) == 32


def test_an_aborted_prompt_gives_what_is_known_of_it(model: str, tier: Tier) -> None:
    run = Run(model, tier, max_num_batched_tokens=8)
    run.engine.add_request("a", PROMPT, SamplingParams(prompt_logprobs=1, **GREEDY))
    run.engine.step()
    (output,) = run.engine.abort_request("a")
    assert output.outputs[0].finish_reason == "abort"
    assert [table[0][0] for table in entries(output)] == PROMPT[1:9]


def test_the_scheduler_passes_a_chunk_on_though_nothing_was_sampled(tier: Tier) -> None:
    driver = Driver(tier, make_config(max_num_batched_tokens=4))
    driver.add(make_request("a", 9, prompt_logprobs=0))
    part = PromptLogprobs(1, ((TokenLogprob(7, -0.5, 1),),))
    schedule = driver.schedule()
    (news,) = driver.update(schedule, replace(driver.sample(schedule), prompt_logprobs={"a": part}))
    assert (news.new_token_ids, news.prompt_logprobs, news.finish_reason) == ((), part, None)
    driver.step()
    schedule = driver.schedule()
    last = replace(driver.sample(schedule), sampled_token_ids={"a": [8]}, prompt_logprobs={"a": part})
    (news,) = driver.update(schedule, last)
    assert (news.new_token_ids, news.prompt_logprobs) == ((8,), part)


def test_a_nan_in_a_prompt_ends_the_request_with_its_first_chunk(tmp_path: Path, tier: Tier) -> None:
    folder = make_tiny_llama(tmp_path, tie=False)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][300] = np.nan
    save_file(tensors, file)
    run = Run(str(folder), tier, max_num_batched_tokens=24)
    params = SamplingParams(prompt_logprobs=1, max_tokens=3, **GREEDY)
    outputs = run.finish({"good": (PROMPT[:15], params), "bad": ([300, *PROMPT], params)})
    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert "NaN" in (outputs["bad"].error or "")
    assert outputs["bad"].prompt_logprobs == [None]
    assert outputs["good"].outputs[0].finish_reason == "length"
    assert len(entries(outputs["good"])) == 14


def test_json_lists_them_beside_the_prompt_with_its_own_token_first(
    model: str, tier_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--json", "--prompt-logprobs", "2", "--max-tokens", "2", "--temperature", "0"]
    assert main(["generate", "--model", model, "--tier", tier_name, *options, "Hi there"]) == 0
    line = json.loads(capsys.readouterr().out)
    first, *others = line["prompt_logprobs"]
    assert first is None
    assert [table[0]["token_id"] for table in others] == line["prompt_token_ids"][1:]
    assert set(others[0][0]) == {"token_id", "logprob", "rank", "decoded_token"}
    assert line["outputs"][0]["logprobs"] is None
