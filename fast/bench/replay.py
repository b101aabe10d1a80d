"""A workload on the real scheduler without a model: what each step computes, reads and holds, counted exactly.

Lengths are fixed and nobody stops early, so the schedule does not depend on which tokens a model would draw: the steps
counted here are those of a timed run of the same configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fast.bench.workloads import BenchRequest, BenchWorkload, prompts_of
from reference.contracts.config import EngineConfig
from reference.contracts.protocols import Scheduler, Tier
from reference.contracts.request import Request
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import ModelRunnerOutput, SchedulerOutput


@dataclass(frozen=True)
class Step:
    """One step of the engine. Slots are places for the K and V of one token."""

    num_tokens: int  # T, computed in this step
    num_rows: int  # R, logits rows: sequences that draw a token
    num_context_tokens: int  # tokens whose K and V are read, once for each sequence that attends to them
    num_pairs: int  # (query, key) pairs of attention
    num_running: int
    num_running_tokens: int  # tokens with K and V, counted in every sequence that has them
    num_final_tokens: int  # prompt + answer of all running: what they will have in the end
    num_held_tokens: int  # tokens with K and V, a shared block counted once
    num_held_slots: int  # slots of all held blocks


def replay(tier: Tier, config: EngineConfig, workload: BenchWorkload) -> list[Step]:
    """The steps of `workload` in this configuration.

    Raises:
        ValueError: a request does not fit the model or the pool.
    """
    scheduler = tier.make_scheduler(config)
    steps: list[Step] = []
    sequences: list[list[int]] = []
    arrival = 0
    for wave in workload.waves:
        prompts = prompts_of(wave, sequences)
        for prompt, request in zip(prompts, wave, strict=True):
            scheduler.add_request(_request(arrival, prompt, request, config))
            arrival += 1
        steps += _run(scheduler, config.cache.block_size)
        first = arrival - len(wave)
        sequences = [
            [*prompt, *(_token(first + i) for _ in range(request.max_tokens))]
            for i, (prompt, request) in enumerate(zip(prompts, wave, strict=True))
        ]
    return steps


def _request(number: int, prompt: Sequence[int], request: BenchRequest, config: EngineConfig) -> Request:
    total = len(prompt) + request.max_tokens
    if total > config.max_total_tokens:
        raise ValueError(
            f"The workload has a request of {total} tokens, and this engine takes at most {config.max_total_tokens}."
        )
    params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
    return Request(str(number), list(prompt), len(prompt), params, seed=0, arrival=(number, 0))


def _token(number: int) -> int:
    """What request `number` generates over and over: nobody else's block has the same content."""
    return 10**6 + number


def _run(scheduler: Scheduler, block_size: int) -> Iterator[Step]:
    while scheduler.has_unfinished_requests():
        schedule = scheduler.schedule()
        done = {name for name in schedule.num_scheduled_tokens if _is_complete(scheduler.requests[name])}
        yield _count(scheduler, schedule, len(done), block_size)
        scheduler.update_from_output(
            schedule, ModelRunnerOutput({name: [_token(int(name))] for name in done})
        )


def _is_complete(request: Request) -> bool:
    """Whether it draws a token in this step."""
    return request.num_computed_tokens == request.num_tokens


def _count(scheduler: Scheduler, schedule: SchedulerOutput, num_rows: int, block_size: int) -> Step:
    snapshot = scheduler.snapshot()
    context = pairs = 0
    for name, count in schedule.num_scheduled_tokens.items():
        end = scheduler.requests[name].num_computed_tokens
        context += end
        pairs += (
            count * end - count * (count - 1) // 2
        )  # the last query sees `end` keys, each one before it one less
    filled: dict[int, int] = {}  # block -> slots of it that are in use
    for name, computed in snapshot.num_computed_tokens.items():
        for index, block in enumerate(snapshot.cache.block_tables[name]):
            used = min(block_size, max(0, computed - index * block_size))
            filled[block] = max(used, filled.get(block, 0))
    running = [scheduler.requests[name] for name in snapshot.running]
    return Step(
        num_tokens=sum(schedule.num_scheduled_tokens.values()),
        num_rows=num_rows,
        num_context_tokens=context,
        num_pairs=pairs,
        num_running=len(running),
        num_running_tokens=sum(snapshot.num_computed_tokens.values()),
        num_final_tokens=sum(r.num_prompt_tokens + (r.sampling_params.max_tokens or 0) for r in running),
        num_held_tokens=sum(filled.values()),
        num_held_slots=len(snapshot.cache.ref_counts) * block_size,
    )
