"""`twinfer bench scheduler`: what the control plane costs, without a model.

Tokens are scripted, so a step is `schedule()` and `update_from_output()` and nothing else. Each figure is the median
over many steps, all tiers measured in the same minute.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from reference.contracts.config import CacheConfig, EngineConfig, SchedulerConfig, cdiv
from reference.contracts.protocols import Scheduler, Tier
from reference.contracts.request import Request, RequestStatus
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import ModelRunnerOutput
from reference.frontend.cli_options import add_tier_option
from reference.frontend.conform import NO_MODEL
from reference.frontend.tiers import available_tiers, load_tier

NUM_RUNNING, NUM_TOKENS, BLOCK_SIZE, NUM_STEPS = 256, 1000, 16, 200
_PARAMS = SamplingParams(max_tokens=10_000, ignore_eos=True)


@dataclass(frozen=True)
class SchedulerCosts:
    """Medians of one tier, in milliseconds."""

    tier: str
    step: float  # 256 running requests of 1,000 tokens each
    by_cached_blocks: dict[int, float]  # the same step, with so many blocks in the prefix cache
    by_waiting: dict[int, float]  # the same step, with so many requests waiting
    add: float  # adding a request of 1,000 tokens, hashes and prefix lookup included


def add_options(parser: argparse.ArgumentParser, tier: str | None) -> None:
    add_tier_option(parser, tier)


def run(arguments: argparse.Namespace) -> int:
    names = [arguments.tier] if arguments.tier is not None else sorted(available_tiers(), reverse=True)
    print_costs(bench_scheduler([load_tier(name) for name in names]))
    return 0


def bench_scheduler(tiers: Sequence[Tier]) -> list[SchedulerCosts]:
    """Measure each tier."""
    return [
        SchedulerCosts(
            tier=tier.name,
            step=_step_cost(tier),
            by_cached_blocks={n: _step_cost(tier, num_cached_blocks=n) for n in (1_000, 10_000, 100_000)},
            by_waiting={n: _step_cost(tier, num_waiting=n) for n in (10, 1_000, 10_000)},
            add=_add_cost(tier),
        )
        for tier in tiers
    ]


def print_costs(costs: Sequence[SchedulerCosts]) -> None:
    """One row a measurement, one column a tier, and how many times quicker the last tier is than the first."""
    table = Table(title=f"Control plane, {NUM_RUNNING} running requests of {NUM_TOKENS} tokens, median ms")
    table.add_column("measured")
    for cost in costs:
        table.add_column(cost.tier, justify="right")
    if len(costs) > 1:
        table.add_column(f"{costs[0].tier} / {costs[-1].tier}", justify="right")

    def add(label: str, values: Sequence[float]) -> None:
        ratio = [f"{values[0] / values[-1]:.1f}"] if len(values) > 1 else []
        table.add_row(label, *(f"{value:.3f}" for value in values), *ratio)

    add("a step", [cost.step for cost in costs])
    for number in costs[0].by_cached_blocks:
        add(f"a step, {number:,} cached blocks", [cost.by_cached_blocks[number] for cost in costs])
    for number in costs[0].by_waiting:
        add(f"a step, {number:,} waiting", [cost.by_waiting[number] for cost in costs])
    add(f"adding a request of {NUM_TOKENS:,} tokens", [cost.add for cost in costs])
    Console().print(table)


def _make_scheduler(tier: Tier, num_spare_blocks: int) -> Scheduler:
    """A scheduler whose pool holds the running requests to the end of the measurement, and `num_spare_blocks` more."""
    num_blocks = NUM_RUNNING * cdiv(NUM_TOKENS + NUM_STEPS + 10, BLOCK_SIZE) + num_spare_blocks + 1
    return tier.make_scheduler(
        EngineConfig(
            NO_MODEL,
            CacheConfig(BLOCK_SIZE, num_blocks),
            SchedulerConfig(
                max_model_len=8192, max_num_seqs=NUM_RUNNING, max_num_batched_tokens=NUM_RUNNING * NUM_TOKENS
            ),
        )
    )


def _request(number: int, num_tokens: int = NUM_TOKENS) -> Request:
    """Prompts share no prefix."""
    return Request(
        request_id=f"r{number}",
        all_token_ids=[number, *range(1, num_tokens)],
        num_prompt_tokens=num_tokens,
        sampling_params=_PARAMS,
        seed=0,
        arrival=(number, 0),
    )


def _step(scheduler: Scheduler) -> float:
    """Seconds of one step: schedule and update; making up the tokens does not count."""
    started = time.perf_counter()
    schedule = scheduler.schedule()
    scheduled = time.perf_counter()
    requests = scheduler.requests
    sampled = {
        name: [7]
        for name in schedule.num_scheduled_tokens
        if requests[name].num_computed_tokens == requests[name].num_tokens
    }
    output = ModelRunnerOutput(sampled)
    updating = time.perf_counter()
    scheduler.update_from_output(schedule, output)
    return scheduled - started + time.perf_counter() - updating


def _step_cost(tier: Tier, num_cached_blocks: int = 0, num_waiting: int = 0) -> float:
    scheduler = _make_scheduler(tier, num_spare_blocks=num_cached_blocks)
    _fill_cache(scheduler, num_cached_blocks)
    for number in range(NUM_RUNNING + num_waiting):
        scheduler.add_request(_request(number))
    _step(scheduler)  # all prompts
    return 1e3 * statistics.median(_step(scheduler) for _ in range(NUM_STEPS))


def _fill_cache(scheduler: Scheduler, num_blocks: int) -> None:
    """Leave `num_blocks` hashed blocks behind, in the free queue."""
    per_request = 500  # blocks of one request: within the model's length
    for number in range(cdiv(num_blocks, per_request)):
        blocks = min(per_request, num_blocks - number * per_request)
        scheduler.add_request(_request(10**6 + number, blocks * BLOCK_SIZE + 1))
        schedule = scheduler.schedule()
        (name,) = schedule.num_scheduled_tokens
        scheduler.update_from_output(schedule, ModelRunnerOutput({name: [7]}))
        scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)


def _add_cost(tier: Tier) -> float:
    """Adding, and the prefix lookup for which the tokens are hashed."""
    scheduler = _make_scheduler(tier, num_spare_blocks=0)
    seconds = []
    for number in range(200):
        request = _request(number)
        started = time.perf_counter()
        scheduler.add_request(request)
        scheduler.kv_cache_manager.get_computed_blocks(request)
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds)
