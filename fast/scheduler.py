"""Twin of [`reference/scheduler.py`](../reference/scheduler.py): the same decisions in the same order.

What differs is what a decision costs:

- A victim leaves the plan by key, instead of a search through a list.
- Each request carries the number of tokens the runner has seen, so that a decode step sends one token and builds no
  slice of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from fast.request_table import RequestTable
from reference.contracts.config import EngineConfig
from reference.contracts.protocols import KVCacheManager
from reference.contracts.request import Request, RequestStatus, append_and_check_stop, child_request_id
from reference.contracts.schedule import (
    PLACEHOLDER_TOKEN_ID,
    EngineCoreOutput,
    ModelRunnerOutput,
    NewRequestData,
    RunningRequestData,
    SchedulerOutput,
)
from reference.contracts.trace import SchedulerNotes


@dataclass
class _Plan:
    """The step being planned, keyed by request id in scheduling order."""

    token_budget: int
    chunk_limit: int
    num_tokens: dict[str, int] = field(default_factory=dict)
    new_blocks: dict[str, list[int]] = field(default_factory=dict)
    num_cached_tokens: dict[str, int] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)


class Scheduler(RequestTable):
    """See `contracts.protocols.Scheduler` for the rules of each method."""

    def __init__(self, config: EngineConfig, kv_cache_manager: KVCacheManager) -> None:
        super().__init__(config, kv_cache_manager)
        self.max_total_tokens = config.max_total_tokens
        self.step = 0
        self.notes: SchedulerNotes | None = None

    def schedule(self) -> SchedulerOutput:
        self.kv_cache_manager.begin_step()
        threshold = self.config.long_prefill_token_threshold
        has_company = len(self.requests) >= 2
        plan = _Plan(
            token_budget=self.config.max_num_batched_tokens,
            chunk_limit=threshold if threshold and has_company else self.config.max_num_batched_tokens,
        )
        self._schedule_running(plan)
        if not plan.preempted:
            self._schedule_waiting(plan)
        elif self.notes is not None and (request := self._next_request()) is not None:
            self.notes.refuse_after_preemption(request)
        return self._commit(plan)

    def _schedule_running(self, plan: _Plan) -> None:
        allocate_slots = self.kv_cache_manager.allocate_slots
        last_position = self.config.max_model_len - 1
        index = 0
        while index < len(self.running) and plan.token_budget > 0:
            request = self.running[index]
            if request.num_output_placeholders and not request.can_run_ahead(self.max_total_tokens):
                index += 1
                continue
            num_computed_tokens = request.num_computed_tokens
            num_new_tokens = min(
                request.num_tokens_with_spec + request.num_output_placeholders - num_computed_tokens,
                plan.chunk_limit,
                plan.token_budget,
                last_position - num_computed_tokens,
            )
            while (new_blocks := allocate_slots(request, num_new_tokens)) is None:
                position = self._victim_position()
                victim = self.running.pop(position)
                if self.notes is not None:
                    self.notes.preempt(
                        victim, request, self.kv_cache_manager.shortage, self.running, self.by_priority
                    )
                if position < index:
                    index -= 1
                self._preempt(victim, plan)
                if victim is request:
                    return
            plan.num_tokens[request.request_id] = num_new_tokens
            plan.new_blocks[request.request_id] = new_blocks
            plan.token_budget -= num_new_tokens
            index += 1

    def _schedule_waiting(self, plan: _Plan) -> None:
        while plan.token_budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self._next_request()
            if request is None or not self._admit(request, plan):
                return
        if self.notes is not None and (request := self._next_request()) is not None:
            self.notes.refuse_all(request, plan.token_budget, self.config.max_num_seqs)

    def _admit(self, request: Request, plan: _Plan) -> bool:
        """Give a waiting or swapped request its first tokens of this step; False when it does not fit."""
        hits = self.kv_cache_manager.get_computed_blocks(request)
        num_cached_tokens = len(hits) * self.cache_config.block_size
        queue = self._queue_of(request)
        num_external_tokens = 0
        if queue is self.waiting and not request.sampling_params.skip_reading_prefix_cache:
            num_external_tokens = self.kv_connector.get_num_new_matched_tokens(request, num_cached_tokens)
        num_computed_tokens = max(request.num_computed_tokens, num_cached_tokens + num_external_tokens)
        num_new_tokens = request.num_tokens - num_computed_tokens
        if plan.chunk_limit < self.config.max_num_batched_tokens:
            num_new_tokens = min(num_new_tokens, plan.chunk_limit)
        if num_new_tokens > plan.token_budget:
            if not self.config.enable_chunked_prefill:
                if self.notes is not None:
                    self.notes.refuse_whole_prompt(request, num_new_tokens, plan.token_budget)
                return False
            num_new_tokens = plan.token_budget
        is_partial = num_computed_tokens + num_new_tokens < request.num_tokens
        if is_partial and self.config.max_num_partial_prefills and self._has_partial_prefills(plan):
            if self.notes is not None:
                self.notes.refuse_partial_prefill(request, self.config.max_num_partial_prefills)
            return False
        new_blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens, hits, num_external_tokens)
        if new_blocks is None:
            if self.notes is not None:
                self.notes.refuse_for_blocks(request, self.kv_cache_manager.shortage)
            return False
        self.running.append(queue.pop())
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached_tokens + num_external_tokens
        self.kv_connector.update_state_after_alloc(request, new_blocks, num_external_tokens)
        plan.num_tokens[request.request_id] = num_new_tokens
        plan.num_cached_tokens[request.request_id] = num_cached_tokens
        plan.token_budget -= num_new_tokens
        return True

    def _has_partial_prefills(self, plan: _Plan) -> bool:
        """Whether as many requests as allowed are left in the middle of their known tokens by this step."""
        partial = [
            request
            for request in self.running
            if request.num_computed_tokens + plan.num_tokens.get(request.request_id, 0) < request.num_tokens
        ]
        return len(partial) >= self.config.max_num_partial_prefills

    def _victim_position(self) -> int:
        if self.by_priority:
            return max(range(len(self.running)), key=lambda i: self.running[i].sort_key)
        return len(self.running) - 1

    def _preempt(self, victim: Request, plan: _Plan) -> None:
        """`victim` has left the running list; undo its part of the plan and put it back into the waiting queue."""
        plan.token_budget += plan.num_tokens.pop(victim.request_id, 0)
        plan.preempted.append(victim.request_id)
        self.kv_cache_manager.withdraw(victim)
        self.num_tokens_sent.pop(victim.request_id, None)  # the runner forgets it, and gets it anew
        victim.num_preemptions += 1
        if self.config.preemption_mode == "swap" and self.kv_cache_manager.swap_out(victim):
            victim.status = RequestStatus.SWAPPED
            victim.leave_running()
        else:
            self.kv_cache_manager.free(victim)
            victim.status = RequestStatus.PREEMPTED
            victim.lose_blocks()
        if self.notes is not None and self.config.preemption_mode == "swap":
            self.notes.swap(victim, self.kv_cache_manager.host_shortage)
        self._queue_of(victim).add_first(victim)

    def _commit(self, plan: _Plan) -> SchedulerOutput:
        new, running, drafts, bitmasks = [], [], {}, {}
        get_block_copy = self.kv_cache_manager.get_block_copy
        for request_id, num_tokens in plan.num_tokens.items():
            request = self.requests[request_id]
            num_coming = request.num_output_placeholders
            num_known_tokens = request.num_tokens + num_coming
            if request_id not in self.num_tokens_sent:
                block_ids = self.kv_cache_manager.get_block_ids(request_id)
                num_cached_tokens = plan.num_cached_tokens.get(request_id, 0)
                new.append(NewRequestData.from_request(request, block_ids, num_cached_tokens))
            else:
                running.append(
                    RunningRequestData(
                        request_id,
                        (PLACEHOLDER_TOKEN_ID,)
                        if num_coming
                        else tuple(request.all_token_ids[self.num_tokens_sent[request_id] :]),
                        tuple(plan.new_blocks[request_id]),
                        request.num_computed_tokens,
                        get_block_copy(request_id),
                    )
                )
            end = request.num_computed_tokens + num_tokens
            if request.spec_token_ids:
                if end > num_known_tokens:
                    drafts[request_id] = tuple(request.spec_token_ids[: end - num_known_tokens])
                request.spec_token_ids = []
            if request.grammar is not None and end >= num_known_tokens:
                bitmasks[request_id] = request.grammar.bitmask(drafts.get(request_id, ()))
            self.num_tokens_sent[request_id] = num_known_tokens
            request.num_computed_tokens = end
            if self.config.async_scheduling and end >= num_known_tokens:
                request.num_output_placeholders += 1
        finished_req_ids, self.finished_req_ids = tuple(self.finished_req_ids), []
        step, self.step = self.step, self.step + 1
        return SchedulerOutput(
            step=step,
            scheduled_new_reqs=tuple(new),
            scheduled_running_reqs=tuple(running),
            num_scheduled_tokens=plan.num_tokens,
            preempted_req_ids=tuple(plan.preempted),
            finished_req_ids=finished_req_ids,
            block_copies=tuple(filter(None, map(get_block_copy, plan.num_tokens))),
            swap_outs=tuple(self.kv_cache_manager.swap_outs),
            swap_ins=tuple(self.kv_cache_manager.swap_ins),
            scheduled_spec_decode_tokens=drafts,
            grammar_bitmasks=bitmasks,
        )

    def update_from_output(
        self, schedule: SchedulerOutput, output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        outputs: list[EngineCoreOutput] = []
        finished: list[Request] = []
        siblings: list[tuple[Request, int]] = []
        for request_id in schedule.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None:
                continue
            # The step planned after this one may have preempted it: then it leaves a queue when it ends.
            queue = None if request.status is RequestStatus.RUNNING else self._queue_of(request)
            error = output.errors.get(request_id)
            if error is not None:
                if queue is None:
                    self.kv_cache_manager.withdraw(request, whole=True)
                else:  # its blocks were taken: nobody knows which they were
                    self.kv_cache_manager.withdraw_all()
                    queue.remove(request)
                outputs += self._end_with_error(request, error)
                finished.append(request)
                continue
            if request_id in output.sibling_token_ids:
                siblings += self._fork(request, output.sibling_token_ids[request_id])
            token_ids = output.sampled_token_ids.get(request_id, ())
            if request.num_output_placeholders:
                request.num_output_placeholders -= len(token_ids)
            if request_id in schedule.scheduled_spec_decode_tokens:
                num_drafts = len(schedule.scheduled_spec_decode_tokens[request_id])
                request.num_computed_tokens -= num_drafts + 1 - len(token_ids)
            if token_ids or request_id in output.prompt_logprobs:
                outputs.append(self._append_tokens(request, token_ids, output))
                if request.is_finished:
                    finished.append(request)
                    if queue is not None:
                        queue.remove(request)
        for sibling, token_id in siblings:
            outputs.append(self._append_tokens(sibling, (token_id,), output))
            if sibling.is_finished:
                finished.append(sibling)
        self._finish(finished)
        if siblings:
            self._place([sibling for sibling, _ in siblings if not sibling.is_finished])
        return outputs

    def _append_tokens(
        self, request: Request, token_ids: Iterable[int], output: ModelRunnerOutput
    ) -> EngineCoreOutput:
        """Take in sampled tokens up to the one that ends the request."""
        taken, is_running = [], request.status is RequestStatus.RUNNING
        for token_id in token_ids:
            taken.append(token_id)
            if append_and_check_stop(request, token_id, self.max_total_tokens):
                request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
                break
        else:
            if request.request_id in output.draft_token_ids:
                request.take_drafts(output.draft_token_ids[request.request_id], self.max_total_tokens)
        if is_running and self.config.async_scheduling:
            self.kv_cache_manager.cache_blocks(request)
        return EngineCoreOutput.from_request(
            request,
            taken,
            logprobs=output.logprobs.get(request.request_id, ()),
            prompt_logprobs=output.prompt_logprobs.get(request.request_id),
        )

    def fail_step(self, schedule: SchedulerOutput, reason: str) -> list[EngineCoreOutput]:
        outputs: list[EngineCoreOutput] = []
        failed = [self.requests[r] for r in schedule.num_scheduled_tokens if r in self.requests]
        for request in failed:
            if request.status is not RequestStatus.RUNNING:
                self._queue_of(request).remove(request)
            self.kv_cache_manager.withdraw(request)
            outputs += self._end_with_error(request, reason)
        if self.config.async_scheduling:  # what this step has registered is another step's past by now
            self.kv_cache_manager.withdraw_all()
        self._finish(failed)
        for request_id in schedule.preempted_req_ids:
            victim = self.requests.get(request_id)
            if victim is not None and victim.status is RequestStatus.SWAPPED:
                self._forget_swap(victim)  # nobody knows whether its blocks were saved before the step failed
        # The runner may have failed before it forgot these; hearing of them twice does no harm.
        self.finished_req_ids += [*schedule.finished_req_ids, *schedule.preempted_req_ids]
        return outputs

    def _end_with_error(self, request: Request, reason: str) -> list[EngineCoreOutput]:
        """End a request, and in name those of its siblings that will now never be born."""
        num_sequences = request.sampling_params.n if request.has_unborn_siblings else 1
        request.status = RequestStatus.FINISHED_ERROR
        output = EngineCoreOutput.from_request(request, (), reason)
        ids = (child_request_id(request.request_id, index) for index in range(num_sequences))
        return [replace(output, request_id=request_id) for request_id in ids]
