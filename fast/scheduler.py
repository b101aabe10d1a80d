"""Twin of [`reference/scheduler.py`](../reference/scheduler.py): the same decisions in the same order.

What differs is what a decision costs:

- The waiting queue is a deque (FCFS) or a heap (priority), so that admitting one of 10,000 waiting requests does not
  move the others.
- A victim leaves the plan by key, and finished requests leave the running list in one pass a step, instead of a search
  through a list for each.
- Each request carries the number of tokens the runner has seen, so that a decode step sends one token and builds no
  slice of the whole sequence.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

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


class _FcfsQueue:
    """Waiting requests in order of arrival; a preempted one comes back to the head."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: Request) -> None:
        self._queue.append(request)

    def add_first(self, request: Request) -> None:
        self._queue.appendleft(request)

    def peek(self) -> Request:
        return self._queue[0]

    def pop(self) -> Request:
        return self._queue.popleft()

    def remove(self, request: Request) -> None:
        self._queue.remove(request)

    def in_order(self) -> list[Request]:
        return list(self._queue)


class _PriorityQueue:
    """Waiting requests by (priority, arrival, id), in a heap. Keys are unique, so requests are never compared."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, tuple[int, int], str], Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.sort_key, request))

    add_first = add

    def peek(self) -> Request:
        return self._heap[0][1]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[1]

    def remove(self, request: Request) -> None:
        self._heap.remove((request.sort_key, request))
        heapq.heapify(self._heap)

    def in_order(self) -> list[Request]:
        return [request for _, request in sorted(self._heap)]


@dataclass
class _Plan:
    """The step being planned, keyed by request id in scheduling order."""

    token_budget: int
    chunk_limit: int
    num_tokens: dict[str, int] = field(default_factory=dict)
    new_blocks: dict[str, list[int]] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)


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
        self.waiting: _FcfsQueue | _PriorityQueue
        self.waiting = _PriorityQueue() if self.by_priority else _FcfsQueue()
        self.finished_req_ids: list[str] = []
        self.num_tokens_sent: dict[str, int] = {}
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
        self.waiting.add(request)

    def schedule(self) -> SchedulerOutput:
        self.kv_cache_manager.begin_step()
        threshold = self.config.long_prefill_token_threshold
        has_company = len(self.running) + len(self.waiting) >= 2
        plan = _Plan(
            token_budget=self.config.max_num_batched_tokens,
            chunk_limit=threshold if threshold and has_company else self.config.max_num_batched_tokens,
        )
        self._schedule_running(plan)
        if not plan.preempted:
            self._schedule_waiting(plan)
        elif self.notes is not None:
            self.notes.refuse_after_preemption(self.waiting.peek())
        return self._commit(plan)

    def _schedule_running(self, plan: _Plan) -> None:
        allocate_slots = self.kv_cache_manager.allocate_slots
        last_position = self.config.max_model_len - 1
        index = 0
        while index < len(self.running) and plan.token_budget > 0:
            request = self.running[index]
            num_computed_tokens = request.num_computed_tokens
            num_new_tokens = min(
                request.num_tokens - num_computed_tokens,
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
        block_size = self.cache_config.block_size
        while self.waiting and plan.token_budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.peek()
            computed_blocks = self.kv_cache_manager.get_computed_blocks(request)
            num_cached_tokens = len(computed_blocks) * block_size
            num_new_tokens = request.num_tokens - num_cached_tokens
            if plan.chunk_limit < self.config.max_num_batched_tokens:
                num_new_tokens = min(num_new_tokens, plan.chunk_limit)
            if num_new_tokens > plan.token_budget:
                if not self.config.enable_chunked_prefill:
                    if self.notes is not None:
                        self.notes.refuse_whole_prompt(request, num_new_tokens, plan.token_budget)
                    return
                num_new_tokens = plan.token_budget
            new_blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens, computed_blocks)
            if new_blocks is None:
                if self.notes is not None:
                    self.notes.refuse_for_blocks(request, self.kv_cache_manager.shortage)
                return
            self.running.append(self.waiting.pop())
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = num_cached_tokens
            if request.num_cached_tokens is None:
                request.num_cached_tokens = num_cached_tokens
            plan.num_tokens[request.request_id] = num_new_tokens
            plan.token_budget -= num_new_tokens
        if self.notes is not None and self.waiting:
            self.notes.refuse_all(self.waiting.peek(), plan.token_budget, self.config.max_num_seqs)

    def _victim_position(self) -> int:
        if self.by_priority:
            return max(range(len(self.running)), key=lambda i: self.running[i].sort_key)
        return len(self.running) - 1

    def _preempt(self, victim: Request, plan: _Plan) -> None:
        """`victim` has left the running list; undo its part of the plan and put it back into the waiting queue."""
        plan.token_budget += plan.num_tokens.pop(victim.request_id, 0)
        plan.preempted.append(victim.request_id)
        self.kv_cache_manager.withdraw(victim)
        self.kv_cache_manager.free(victim)
        self.num_tokens_sent.pop(victim.request_id, None)  # the runner forgets it, and gets it anew
        victim.status = RequestStatus.PREEMPTED
        victim.lose_blocks()
        victim.num_preemptions += 1
        self.waiting.add_first(victim)

    def _commit(self, plan: _Plan) -> SchedulerOutput:
        new, running = [], []
        get_block_copy = self.kv_cache_manager.get_block_copy
        for request_id, num_tokens in plan.num_tokens.items():
            request = self.requests[request_id]
            if request_id not in self.num_tokens_sent:
                block_ids = self.kv_cache_manager.get_block_ids(request_id)
                new.append(NewRequestData.from_request(request, block_ids))
            else:
                running.append(
                    RunningRequestData(
                        request_id,
                        tuple(request.all_token_ids[self.num_tokens_sent[request_id] :]),
                        tuple(plan.new_blocks[request_id]),
                        request.num_computed_tokens,
                        get_block_copy(request_id),
                    )
                )
            self.num_tokens_sent[request_id] = request.num_tokens
            request.num_computed_tokens += num_tokens
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
            error = output.errors.get(request_id)
            if error is not None:
                self.kv_cache_manager.withdraw(request, whole=True)
                outputs += self._end_with_error(request, error)
                finished.append(request)
                continue
            if request_id in output.sibling_token_ids:
                siblings += self._fork(request, output.sibling_token_ids[request_id])
            token_ids = output.sampled_token_ids.get(request_id, ())
            if token_ids or request_id in output.prompt_logprobs:
                outputs.append(self._append_tokens(request, token_ids, output))
                if request.is_finished:
                    finished.append(request)
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
        taken = []
        for token_id in token_ids:
            taken.append(token_id)
            if append_and_check_stop(request, token_id, self.max_total_tokens):
                break
        return EngineCoreOutput.from_request(
            request,
            taken,
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
            self.waiting.add_first(sibling)

    def fail_step(self, schedule: SchedulerOutput, reason: str) -> list[EngineCoreOutput]:
        outputs: list[EngineCoreOutput] = []
        failed = [self.requests[r] for r in schedule.num_scheduled_tokens if r in self.requests]
        for request in failed:
            self.kv_cache_manager.withdraw(request)
            outputs += self._end_with_error(request, reason)
        self._finish(failed)
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

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> None:
        finished = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished:
                if request.status is not RequestStatus.RUNNING:
                    self.waiting.remove(request)
                request.status = status
                finished.append(request)
        self._finish(finished)

    def _finish(self, finished: list[Request]) -> None:
        """Take finished requests out of every table; those that waited have already left their queue."""
        if not finished:
            return
        self.running = [request for request in self.running if not request.is_finished]
        for request in finished:
            self.kv_cache_manager.free(request)
            self.num_tokens_sent.pop(request.request_id, None)
            del self.requests[request.request_id]
            self.finished_req_ids.append(request.request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def snapshot(self) -> SchedulerSnapshot:
        return SchedulerSnapshot.of(
            self.running, self.waiting.in_order(), (), self.kv_cache_manager.snapshot()
        )

    def check_integrity(self) -> None:
        """Queues and tables agree: every request is in exactly one queue, and only running ones hold blocks."""
        waiting = self.waiting.in_order()
        queued = [request.request_id for request in (*self.running, *waiting)]
        assert sorted(queued) == sorted(self.requests), "a request is in no queue, or in two"
        assert len(self.running) <= self.config.max_num_seqs, "more requests run than max_num_seqs"
        for request in self.running:
            num_blocks = len(self.kv_cache_manager.get_block_ids(request.request_id))
            assert num_blocks == cdiv(request.num_computed_tokens, self.cache_config.block_size), (
                "table and tokens differ"
            )
        for request in waiting:
            assert not self.kv_cache_manager.get_block_ids(request.request_id), (
                "a waiting request holds blocks"
            )
        self.kv_cache_manager.check_integrity()
