"""Runs of the real engine for the pages. Scripted ones need no weights: the scheduler and the cache manager are real,
and only the tokens are made up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from reference.contracts.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from reference.contracts.protocols import Checkpoint, KVCacheManager, ModelRunner, Scheduler, Tier
from reference.contracts.request import EngineCoreRequest
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from reference.contracts.trace import StepTrace
from reference.frontend.engine_core import EngineCore
from reference.frontend.tiers import load_tier

_SHAPE = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=1000, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, head_dim=4, max_position_embeddings=4096, rms_norm_eps=1e-5,
    rope_theta=10_000.0, tie_word_embeddings=True, bos_token_id=None, eos_token_ids=(),
)  # fmt: skip
_MOST_STEPS = 5000


@dataclass
class Arrival:
    """A request of a scripted run. `prompt` is a number of tokens nobody shares, or the tokens themselves."""

    name: str
    prompt: int | Sequence[int]
    max_tokens: int = 4
    arrives: int = 0
    priority: int = 0
    n: int = 1


@dataclass
class _ScriptedRunner:
    """Token number p of any request is 500 + p; drafts are right, but for the last of three."""

    num_drafts: int
    states: dict[str, list[int]] = field(
        default_factory=dict
    )  # [known tokens, prompt tokens, computed tokens, n]

    def execute(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        for new in schedule.scheduled_new_reqs:
            self.states[new.request_id] = [
                len(new.token_ids), new.num_prompt_tokens, new.num_computed_tokens, new.sampling_params.n,
            ]  # fmt: skip
        for delta in schedule.scheduled_running_reqs:
            state = self.states[delta.request_id]
            state[0] += len(delta.new_token_ids)
            state[2] = delta.num_computed_tokens
        sampled: dict[str, list[int]] = {}
        siblings: dict[str, list[int]] = {}
        proposed: dict[str, list[int]] = {}
        for request_id, count in schedule.num_scheduled_tokens.items():
            known, prompt, computed, n = self.states[request_id]
            if computed + count < known:
                continue
            output = known - prompt
            new_tokens = []
            for draft in (*schedule.scheduled_spec_decode_tokens.get(request_id, ()), None):
                new_tokens.append(500 + output + len(new_tokens))
                if new_tokens[-1] != draft:
                    break
            sampled[request_id] = new_tokens
            if output == 0 and n > 1:
                siblings[request_id] = [500] * (n - 1)
            behind = 500 + output + len(new_tokens)
            proposed[request_id] = [behind + i - (i == 2) for i in range(self.num_drafts)]
        return ModelRunnerOutput(sampled, sibling_token_ids=siblings, draft_token_ids=proposed)


class _ScriptedTier:
    """Scheduler and cache manager of a real tier, without a model."""

    def __init__(self, tier: Tier, num_drafts: int) -> None:
        self.tier, self.name, self.num_drafts = tier, tier.name, num_drafts

    def why_unavailable(self) -> str | None:
        return None

    def default_device(self) -> str:
        return "cpu"

    def kv_cache_memory(self, config: EngineConfig, checkpoint: Checkpoint, utilization: float) -> None:
        return None

    def make_kv_cache_manager(self, config: EngineConfig) -> KVCacheManager:
        return self.tier.make_kv_cache_manager(config)

    def make_scheduler(self, config: EngineConfig) -> Scheduler:
        return self.tier.make_scheduler(config)

    def make_model_runner(
        self, config: EngineConfig, checkpoint: Checkpoint, draft_checkpoint: Checkpoint | None = None
    ) -> ModelRunner:
        return _ScriptedRunner(self.num_drafts)


def make_core(
    *,
    block_size: int = 4,
    blocks: int = 16,
    budget: int = 64,
    caching: bool = True,
    host_blocks: int = 0,
    drafts: int = 0,
    tier: str | Tier = "reference",
    **scheduler_options: Any,
) -> EngineCore:
    """A tracing engine core on scripted tokens; `blocks` counts those to use, without the null block.

    A tier is named, and found among the installed ones, or given where nothing is installed.
    """
    config = EngineConfig(
        model=_SHAPE,
        cache=CacheConfig(block_size, blocks + 1, caching, host_blocks),
        scheduler=SchedulerConfig(
            max_model_len=2048,
            max_num_batched_tokens=budget,
            **scheduler_options,
        ),
        speculative=SpeculativeConfig("ngram", drafts) if drafts else None,
        trace=True,
    )
    scripted = _ScriptedTier(load_tier(tier) if isinstance(tier, str) else tier, drafts)
    return EngineCore(config, scripted, checkpoint=None)  # type: ignore[arg-type]


def run(*arrivals: Arrival | tuple[Any, ...], **options: Any) -> list[StepTrace]:
    """Run requests to their end on scripted tokens; the trace of every step. Options are those of `make_core`."""
    core = make_core(**options)
    waiting = [entry if isinstance(entry, Arrival) else Arrival(*entry) for entry in arrivals]
    step = 0
    while waiting or core.has_unfinished_requests():
        for number, arrival in enumerate([a for a in waiting if a.arrives <= step]):
            core.add_request(request_of(arrival, (len(core.traces) * 1000 + number, 0)))
            waiting.remove(arrival)
        core.step()
        step += 1
        if step > _MOST_STEPS:  # only with a bug planted
            raise RuntimeError("The requests never end.")
    return core.traces


def run_static(*arrivals: Arrival | tuple[Any, ...], batch_size: int, **options: Any) -> list[StepTrace]:
    """The same in static batches: nobody joins before the last request of the batch has ended."""
    core = make_core(**options)
    everybody = [entry if isinstance(entry, Arrival) else Arrival(*entry) for entry in arrivals]
    for first in range(0, len(everybody), batch_size):
        for number, arrival in enumerate(everybody[first : first + batch_size], first):
            core.add_request(request_of(arrival, (number, 0)))
        while core.has_unfinished_requests():
            core.step()
    return core.traces


def request_of(arrival: Arrival, order: tuple[int, int]) -> EngineCoreRequest:
    prompt = arrival.prompt
    if isinstance(prompt, int):
        first = sum(map(ord, arrival.name)) * 7 % 300
        prompt = range(first, first + prompt)
    return EngineCoreRequest(
        request_id=arrival.name,
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(n=arrival.n, max_tokens=arrival.max_tokens, ignore_eos=True),
        seed=0,
        arrival=order,
        priority=arrival.priority,
    )


def steps_table(traces: Iterable[StepTrace], reasons: bool = True) -> str:
    """One row a step: who computed how many tokens, and in words why somebody had to wait or give way."""
    traces = list(traces)
    names = list(dict.fromkeys(name for trace in traces for name in trace.num_scheduled_tokens))
    head = ["step", *names, "used", "free blocks", *(["why"] if reasons else [])]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for trace in traces:
        cells = [str(trace.step)]
        for name in names:
            count = trace.num_scheduled_tokens.get(name)
            hit = trace.num_cached_tokens.get(name)
            text = "" if count is None else str(count)
            if count is not None and name in trace.draft_token_ids:
                text += f" ({len(trace.draft_token_ids[name])} drafts)"
            if hit:
                text += f" (+{hit} cached)"
            if name in trace.preempted:
                text = "preempted"
            cells.append(text)
        cells += [str(trace.budget_used), str(trace.state.cache.num_free_blocks)]
        if reasons:
            cells.append("; ".join([*trace.preemption_reasons.values(), *trace.refusal_reasons.values()]))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
