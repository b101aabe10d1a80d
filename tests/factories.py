"""Engines without weights: configs, requests, and a driver that plays the model with scripted tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from reference.contracts.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from reference.contracts.protocols import Tier
from reference.contracts.request import Request, RequestStatus
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from reference.contracts.trace import SchedulerNotes
from tests.kv_ledger import KVLedger

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=50_000,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_ids=(),
)


def make_config(
    *,
    block_size: int = 4,
    num_usable_blocks: int = 100,
    caching: bool = True,
    max_model_len: int = 1000,
    num_host_blocks: int = 0,
    num_drafts: int = 0,
    **scheduler_options: Any,
) -> EngineConfig:
    return EngineConfig(
        model=MODEL,
        cache=CacheConfig(block_size, num_usable_blocks + 1, caching, num_host_blocks),
        scheduler=SchedulerConfig(max_model_len=max_model_len, **scheduler_options),
        speculative=SpeculativeConfig("ngram", num_drafts) if num_drafts else None,
    )


def make_request(
    request_id: str,
    prompt: int | Sequence[int],
    *,
    arrival: int = 0,
    priority: int = 0,
    cache_salt: str | None = None,
    eos_token_ids: Sequence[int] = (),
    **params: Any,
) -> Request:
    """`prompt` as a number makes that many tokens that no other request id shares."""
    if isinstance(prompt, int):
        base = 1000 * (1 + sum(map(ord, request_id)))
        prompt = range(base, base + prompt)
    params.setdefault("max_tokens", 1000)
    return Request(
        request_id=request_id,
        all_token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        sampling_params=SamplingParams(**params),
        seed=0,
        arrival=(arrival, 0),
        priority=priority,
        cache_salt=cache_salt,
        eos_token_ids=frozenset(eos_token_ids),
    )


def scripted_token(request: Request) -> int:
    """Next token of a request: depends on nothing but its own prompt, seed and output length."""
    return (
        40_000 + (31 * request.all_token_ids[0] + 7 * request.num_output_tokens + 101 * request.seed) % 9_000
    )


def half_right_drafts(request: Request, next_tokens: Sequence[int]) -> list[int]:
    """Drafts whose first few are right: how many depends on the length of the request alone."""
    num_right = (5 * request.num_tokens + request.num_prompt_tokens) % (len(next_tokens) + 1)
    return [token if i < num_right else token + 1 for i, token in enumerate(next_tokens)]


class Driver:
    """Runs a tier's scheduler with a model made of `token_of`; checks all invariants after every call.

    With a speculative config, `drafts_of` guesses: it is given a request and the tokens that will really come next.
    """

    def __init__(
        self,
        tier: Tier,
        config: EngineConfig,
        token_of: Callable[[Request], int] = scripted_token,
        drafts_of: Callable[[Request, Sequence[int]], list[int]] = half_right_drafts,
    ) -> None:
        self.scheduler = tier.make_scheduler(config)
        self.config = config
        self.token_of = token_of
        self.drafts_of = drafts_of
        self.ledger = KVLedger(config.cache.block_size, config.cache.sliding_window)
        self.manager = self.scheduler.kv_cache_manager
        self.outputs: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, str] = {}
        self.num_preemptions = 0

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            self.outputs[request.request_id] = []
            self.scheduler.check_integrity()

    def abort(self, *request_ids: str) -> None:
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        self.scheduler.check_integrity()

    def schedule(self) -> SchedulerOutput:
        self.scheduler.notes = SchedulerNotes()
        schedule = self.scheduler.schedule()
        self.scheduler.check_integrity()
        assert schedule.total_num_scheduled_tokens <= self.config.scheduler.max_num_batched_tokens
        self.num_preemptions += len(schedule.preempted_req_ids)
        self.ledger.update_states(schedule)
        return schedule

    def sample(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the step in the ledger, and draw tokens for each request that it brings to its last known token."""
        self.ledger.move_blocks(schedule)
        self.ledger.compute(schedule)
        sampled, siblings, proposed = {}, {}, {}
        num_drafts = 0 if self.config.speculative is None else self.config.speculative.num_speculative_tokens
        for request_id in schedule.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            if request.num_computed_tokens < request.num_tokens:
                continue
            drafts = schedule.scheduled_spec_decode_tokens.get(request_id, ())
            coming = self._next_tokens(request, len(drafts) + 1 + num_drafts)
            num_accepted = 0
            while num_accepted < len(drafts) and drafts[num_accepted] == coming[num_accepted]:
                num_accepted += 1
            sampled[request_id] = coming[: num_accepted + 1]
            if num_drafts:
                behind = coming[num_accepted + 1 : num_accepted + 1 + num_drafts]
                proposed[request_id] = self.drafts_of(request, behind)
            if request.has_unborn_siblings:
                forks = (request.fork(index) for index in range(1, request.sampling_params.n))
                siblings[request_id] = [self.token_of(sibling) for sibling in forks]
        return ModelRunnerOutput(sampled, sibling_token_ids=siblings, draft_token_ids=proposed)

    def _next_tokens(self, request: Request, count: int) -> list[int]:
        """The tokens that a request will get next."""
        coming = replace(request, all_token_ids=list(request.all_token_ids))
        for _ in range(count):
            coming.all_token_ids.append(self.token_of(coming))
        return coming.all_token_ids[request.num_tokens :]

    def update(self, schedule: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        news = self.scheduler.update_from_output(schedule, output)
        self.scheduler.check_integrity()
        for item in news:
            self.outputs.setdefault(item.request_id, []).extend(item.new_token_ids)
            if item.finish_reason is not None:
                self.finish_reasons[item.request_id] = item.finish_reason
        return news

    def step(self) -> SchedulerOutput:
        schedule = self.schedule()
        self.update(schedule, self.sample(schedule))
        return schedule

    def run(self, max_steps: int = 10_000) -> list[SchedulerOutput]:
        schedules = []
        while self.scheduler.has_unfinished_requests():
            assert len(schedules) < max_steps, "the engine does not come to an end"
            schedules.append(self.step())
        return schedules

    def assert_nothing_leaked(self) -> None:
        snapshot = self.scheduler.snapshot()
        assert not snapshot.running
        assert not snapshot.waiting
        assert not snapshot.swapped
        assert not snapshot.cache.block_tables
        assert not snapshot.cache.ref_counts
        assert snapshot.cache.num_free_blocks == self.config.cache.num_usable_blocks
        leftovers = {
            name: value
            for name, value in vars(self.manager).items()
            if isinstance(value, dict) and len(value)
        }
        assert not leftovers, f"per-request tables still hold {leftovers}"
