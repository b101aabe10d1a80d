"""Proposers that know the answer, and a loop that drives a model runner with drafts, without a scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reference.contracts.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculativeConfig, cdiv
from reference.contracts.protocols import Checkpoint, ModelRunner, Tier
from reference.contracts.request import num_useful_drafts
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import (
    ModelRunnerOutput,
    NewRequestData,
    RunningRequestData,
    SchedulerOutput,
)
from reference.contracts.speculation import DraftRequest, Speculator


@dataclass
class RightUntil:
    """Guesses `answers` right for `num_right` tokens a step, and wrong from there on."""

    answers: Mapping[str, Sequence[int]]  # the output of each request, as it is without drafts
    num_right: int
    vocab_size: int = 320
    asked: list[list[DraftRequest]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    def propose(self, requests: Sequence[DraftRequest]) -> dict[str, list[int]]:
        self.asked.append(list(requests))
        return {request.request_id: self._propose(request) for request in requests}

    def _propose(self, request: DraftRequest) -> list[int]:
        start = len(request.token_ids) - request.num_prompt_tokens
        coming = self.answers[request.request_id][start : start + request.max_num_drafts]
        return [
            token_id if j < self.num_right else (token_id + 1) % self.vocab_size
            for j, token_id in enumerate(coming)
        ]

    def forget(self, request_ids: Iterable[str]) -> None:
        self.forgotten.extend(request_ids)


def always_right(answers: Mapping[str, Sequence[int]]) -> RightUntil:
    return RightUntil(answers, 10**9)


def always_wrong(answers: Mapping[str, Sequence[int]]) -> RightUntil:
    return RightUntil(answers, 0)


@dataclass(frozen=True)
class LoopRequest:
    """One request of a `RunnerLoop`."""

    request_id: str
    prompt: Sequence[int]
    params: SamplingParams
    seed: int = 0


@dataclass
class RunnerLoop:
    """Generates with a runner: every request has its own blocks, drafts are cut as a scheduler cuts them."""

    runner: ModelRunner
    config: EngineConfig
    requests: Sequence[LoopRequest]
    outputs: dict[str, list[int]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    accepted: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # (drafts, accepted) a step
    num_steps: int = 0

    def is_done(self, request: LoopRequest) -> bool:
        name, limit = request.request_id, self.config.max_total_tokens - len(request.prompt)
        return len(self.outputs[name]) in (request.params.max_tokens, limit)

    def run(self) -> RunnerLoop:
        """Until every request has `max_tokens` tokens, a stop token or an error."""
        block_size = self.config.cache.block_size
        num_blocks = cdiv(self.config.scheduler.max_model_len, block_size)
        new = {
            r.request_id: NewRequestData(
                request_id=r.request_id,
                token_ids=tuple(r.prompt),
                num_prompt_tokens=len(r.prompt),
                num_computed_tokens=0,
                block_ids=tuple(range(1 + i * num_blocks, 1 + (i + 1) * num_blocks)),
                sampling_params=r.params,
                seed=r.seed,
            )
            for i, r in enumerate(self.requests)
        }
        self.outputs |= {name: [] for name in new}
        self.accepted |= {name: [] for name in new}
        output = self._step(
            tuple(new.values()), (), {n: len(d.token_ids) for n, d in new.items()}, {}, finished=()
        )
        unfinished = self._take_in(output, {})
        finished = tuple(name for name in new if name not in unfinished)
        while unfinished:
            drafts = {r.request_id: self._drafts(r, output) for r in unfinished.values()}
            running = tuple(
                RunningRequestData(
                    r.request_id,
                    tuple(output.sampled_token_ids[r.request_id]),
                    (),
                    len(r.prompt) + len(self.outputs[r.request_id]) - 1,
                )
                for r in unfinished.values()
            )
            scheduled = {name: 1 + len(each) for name, each in drafts.items()}
            output = self._step((), running, scheduled, {n: d for n, d in drafts.items() if d}, finished)
            before, unfinished = unfinished, self._take_in(output, drafts)
            finished = tuple(name for name in before if name not in unfinished)
        return self

    def _step(
        self, new: Any, running: Any, scheduled: dict[str, int], drafts: Any, finished: Any
    ) -> ModelRunnerOutput:
        self.num_steps += 1
        return self.runner.execute(
            SchedulerOutput(
                step=self.num_steps,
                scheduled_new_reqs=new,
                scheduled_running_reqs=running,
                num_scheduled_tokens=scheduled,
                preempted_req_ids=(),
                finished_req_ids=finished,
                scheduled_spec_decode_tokens=drafts,
            )
        )

    def _drafts(self, request: LoopRequest, output: ModelRunnerOutput) -> tuple[int, ...]:
        num_output = len(self.outputs[request.request_id])
        limit = num_useful_drafts(
            request.params, len(request.prompt) + num_output, num_output, self.config.max_total_tokens
        )
        drafts = tuple(output.draft_token_ids.get(request.request_id, ()))
        assert len(drafts) <= limit, "drafts of no use were proposed"
        return drafts

    def _take_in(
        self, output: ModelRunnerOutput, drafts: Mapping[str, Sequence[int]]
    ) -> dict[str, LoopRequest]:
        assert output.errors.keys().isdisjoint(output.sampled_token_ids), (
            "an error takes its step's tokens with it"
        )
        self.errors |= output.errors
        unfinished = {}
        for request in self.requests:
            name = request.request_id
            if name not in output.sampled_token_ids:
                continue
            token_ids = output.sampled_token_ids[name]
            self.outputs[name] += token_ids
            self.logprobs.setdefault(name, []).extend(output.logprobs.get(name, ()))
            if drafts.get(name):
                self.accepted[name].append((len(drafts[name]), len(token_ids) - 1))
            if not self.is_done(request) and not any(map(request.params.ends_output, token_ids)):
                unfinished[name] = request
        return unfinished


def make_config(
    checkpoint: Checkpoint,
    num_speculative_tokens: int = 0,
    draft: Checkpoint | None = None,
    *,
    num_draft_blocks: int = 200,
    max_model_len: int = 120,
    **options: Any,
) -> EngineConfig:
    """`num_speculative_tokens` 0: without drafts. With a draft checkpoint its model guesses, else n-grams."""
    speculative = SpeculativeConfig(
        "ngram" if draft is None else "draft_model",
        max(num_speculative_tokens, 1),
        draft_model=None if draft is None else draft.config,
        num_draft_blocks=0 if draft is None else num_draft_blocks,
    )
    config = EngineConfig(
        model=checkpoint.config,
        cache=CacheConfig(4, 250),
        scheduler=SchedulerConfig(
            max_model_len=max_model_len, max_num_seqs=6, max_num_batched_tokens=options.pop("budget", 64)
        ),
        **options,
    )
    return replace(config, speculative=speculative) if num_speculative_tokens else config


def generate(
    tier: Tier,
    checkpoint: Checkpoint,
    requests: Sequence[LoopRequest],
    num_speculative_tokens: int = 0,
    speculator: Speculator | None = None,
    draft: Checkpoint | None = None,
    **options: Any,
) -> RunnerLoop:
    """Run all requests in one batch; `speculator` replaces the one that the config makes."""
    config = make_config(checkpoint, num_speculative_tokens, draft, **options)
    runner: Any = tier.make_model_runner(config, checkpoint, draft)
    if speculator is not None:
        runner.speculator = speculator
    return RunnerLoop(runner, config, requests).run()
