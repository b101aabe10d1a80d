"""Who computes how many tokens in this step.

There is neither a prefill nor a decode phase. Every request has `num_computed_tokens` chasing `num_tokens_with_spec`; a
step gives each request some of the tokens it is behind, within one budget for all. Chunked prefill, continuous
batching, prefix caching and speculation are nothing but values of these two numbers (the note that opens `schedule()`
in vLLM v1, `vllm/v1/core/sched/scheduler.py`).

Order of decisions, which is the contract of both tiers:

1. running requests, in order; if blocks are short, the lowest-ranked running request is preempted;
2. only if nobody was preempted: swapped and waiting requests, until one does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

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
from reference.plan import Plan
from reference.request_table import RequestTable


class Scheduler(RequestTable):
    """See `contracts.protocols.Scheduler` for the rules of each method."""

    def __init__(self, config: EngineConfig, kv_cache_manager: KVCacheManager) -> None:
        super().__init__(config, kv_cache_manager)
        self.max_total_tokens = config.max_total_tokens
        self.step = 0
        self.notes: SchedulerNotes | None = None

    def schedule(self) -> SchedulerOutput:
        self.kv_cache_manager.begin_step()
        # A lone request gains nothing from short chunks: nobody waits behind it.
        has_company = len(self.requests) >= 2
        plan = Plan(
            token_budget=self.config.max_num_batched_tokens,
            chunk_limit=self.config.long_prefill_token_threshold if has_company else 0,
        )
        self._schedule_running(plan)
        if not plan.preempted:
            self._schedule_waiting(plan)
        elif self.notes is not None and (request := self._next_request()) is not None:
            self.notes.refuse_after_preemption(request)
        return self._commit(plan)

    def _schedule_running(self, plan: Plan) -> None:
        index = 0  # running[:index] have their tokens, running[index:] are still to be served
        while index < len(self.running) and plan.token_budget > 0:
            request = self.running[index]
            if request.num_output_placeholders and not request.can_run_ahead(self.max_total_tokens):
                index += 1
                continue
            num_computed_tokens = request.num_computed_tokens
            num_known_tokens = request.num_tokens_with_spec + request.num_output_placeholders
            num_new_tokens = min(
                plan.clamp_chunk(num_known_tokens - num_computed_tokens),
                plan.token_budget,
                self.config.max_model_len - 1 - num_computed_tokens,  # the very last token needs no KV
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
        while plan.token_budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self._next_request()
            if request is None or not self._admit(request, plan):
                return
        if self.notes is not None and (request := self._next_request()) is not None:
            self.notes.refuse_all(request, plan.token_budget, self.config.max_num_seqs)

    def _admit(self, request: Request, plan: Plan) -> bool:
        """Give a waiting or swapped request its first tokens of this step; False when it does not fit.

        That ends admission: nobody overtakes the head of the queue.
        """
        hits = self.kv_cache_manager.get_computed_blocks(request)
        num_cached_tokens = len(hits) * self.cache_config.block_size
        num_external_tokens = 0
        is_swapped = request.status is RequestStatus.SWAPPED
        if not is_swapped and not request.sampling_params.skip_reading_prefix_cache:
            num_external_tokens = self.kv_connector.get_num_new_matched_tokens(request, num_cached_tokens)
        # A swapped request has computed tokens already; the cache may know even more of them by now.
        num_computed_tokens = max(request.num_computed_tokens, num_cached_tokens + num_external_tokens)
        num_new_tokens = plan.clamp_chunk(request.num_tokens - num_computed_tokens)
        if num_new_tokens > plan.token_budget and not self.config.enable_chunked_prefill:
            if self.notes is not None:
                self.notes.refuse_whole_prompt(request, num_new_tokens, plan.token_budget)
            return False
        num_new_tokens = min(num_new_tokens, plan.token_budget)
        if num_computed_tokens + num_new_tokens < request.num_tokens and self._has_partial_prefills(plan):
            if self.notes is not None:
                self.notes.refuse_partial_prefill(request, self.config.max_num_partial_prefills)
            return False
        new_blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens, hits, num_external_tokens)
        if new_blocks is None:
            if self.notes is not None:
                self.notes.refuse_for_blocks(request, self.kv_cache_manager.shortage)
            return False
        self._queue_of(request).remove(request)
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached_tokens + num_external_tokens
        self.kv_connector.update_state_after_alloc(request, new_blocks, num_external_tokens)
        plan.add(request, num_new_tokens, new_blocks, num_cached_tokens)
        return True

    def _has_partial_prefills(self, plan: Plan) -> bool:
        """Whether as many requests as allowed are left in the middle of their known tokens by this step."""
        partial = [
            request
            for request in self.running
            if request.num_computed_tokens + plan.num_tokens.get(request.request_id, 0) < request.num_tokens
        ]
        return 0 < self.config.max_num_partial_prefills <= len(partial)

    def _choose_victim(self) -> Request:
        if self.by_priority:
            return max(self.running, key=lambda r: r.sort_key)
        return self.running[-1]

    def _preempt(self, victim: Request, plan: Plan) -> None:
        """Take a running request's blocks. It keeps its output, and its K and V too if the host pool has room."""
        plan.take_back(victim)
        # Blocks it registered in this very step were never computed, so nobody may find them.
        self.kv_cache_manager.withdraw(victim)
        self.running.remove(victim)
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
        self._enqueue(victim, front=True)

    def _commit(self, plan: Plan) -> SchedulerOutput:
        """Write the plan down for the runner, and count its tokens as computed: the next plan starts from there."""
        new, running, drafts, bitmasks = [], [], {}, {}
        for request in plan.requests:
            request_id, start = request.request_id, request.num_computed_tokens
            end = start + plan.num_tokens[request_id]
            num_coming = request.num_output_placeholders
            num_known_tokens = request.num_tokens + num_coming
            if request_id not in self.num_tokens_sent:  # admitted now, or a sibling in its first step
                block_ids = self.kv_cache_manager.get_block_ids(request_id)
                num_cached_tokens = plan.num_cached_tokens.get(request_id, 0)
                new.append(NewRequestData.from_request(request, block_ids, num_cached_tokens))
            else:
                running.append(
                    RunningRequestData(
                        request_id=request_id,
                        new_token_ids=(PLACEHOLDER_TOKEN_ID,)
                        if num_coming  # everything before it was sent in the step in flight
                        else tuple(request.all_token_ids[self.num_tokens_sent[request_id] :]),
                        new_block_ids=plan.new_blocks[request_id],
                        num_computed_tokens=start,
                        block_copy=self.kv_cache_manager.get_block_copy(request_id),
                    )
                )
            if end > num_known_tokens:
                drafts[request_id] = tuple(request.spec_token_ids[: end - num_known_tokens])
            if request.grammar is not None and end >= num_known_tokens:
                bitmasks[request_id] = request.grammar.bitmask(drafts.get(request_id, ()))
            request.spec_token_ids = []
            self.num_tokens_sent[request_id] = num_known_tokens
            request.num_computed_tokens = end
            if self.config.async_scheduling and end >= num_known_tokens:
                request.num_output_placeholders += 1
        output = SchedulerOutput(
            step=self.step,
            scheduled_new_reqs=tuple(new),
            scheduled_running_reqs=tuple(running),
            num_scheduled_tokens=plan.num_tokens,
            block_copies=tuple(filter(None, map(self.kv_cache_manager.get_block_copy, plan.num_tokens))),
            swap_outs=tuple(self.kv_cache_manager.swap_outs),
            swap_ins=tuple(self.kv_cache_manager.swap_ins),
            scheduled_spec_decode_tokens=drafts,
            grammar_bitmasks=bitmasks,
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
                if request.status is RequestStatus.RUNNING:
                    self.kv_cache_manager.withdraw(request, whole=True)
                else:  # the step planned after this one took its blocks: nobody knows which they were
                    self.kv_cache_manager.withdraw_all()
                outputs += self._end_with_error(request, error)
                continue
            # Before the request itself may end: its siblings share its blocks.
            siblings += self._fork(request, output.sibling_token_ids.get(request_id, ()))
            token_ids = output.sampled_token_ids.get(request_id, ())
            if request.num_output_placeholders:
                request.num_output_placeholders -= len(token_ids)
            if drafts := schedule.scheduled_spec_decode_tokens.get(request_id):
                # Behind the first draft that was not accepted, K and V are those of wrong tokens.
                request.num_computed_tokens -= len(drafts) + 1 - len(token_ids)
            if token_ids or request_id in output.prompt_logprobs:
                outputs.append(self._append_tokens(request, token_ids, output))
        outputs += [self._append_tokens(sibling, (token_id,), output) for sibling, token_id in siblings]
        self._place([sibling for sibling, _ in siblings if not sibling.is_finished])
        return outputs

    def _append_tokens(
        self, request: Request, token_ids: Iterable[int], output: ModelRunnerOutput
    ) -> EngineCoreOutput:
        num_before, is_running = request.num_tokens, request.status is RequestStatus.RUNNING
        for token_id in token_ids:
            if append_and_check_stop(request, token_id, self.max_total_tokens):
                request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
                break  # tokens after the stop are cut
        if is_running and self.config.async_scheduling:
            self.kv_cache_manager.cache_blocks(request)
        if request.is_finished:
            self._finish(request)
        else:
            request.take_drafts(output.draft_token_ids.get(request.request_id, ()), self.max_total_tokens)
        return EngineCoreOutput.from_request(
            request,
            request.all_token_ids[num_before:],
            logprobs=output.logprobs.get(request.request_id, ()),
            prompt_logprobs=output.prompt_logprobs.get(request.request_id),
        )

    def fail_step(self, schedule: SchedulerOutput, reason: str) -> list[EngineCoreOutput]:
        outputs: list[EngineCoreOutput] = []
        for request_id in schedule.num_scheduled_tokens:
            if (request := self.requests.get(request_id)) is not None:
                self.kv_cache_manager.withdraw(request)
                outputs += self._end_with_error(request, reason)
        if self.config.async_scheduling:  # what this step has registered is another step's past by now
            self.kv_cache_manager.withdraw_all()
        for request in [r for r in reversed(self.swapped) if r.request_id in schedule.preempted_req_ids]:
            self._forget_swap(request)  # nobody knows whether its blocks were saved before the step failed
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
