"""Sampling rules in a whole engine with a real (tiny) model, on both tiers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reference.contracts.sampling_params import SamplingParams
from reference.frontend.diff import compare_tiers
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.outputs import RequestOutput
from reference.frontend.tiers import load_tier
from reference.frontend.workload import Workload, WorkloadRequest, run_workload
from tests.tiny_models import make_tiny_llama

EOS = 1
PROMPT = tuple(range(20, 40))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_llama(tmp_path_factory.mktemp("model")))


def generate(model: str, tier_name: str, *params: SamplingParams, **options: Any) -> list[RequestOutput]:
    """The prompt under each of the parameters, all in one batch."""
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, **options), load_tier(tier_name))
    requests = tuple(
        WorkloadRequest(f"r{i}", prompt_token_ids=PROMPT, params=each) for i, each in enumerate(params)
    )
    finished = run_workload(engine, Workload(requests))
    return [finished[f"r{i}"] for i in range(len(params))]


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 32, **params})


def test_b29_the_token_after_min_tokens_is_the_first_that_may_end(model: str, tier_name: str) -> None:
    (output,) = generate(model, tier_name, greedy(min_tokens=4, logit_bias={EOS: 100}))
    ids = output.outputs[0].token_ids
    assert (len(ids), ids[-1], output.outputs[0].finish_reason) == (5, EOS, "stop")
    assert EOS not in ids[:4]


def test_b29_every_end_of_sequence_id_and_stop_id_waits_for_min_tokens(
    tmp_path: Path, tier_name: str
) -> None:
    folder = make_tiny_llama(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [EOS, 7]}))
    bias = {EOS: 90.0, 7: 100.0, 9: 95.0}
    for stops in ((), (9,)):
        (output,) = generate(
            str(folder), tier_name, greedy(min_tokens=4, logit_bias=bias, stop_token_ids=stops)
        )
        ids = output.outputs[0].token_ids
        if stops:
            assert not {EOS, 7, 9} & set(ids[:4])
            assert (len(ids), ids[-1]) == (5, 7)
        else:
            assert ids == [9, 9, 9, 9, 7]


def test_b29_stop_strings_wait_for_min_tokens(model: str, tier_name: str) -> None:
    e = 2 + sorted_bytes_index("e")
    params = greedy(logit_bias={e: 100}, stop=["e"])
    without, waiting = generate(
        model, tier_name, params, greedy(logit_bias={e: 100}, stop=["e"], min_tokens=15)
    )
    assert len(without.outputs[0].token_ids) == 1
    assert len(waiting.outputs[0].token_ids) >= 15
    assert (waiting.outputs[0].finish_reason, waiting.outputs[0].stop_reason) == ("stop", "e")


def sorted_bytes_index(character: str) -> int:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet()).index(character)


def test_bad_words_never_appear_in_the_text(model: str, tier_name: str) -> None:
    e, r = (2 + sorted_bytes_index(c) for c in "er")
    bias = {e: 100, r: 60}  # "ee" is two tokens, and no other token is a rival
    free, tamed = generate(
        model, tier_name, greedy(logit_bias=bias), greedy(logit_bias=bias, bad_words=["ee"])
    )
    assert free.outputs[0].text == "e" * 32
    assert tamed.outputs[0].text == "er" * 16


def test_masks_that_leave_no_token_later_end_the_request_with_an_error_and_no_other(
    model: str, tier_name: str
) -> None:
    e = 2 + sorted_bytes_index("e")
    dead_end, other = generate(
        model,
        tier_name,
        greedy(allowed_token_ids=[e], bad_words=["eee"]),
        greedy(max_tokens=9, ignore_eos=True),
    )
    assert (dead_end.outputs[0].finish_reason, dead_end.outputs[0].token_ids) == ("error", [e, e])
    assert dead_end.error is not None
    assert "left no token" in dead_end.error
    assert (other.outputs[0].finish_reason, len(other.outputs[0].token_ids)) == ("length", 9)


def test_penalties_survive_preemption(model: str, tier_name: str) -> None:
    """Prompt and output change places in no record: a resumed request comes back with both in one list."""
    params = [
        SamplingParams(
            temperature=0, max_tokens=40, ignore_eos=True, frequency_penalty=0.8, presence_penalty=0.6,
            repetition_penalty=1.3, seed=i,
        )
        for i in range(2)
    ]  # fmt: skip
    ample = generate(model, tier_name, *params, num_blocks=40, block_size=4, max_model_len=64)
    tight = generate(model, tier_name, *params, num_blocks=21, block_size=4, max_model_len=64)
    assert sum(output.metrics.num_preemptions for output in tight) > 0
    assert [o.outputs[0].token_ids for o in tight] == [o.outputs[0].token_ids for o in ample]


def test_what_a_request_asks_for_does_not_change_its_neighbours(model: str, tier_name: str) -> None:
    plain = SamplingParams(temperature=0.8, seed=5, max_tokens=20)
    loud = [
        SamplingParams(temperature=0, repetition_penalty=2.0, max_tokens=20),
        SamplingParams(seed=1, logit_bias={5: 20}, min_p=0.1, max_tokens=20),
        SamplingParams(seed=2, allowed_token_ids=list(range(2, 60)), min_tokens=5, max_tokens=20),
    ]
    (alone,) = generate(model, tier_name, plain)
    together = generate(model, tier_name, loud[0], plain, *loud[1:])
    assert together[1].outputs[0].token_ids == alone.outputs[0].token_ids
    for i, params in ((0, loud[0]), (2, loud[1]), (3, loud[2])):
        assert together[i].outputs[0].token_ids == generate(model, tier_name, params)[0].outputs[0].token_ids


def test_a_workload_with_every_rule_is_equal_on_both_tiers(model: str) -> None:
    rules: list[dict[str, Any]] = [
        {}, {"min_p": 0.05}, {"repetition_penalty": 1.3}, {"presence_penalty": 0.9}, {"frequency_penalty": 0.5},
        {"logit_bias": {5: 5.0, EOS: -100}}, {"allowed_token_ids": list(range(0, 300, 3))}, {"bad_words": ["e", "to"]},
        {"min_tokens": 10, "stop_token_ids": list(range(2, 150))},
    ]  # fmt: skip
    requests = tuple(
        WorkloadRequest(
            f"r{i}-{t}", prompt_token_ids=PROMPT, params=SamplingParams(temperature=t, seed=i, **rule)
        )
        for i, rule in enumerate(rules)
        for t in (0.0, 1.3)
    )
    report = compare_tiers((load_tier("reference"), load_tier("fast")), model, Workload(requests))
    assert report.divergence is None
    assert report.excused == []
    assert report.num_errors == 0
