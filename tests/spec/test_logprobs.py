"""Log-probabilities of the raw logits, on both tiers."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from reference.contracts.logits import top_logprobs
from reference.contracts.protocols import Tier
from reference.contracts.request import EngineCoreRequest
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput, TokenLogprob
from reference.frontend.cli import main
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.output_processor import OutputProcessor
from reference.frontend.outputs import RequestOutput
from reference.frontend.tiers import load_tier
from tests.factories import Driver, make_config, make_request
from tests.scripted import byte_tokenizer
from tests.tiny_models import make_tiny_llama

PROMPT = list(range(10, 30))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_llama(tmp_path_factory.mktemp("model")))


def generate(model: str, tier: Tier, params: SamplingParams, **options: Any) -> RequestOutput:
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, **options), tier)
    engine.add_request("a", PROMPT, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs[-1]


def test_the_sampled_token_comes_first_and_then_the_best_by_rank() -> None:
    """Probabilities 0.1, 0.6, 0.3: token 0 was sampled, and ranks third."""
    logits = np.log(np.array([0.1, 0.6, 0.3])).astype(np.float32) + 5
    first, second, third = top_logprobs(logits, token_id=0, num_logprobs=2)
    assert [(entry.token_id, entry.rank) for entry in (first, second, third)] == [(0, 3), (1, 1), (2, 2)]
    # float32 logits near 5 are rounded by up to 2.4e-7.
    expected = [math.log(p) for p in (0.1, 0.6, 0.3)]
    assert [entry.logprob for entry in (first, second, third)] == pytest.approx(expected, abs=1e-6)


def test_a_sampled_token_among_the_best_is_not_repeated() -> None:
    logits = np.array([1.0, 3.0, 2.0], dtype=np.float32)
    assert [(e.token_id, e.rank) for e in top_logprobs(logits, 2, 2)] == [(2, 2), (1, 1)]


def test_of_equal_logits_the_lower_id_ranks_first() -> None:
    logits = np.array([2.0, 5.0, 5.0, 5.0], dtype=np.float32)
    assert [(e.token_id, e.rank) for e in top_logprobs(logits, 3, 3)] == [(3, 3), (1, 1), (2, 2)]


def test_a_masked_token_has_probability_zero_and_huge_logits_do_not_overflow() -> None:
    (sampled, best) = top_logprobs(np.array([-np.inf, 3e38, 1.0], dtype=np.float32), 0, 1)
    assert (sampled.logprob, sampled.rank) == (-math.inf, 3)
    assert (best.token_id, best.logprob) == (1, 0.0)


def test_b43_logprobs_0_reports_each_sampled_token_and_none_reports_nothing(model: str, tier: Tier) -> None:
    params = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    completion = generate(model, tier, SamplingParams(logprobs=0, **params)).outputs[0]
    assert completion.logprobs is not None
    assert [list(table) for table in completion.logprobs] == [[token_id] for token_id in completion.token_ids]
    assert all(
        table[token_id].rank == 1
        for table, token_id in zip(completion.logprobs, completion.token_ids, strict=True)
    )
    total = sum(next(iter(table.values())).logprob for table in completion.logprobs)
    assert completion.cumulative_logprob == pytest.approx(total)
    silent = generate(model, tier, SamplingParams(**params)).outputs[0]
    assert silent.logprobs is None
    assert silent.cumulative_logprob is None
    assert silent.token_ids == completion.token_ids


def test_they_are_of_the_raw_logits_whatever_is_done_to_them_before_the_draw(model: str, tier: Tier) -> None:
    """A bias forces token 77; its logprob is that of the model, which thinks little of it."""
    rows: list[np.ndarray] = []

    def keep(_: SchedulerOutput, output: ModelRunnerOutput) -> None:
        assert output.logits is not None
        rows.extend(row for sampled in output.logits.values() for row in sampled)

    params = SamplingParams(
        logprobs=3, logit_bias={77: 100}, temperature=0.7, top_k=5, max_tokens=4, ignore_eos=True
    )
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, keep_logits=True), tier, on_step=keep)
    engine.add_request("a", PROMPT, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    completion = outputs[-1].outputs[0]
    assert completion.token_ids == [77] * 4
    assert completion.logprobs is not None
    assert len(rows) == 4
    for row, table in zip(rows, completion.logprobs, strict=True):
        z = row.astype(np.float64)
        log_softmax = z - z.max() - np.log(np.exp(z - z.max()).sum())
        assert next(iter(table)) == 77
        for token_id, entry in table.items():
            assert entry.logprob == pytest.approx(log_softmax[token_id], abs=1e-12)
            assert entry.rank == 1 + (z > z[token_id]).sum()
        others = [token_id for token_id in table if token_id != 77]
        assert others == np.argsort(-z, kind="stable")[:3].tolist()


def test_both_tiers_report_the_same_tokens_and_probabilities(model: str) -> None:
    params = SamplingParams(logprobs=5, n=3, seed=4, max_tokens=8, ignore_eos=True, frequency_penalty=0.5)
    first, second = (generate(model, load_tier(name), params) for name in ("reference", "fast"))
    for one, other in zip(first.outputs, second.outputs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert len(one.logprobs) == len(one.token_ids) == 8
        for table, other_table in zip(one.logprobs, other.logprobs, strict=True):
            assert list(table) == list(other_table)
            # The tiers' logits differ by float32 rounding, on this model by less than 1e-4.
            others = [entry.logprob for entry in other_table.values()]
            assert [entry.logprob for entry in table.values()] == pytest.approx(others, abs=1e-4)


def test_55_there_is_an_entry_for_each_token_up_to_the_one_that_completed_a_stop_string(
    model: str, tier: Tier
) -> None:
    plain = generate(model, tier, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)).outputs[0]
    stop = next(plain.text[i : i + 2] for i in range(3, 9) if "\ufffd" not in plain.text[i : i + 2])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, stop=stop)
    completion = generate(model, tier, params).outputs[0]
    assert completion.finish_reason == "stop"
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids) < 12


def test_60_they_survive_preemption_without_a_gap(model: str, tier: Tier) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, block_size=4, num_blocks=14), tier)
    params = SamplingParams(temperature=0, logprobs=2, max_tokens=20, ignore_eos=True)
    for name in ("a", "b"):
        engine.add_request(name, PROMPT[:15], params)
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        last.update({output.request_id: output for output in engine.step()})
    assert sum(output.metrics.num_preemptions for output in last.values()) > 0
    (first,), (second,) = (output.outputs for output in last.values())
    assert first.logprobs is not None
    assert len(first.logprobs) == 20
    assert [list(table) for table in first.logprobs] == [list(table) for table in second.logprobs or []]


def test_a_token_is_decoded_alone(model: str, tier: Tier) -> None:
    output = generate(model, tier, SamplingParams(temperature=0, logprobs=20, max_tokens=3, ignore_eos=True))
    tokenizer = LLMEngine.from_engine_args(EngineArgs(model=model), tier).tokenizer
    assert output.outputs[0].logprobs is not None
    for table in output.outputs[0].logprobs:
        for token_id, entry in table.items():
            assert entry.decoded_token == tokenizer.decode([token_id], skip_special_tokens=False)


def test_json_lists_them_with_the_sampled_token_first(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "generate",
        "--model",
        model,
        "--tier",
        "reference",
        "--json",
        "--logprobs",
        "2",
        "--max-tokens",
        "3",
        "Hi",
    ]
    assert main(arguments) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    assert [entries[0]["token_id"] for entries in output["logprobs"]] == output["token_ids"]
    assert set(output["logprobs"][0][0]) == {"token_id", "logprob", "rank", "decoded_token"}


@pytest.mark.parametrize("value", [-1, 21, True, "5", 1.0])
def test_a_bad_number_of_logprobs_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^logprobs must be"):
        SamplingParams(logprobs=value)  # type: ignore[arg-type]


def entries(*token_ids: int) -> list[tuple[TokenLogprob, ...]]:
    return [(TokenLogprob(token_id, -0.5, 1),) for token_id in token_ids]


def test_entries_behind_a_stop_token_of_the_same_step_are_cut_with_the_tokens(tier: Tier) -> None:
    driver = Driver(tier, make_config())
    driver.add(make_request("a", 5, stop_token_ids=[9], logprobs=0))
    output = ModelRunnerOutput({"a": [7, 9, 8]}, logprobs={"a": entries(7, 9, 8)})
    (news,) = driver.update(driver.schedule(), output)
    assert news.new_token_ids == (7, 9)
    assert [entry[0].token_id for entry in news.new_logprobs] == [7, 9]


def test_entries_behind_a_stop_string_of_the_same_step_are_cut_with_the_tokens() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("abc")
    processor = OutputProcessor(tokenizer)
    params = SamplingParams(stop="b", logprobs=0)
    processor.add_request(EngineCoreRequest("a", (1,), params, seed=0, arrival=(0, 0)), None)
    (output,), to_abort = processor.process_outputs(
        [EngineCoreOutput("a", tuple(ids), new_logprobs=tuple(entries(*ids)))]
    )
    assert to_abort == ["a"]
    assert output.outputs[0].token_ids == ids[:2]
    assert output.outputs[0].logprobs is not None
    assert [list(table) for table in output.outputs[0].logprobs] == [[token_id] for token_id in ids[:2]]
    assert output.outputs[0].cumulative_logprob == -1.0
