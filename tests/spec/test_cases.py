"""Reported bugs of other engines, each as a short case with the right behaviour; the number is that of the report."""

from __future__ import annotations

import json
from collections.abc import Sized
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.contracts.config import PreemptionMode, SchedulingPolicy
from reference.contracts.protocols import Tier
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.outputs import RequestOutput
from reference.frontend.workload import Workload, WorkloadRequest, run_workload
from tests.factories import Driver, make_config, make_request
from tests.spec.test_sampler import TierSampler
from tests.tiny_models import make_tiny_llama


@pytest.fixture
def sampler(tier_name: str) -> TierSampler:
    return TierSampler(tier_name)


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12])
def test_b23_a_tiny_temperature_gives_the_greedy_token(sampler: TierSampler, temperature: float) -> None:
    row = [2.875, 2.955, 11.06]
    for position in range(20):
        assert sampler([row], temperature=temperature, seed=7, position=position) == [2]
    close = [11.0, 11.06, 2.875]  # 0.06 apart: at 1e-3 the other is less likely than e^-60
    assert {sampler([close], temperature=temperature, position=p)[0] for p in range(20)} == {1}


def test_b25_a_nucleus_that_rounding_never_fills_keeps_the_whole_row(sampler: TierSampler) -> None:
    """The last of many tiny probabilities may be lost from the running sum; nothing may be read behind its end."""
    top_p = np.nextafter(1.0, 0.0)
    row = np.full(5000, -3.0, dtype=np.float32)
    drawn = {sampler([row], top_p=top_p, seed=seed)[0] for seed in range(200)}
    assert all(0 <= token_id < len(row) for token_id in drawn)
    assert len(drawn) > 150
    assert max(drawn) > 4800
    assert [sampler([row], top_p=1.0, seed=seed) for seed in range(50)] == [
        sampler([row], seed=seed) for seed in range(50)
    ]


def test_b25_top_p_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams(top_p=0)


def generate(
    model: Path, tier: Tier, requests: list[WorkloadRequest], **options: Any
) -> dict[str, RequestOutput]:
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(model), **options), tier)
    return run_workload(engine, Workload(tuple(requests)))


def test_208_two_equal_prompts_in_one_prefill_batch_give_the_tokens_of_a_serial_run(
    tmp_path: Path, tier: Tier
) -> None:
    """The second hits blocks that the first computes in the same step: every layer writes before it attends."""
    make_tiny_llama(tmp_path)
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=8, ignore_eos=True)
    prompt = tuple(range(20, 70))

    def twins(later: int) -> list[WorkloadRequest]:
        return [
            WorkloadRequest("a", prompt_token_ids=prompt, params=params),
            WorkloadRequest("b", prompt_token_ids=prompt, params=params, arrival_step=later),
        ]

    together, serial = generate(tmp_path, tier, twins(0)), generate(tmp_path, tier, twins(100))
    cold = generate(tmp_path, tier, twins(0), enable_prefix_caching=False)
    assert together["b"].num_cached_tokens == serial["b"].num_cached_tokens == 48
    assert cold["b"].num_cached_tokens == 0
    tokens = {run[name].outputs[0].token_ids == cold["a"].outputs[0].token_ids
              for run in (together, serial, cold) for name in "ab"}  # fmt: skip
    assert tokens == {True}


def test_417_a_fork_copies_a_block_with_two_holders_and_writes_one_with_one_holder_in_place(
    tier: Tier,
) -> None:
    driver = Driver(tier, make_config())
    driver.add(make_request("a", 6, n=2))
    driver.step()
    (copy,) = driver.step().block_copies  # the first writer copies, the last one does not
    tables = driver.scheduler.snapshot().cache.block_tables
    assert (tables["a"][copy.index], tables["1_a"][copy.index]) == (copy.target, copy.source)
    assert driver.step().block_copies == ()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_5578_no_prompt_is_admitted_while_preempted_siblings_wait(tier: Tier, mode: PreemptionMode) -> None:
    config = make_config(
        num_usable_blocks=30, num_host_blocks=12, preemption_mode=mode, max_num_seqs=32
    )  # 8 siblings of 11 tokens hold 3 blocks each
    driver = Driver(tier, config)
    for i in range(3):
        driver.add(make_request(f"r{i}", 5, arrival=i, n=8, max_tokens=16))
    preempted = 0
    while driver.scheduler.has_unfinished_requests():
        before = driver.scheduler.snapshot()
        schedule = driver.step()
        preempted += len(schedule.preempted_req_ids)
        admitted = [new.request_id for new in schedule.scheduled_new_reqs if not new.is_forked]
        # Under FCFS whoever was swapped out comes first, then those that were preempted, then new prompts.
        order = [*before.swapped, *before.waiting]
        assert admitted == order[: len(admitted)]
        num_host_blocks = sum(map(len, driver.scheduler.snapshot().cache.host_tables.values()))
        assert num_host_blocks <= 12
    assert preempted > 0
    assert [len(tokens) for tokens in driver.outputs.values()] == [16] * 24
    driver.assert_nothing_leaked()


def test_29747_equal_priorities_and_arrivals_with_siblings_never_compare_requests(tier: Tier) -> None:
    driver = Driver(tier, make_config(scheduling_policy="priority", num_usable_blocks=6, max_num_seqs=3))
    driver.add(*(make_request(name, 5, priority=1, n=2, max_tokens=9) for name in "cab"))
    driver.run()
    assert driver.num_preemptions > 0
    assert [len(tokens) for tokens in driver.outputs.values()] == [9] * 6
    driver.assert_nothing_leaked()


def test_45561_with_one_slot_a_high_priority_waits_for_the_running_request_and_for_nobody_else(
    tier: Tier,
) -> None:
    driver = Driver(tier, make_config(scheduling_policy="priority", max_num_seqs=1))
    driver.add(
        make_request("low", 4, priority=5, max_tokens=3),
        make_request("other", 4, arrival=1, priority=5, max_tokens=3),
    )
    driver.step()
    driver.add(make_request("high", 4, arrival=2, priority=0, max_tokens=3))
    order = [list(schedule.num_scheduled_tokens) for schedule in driver.run()]
    assert order == [["low"]] * 2 + [["high"]] * 3 + [["other"]] * 3


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_41951_a_preempted_request_keeps_its_place_among_equals(tier: Tier, policy: SchedulingPolicy) -> None:
    driver = Driver(tier, make_config(scheduling_policy=policy, num_usable_blocks=4))
    driver.add(*(make_request(name, 8, arrival=i, max_tokens=3) for i, name in enumerate("cb")))
    driver.step()
    driver.add(make_request("a", 8, arrival=2, max_tokens=3))
    assert driver.step().preempted_req_ids == ("b",)
    assert driver.scheduler.snapshot().waiting == ("b", "a")


def sizes(*owners: Any) -> dict[str, int]:
    """Lengths of all tables and lists of some objects, and of those that they own."""
    return {
        f"{type(owner).__name__}.{name}": len(value)
        for owner in owners
        for name, value in vars(owner).items()
        if isinstance(value, Sized)
    }


def test_44490_nothing_grows_with_the_number_of_requests_that_came_and_went(tier: Tier) -> None:
    driver = Driver(tier, make_config(num_usable_blocks=12, preemption_mode="swap", num_host_blocks=8))
    scheduler, manager = driver.scheduler, driver.manager
    seen = []
    for turn in range(4):
        for i in range(12):
            number = 12 * turn + i
            request = make_request(f"r{number}", [7] * (3 + i), arrival=number, n=1 + i % 3, max_tokens=9)
            driver.add(request)
            driver.step()
            if i % 4 == 0:
                driver.abort(f"r{number}")
        driver.run()
        driver.schedule()  # this is when the runner is told of those that ended
        seen.append(sizes(scheduler, manager, manager.block_pool, manager.host_pool))  # type: ignore[attr-defined]
    assert driver.num_preemptions > 0
    bounded = [{k: v for k, v in each.items() if "cached_blocks" not in k} for each in seen]
    assert bounded[1:] == bounded[:1] * 3
    assert all(each["BlockPool.cached_blocks"] <= 12 for each in seen)


def test_15597_sequences_leave_no_entry_in_the_tables_of_ids(tmp_path: Path, tier: Tier) -> None:
    make_tiny_llama(tmp_path)
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(tmp_path)), tier)
    params = SamplingParams(n=5, max_tokens=4, stop=["e"], seed=0)
    requests = [
        WorkloadRequest(f"r{i}", prompt_token_ids=(9, 8, 7), params=params, abort_step=2 if i == 1 else None)
        for i in range(3)
    ]
    finished = run_workload(engine, Workload(tuple(requests)))
    assert [len(output.outputs) for output in finished.values()] == [5, 5, 5]
    assert engine.output_processor.states == {}
    assert engine.output_processor.sequences == {}
    assert engine.engine_core.scheduler.requests == {}
    assert not engine.has_unfinished_requests()


def test_4589_ignore_eos_ignores_every_end_of_sequence_id_and_no_stop_id(tmp_path: Path, tier: Tier) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [1, 7]}))
    ends = {"temperature": 0, "max_tokens": 6, "logit_bias": {7: 100.0}}
    answers = generate(
        tmp_path,
        tier,
        [
            WorkloadRequest(name, prompt_token_ids=(9, 10, 11), params=SamplingParams(**ends, **more))
            for name, more in {
                "ends": {},
                "goes on": {"ignore_eos": True},
                "stops": {"ignore_eos": True, "stop_token_ids": [7]},
            }.items()
        ],
    )
    ids = {name: answer.outputs[0].token_ids for name, answer in answers.items()}
    assert ids == {"ends": [7], "goes on": [7] * 6, "stops": [7]}
    reasons = {name: (a.outputs[0].finish_reason, a.outputs[0].stop_reason) for name, a in answers.items()}
    assert reasons == {"ends": ("stop", None), "goes on": ("length", None), "stops": ("stop", 7)}
