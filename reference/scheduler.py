"""Who computes how many tokens in this step.

There is neither a prefill nor a decode phase. Every request has `num_computed_tokens` chasing `num_tokens`; a step
gives each request some of the tokens it is behind, within one budget for all. Chunked prefill, continuous batching and
prefix caching are nothing but values of these two numbers (the note that opens `schedule()` in vLLM v1,
`vllm/v1/core/sched/scheduler.py`).

Order of decisions, which is the contract of both tiers:

1. running requests, in order; if blocks are short, the lowest-ranked running request is preempted;
2. only if nobody was preempted: waiting requests, until one does not fit.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import replace

from reference.contracts.config import EngineConfig, cdiv
from reference.contracts.protocols import KVCacheManager
from reference.contracts.request import Request, RequestStatus, append_and_check_stop, child_request_id
from reference.contracts.schedule import (
    EngineCoreOutput,
    ModelRunnerOutput,
    NewRequestData,
    RunningRequestData,
    SchedulerOutput,
)
from reference.contracts.trace import SchedulerNotes, SchedulerSnapshot
from reference.plan import Plan


class Scheduler:
    """See `contracts.protocols.Scheduler` for the rules of each method."""

    def __init__(self, config: EngineConfig, kv_cache_manager: KVCacheManager) -> None:
        self.config = config.scheduler
        self.by_priority = config.scheduler.scheduling_policy == "priority"
        self.cache_config = config.cache
        self.max_total_tokens = config.max_total_tokens
        self.kv_cache_manager = kv_cache_manager
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []  # the head is admitted next
        self.finished_req_ids: list[str] = []  # since the last schedule()
        self.num_tokens_sent: dict[str, int] = {}  # tokens of each running request that the runner has seen
        self.step = 0
        self.notes: SchedulerNotes | None = None

    def add_request(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise ValueError(f"A request with the id {request.request_id!r} is already in the engine.")
        num_blocks = cdiv(request.num_tokens, self.cache_config.block_size)
        if num_blocks > self.cache_config.num_usable_blocks:
            raise ValueError(
                f"The prompt of {request.num_tokens} tokens needs {num_blocks} KV cache blocks, but the whole pool has "
                f"{self.cache_config.num_usable_blocks}; raise num_blocks or kv_cache_memory."
            )
        self.requests[request.request_id] = request
        self._enqueue(request)

    def _enqueue(self, request: Request, front: bool = False) -> None:
        if self.by_priority:
            insort(self.waiting, request, key=lambda r: r.sort_key)
        elif front:
            self.waiting.insert(0, request)
        else:
            self.waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        self.kv_cache_manager.begin_step()
        # A lone request gains nothing from short chunks: nobody waits behind it.
        has_company = len(self.running) + len(self.waiting) >= 2
        plan = Plan(
            token_budget=self.config.max_num_batched_tokens,
            chunk_limit=self.config.long_prefill_token_threshold if has_company else 0,
        )
        self._schedule_running(plan)
        if not plan.preempted:
            self._schedule_waiting(plan)
        elif self.notes is not None:
            self.notes.refuse_after_preemption(self.waiting[0])
        return self._commit(plan)

    def _schedule_running(self, plan: Plan) -> None:
        index = 0  # running[:index] have their tokens, running[index:] are still to be served
        while index < len(self.running) and plan.token_budget > 0:
            request = self.running[index]
            num_new_tokens = min(
                plan.clamp_chunk(request.num_tokens - request.num_computed_tokens),
                plan.token_budget,
                self.config.max_model_len
                - 1
                - request.num_computed_tokens,  # the very last token needs no KV
            )
            while (new_blocks := self.kv_cache_manager.allocate_slots(request, num_new_tokens)) is None:
                victim = self._choose_victim()
                if self.notes is not None:
                    self.notes.preempt(
                        victim, request, self.kv_cache_manager.shortage, self.running, self.by_priority
                    )
                if self.running.index(victim) < index:
                    index -= 1
                self._preempt(victim, plan)
                if victim is request:
                    return  # it ranks last itself: what it would need belongs to the others
            plan.add(request, num_new_tokens, new_blocks)
            index += 1

    def _schedule_waiting(self, plan: Plan) -> None:
        while self.waiting and plan.token_budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            computed_blocks = self.kv_cache_manager.get_computed_blocks(request)
            num_cached_tokens = len(computed_blocks) * self.cache_config.block_size
            num_new_tokens = plan.clamp_chunk(request.num_tokens - num_cached_tokens)
            if num_new_tokens > plan.token_budget:
                if not self.config.enable_chunked_prefill:
                    if self.notes is not None:
                        self.notes.refuse_whole_prompt(request, num_new_tokens, plan.token_budget)
                    return  # a long prompt at the head is not overtaken by short ones behind it
                num_new_tokens = plan.token_budget
            new_blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens, computed_blocks)
            if new_blocks is None:
                if self.notes is not None:
                    self.notes.refuse_for_blocks(request, self.kv_cache_manager.shortage)
                return
            self.waiting.pop(0)
            self.running.append(request)
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = num_cached_tokens
            if request.num_cached_tokens is None:
                request.num_cached_tokens = num_cached_tokens
            plan.add(request, num_new_tokens, new_blocks)
        if self.notes is not None and self.waiting:
            self.notes.refuse_all(self.waiting[0], plan.token_budget, self.config.max_num_seqs)

    def _choose_victim(self) -> Request:
        if self.by_priority:
            return max(self.running, key=lambda r: r.sort_key)
        return self.running[-1]

    def _preempt(self, victim: Request, plan: Plan) -> None:
        """Preemption by recompute: blocks are freed, outputs are kept, and everything is computed again later."""
        plan.take_back(victim)
        # Blocks it registered in this very step were never computed, so nobody may find them.
        self.kv_cache_manager.withdraw(victim)
        self.kv_cache_manager.free(victim)
        self.running.remove(victim)
        self.num_tokens_sent.pop(victim.request_id, None)  # the runner forgets it, and gets it anew
        victim.status = RequestStatus.PREEMPTED
        victim.lose_blocks()
        victim.num_preemptions += 1
        self._enqueue(victim, front=True)

    def _commit(self, plan: Plan) -> SchedulerOutput:
        """Write the plan down for the runner, and count its tokens as computed: the next plan starts from there."""
        new, running = [], []
        for request in plan.requests:
            request_id = request.request_id
            if request_id not in self.num_tokens_sent:  # admitted now, or a sibling in its first step
                block_ids = self.kv_cache_manager.get_block_ids(request_id)
                new.append(NewRequestData.from_request(request, block_ids))
            else:
                running.append(
                    RunningRequestData(
                        request_id=request_id,
                        new_token_ids=tuple(request.all_token_ids[self.num_tokens_sent[request_id] :]),
                        new_block_ids=plan.new_blocks[request_id],
                        num_computed_tokens=request.num_computed_tokens,
                        block_copy=self.kv_cache_manager.get_block_copy(request_id),
                    )
                )
            self.num_tokens_sent[request_id] = request.num_tokens
            request.num_computed_tokens += plan.num_tokens[request_id]
        output = SchedulerOutput(
            step=self.step,
            scheduled_new_reqs=tuple(new),
            scheduled_running_reqs=tuple(running),
            num_scheduled_tokens=plan.num_tokens,
            block_copies=tuple(filter(None, map(self.kv_cache_manager.get_block_copy, plan.num_tokens))),
            preempted_req_ids=tuple(request.request_id for request in plan.preempted),
            finished_req_ids=tuple(self.finished_req_ids),
        )
        self.finished_req_ids = []
        self.step += 1
        return output

    def update_from_output(
        self, schedule: SchedulerOutput, output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        outputs: list[EngineCoreOutput] = []
        siblings: list[tuple[Request, int]] = []  # with their first tokens
        for request_id in schedule.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None:
                continue  # aborted while the step ran: its tokens are not taken in
            error = output.errors.get(request_id)
            if error is not None:
                self.kv_cache_manager.withdraw(request, whole=True)
                outputs += self._end_with_error(request, error)
                continue
            # Before the request itself may end: its siblings share its blocks.
            siblings += self._fork(request, output.sibling_token_ids.get(request_id, ()))
            token_ids = output.sampled_token_ids.get(request_id, ())
            if token_ids or request_id in output.prompt_logprobs:
                outputs.append(self._append_tokens(request, token_ids, output))
        outputs += [self._append_tokens(sibling, (token_id,), output) for sibling, token_id in siblings]
        self._place([sibling for sibling, _ in siblings if not sibling.is_finished])
        return outputs

    def _append_tokens(
        self, request: Request, token_ids: Iterable[int], output: ModelRunnerOutput
    ) -> EngineCoreOutput:
        num_before = request.num_tokens
        for token_id in token_ids:
            if append_and_check_stop(request, token_id, self.max_total_tokens):
                self._finish(request)
                break  # tokens after the stop are cut
        return EngineCoreOutput.from_request(
            request,
            request.all_token_ids[num_before:],
            logprobs=output.logprobs.get(request.request_id, ()),
            prompt_logprobs=output.prompt_logprobs.get(request.request_id),
        )

    def _fork(self, parent: Request, first_tokens: Iterable[int]) -> list[tuple[Request, int]]:
        """Siblings 1 to n - 1 of a request whose prompt was just completed. They share all its blocks."""
        siblings = []
        for index, token_id in enumerate(first_tokens, start=1):
            sibling = parent.fork(index)
            self.requests[sibling.request_id] = sibling
            self.kv_cache_manager.fork(parent, sibling)
            siblings.append((sibling, token_id))
        return siblings

    def _place(self, siblings: list[Request]) -> None:
        """Siblings run if there are slots; the others keep their token and wait, ahead of later arrivals."""
        num_slots = self.config.max_num_seqs - len(self.running)
        for sibling in siblings[:num_slots]:
            sibling.status = RequestStatus.RUNNING
            self.running.append(sibling)
        for sibling in reversed(siblings[num_slots:]):
            self.kv_cache_manager.free(sibling)
            sibling.lose_blocks()
            self._enqueue(sibling, front=True)

    def fail_step(self, schedule: SchedulerOutput, reason: str) -> list[EngineCoreOutput]:
        outputs: list[EngineCoreOutput] = []
        for request_id in schedule.num_scheduled_tokens:
            if (request := self.requests.get(request_id)) is not None:
                self.kv_cache_manager.withdraw(request)
                outputs += self._end_with_error(request, reason)
        # The runner may have failed before it forgot these; hearing of them twice does no harm.
        self.finished_req_ids += [*schedule.finished_req_ids, *schedule.preempted_req_ids]
        return outputs

    def _end_with_error(self, request: Request, reason: str) -> list[EngineCoreOutput]:
        """End a request, and in name those of its siblings that will now never be born."""
        num_sequences = request.sampling_params.n if request.has_unborn_siblings else 1
        request.status = RequestStatus.FINISHED_ERROR
        self._finish(request)
        output = EngineCoreOutput.from_request(request, (), reason)
        ids = (child_request_id(request.request_id, index) for index in range(num_sequences))
        return [replace(output, request_id=request_id) for request_id in ids]

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> None:
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                request.status = status
                self._finish(request)

    def _finish(self, request: Request) -> None:
        """Take a finished request out of every table; a sibling that ends with its first token is in no queue yet."""
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self.kv_cache_manager.free(request)
        self.num_tokens_sent.pop(request.request_id, None)
        del self.requests[request.request_id]
        self.finished_req_ids.append(request.request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def snapshot(self) -> SchedulerSnapshot:
        return SchedulerSnapshot.of(self.running, self.waiting, (), self.kv_cache_manager.snapshot())

    def check_integrity(self) -> None:
        """Queues and tables agree: every request is in exactly one queue, and only running ones hold blocks."""
        queued = [request.request_id for request in (*self.running, *self.waiting)]
        assert sorted(queued) == sorted(self.requests), "a request is in no queue, or in two"
        assert len(self.running) <= self.config.max_num_seqs, "more requests run than max_num_seqs"
        for request in self.running:
            num_blocks = len(self.kv_cache_manager.get_block_ids(request.request_id))
            assert num_blocks == cdiv(request.num_computed_tokens, self.cache_config.block_size), (
                "table and tokens differ"
            )
        for request in self.waiting:
            assert not self.kv_cache_manager.get_block_ids(request.request_id), (
                "a waiting request holds blocks"
            )
        self.kv_cache_manager.check_integrity()
