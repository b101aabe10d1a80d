"""Twin of [`reference/request_table.py`](../reference/request_table.py).

What differs is what a change costs:

- A queue is a deque (FCFS) or a heap (priority), so that admitting one of 10,000 waiting requests does not move the
  others.
- Finished requests leave the running list in one pass a step, instead of a search through a list for each.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

from reference.contracts.config import EngineConfig, cdiv
from reference.contracts.protocols import KVCacheManager, KVConnector, NullKVConnector
from reference.contracts.request import Request, RequestStatus
from reference.contracts.trace import SchedulerSnapshot


class _FcfsQueue:
    """Requests in order of arrival; a preempted one comes back to the head."""

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
    """Requests by (priority, arrival, id), in a heap. Keys are unique, so requests are never compared."""

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


class RequestTable:
    """The part of the scheduler that remembers; see `contracts.protocols.Scheduler` for the public methods."""

    def __init__(self, config: EngineConfig, kv_cache_manager: KVCacheManager) -> None:
        self.config = config.scheduler
        self.by_priority = config.scheduler.scheduling_policy == "priority"
        self.cache_config = config.cache
        self.max_drafts = 0 if config.speculative is None else config.speculative.num_speculative_tokens
        self.kv_cache_manager = kv_cache_manager
        self.kv_connector: KVConnector = NullKVConnector()
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        make_queue = _PriorityQueue if self.by_priority else _FcfsQueue
        self.waiting: _FcfsQueue | _PriorityQueue = make_queue()
        self.swapped: _FcfsQueue | _PriorityQueue = make_queue()
        self.finished_req_ids: list[str] = []
        self.num_tokens_sent: dict[str, int] = {}

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

    def _queue_of(self, request: Request) -> _FcfsQueue | _PriorityQueue:
        return self.swapped if request.status is RequestStatus.SWAPPED else self.waiting

    def _next_request(self) -> Request | None:
        """The request that is admitted next."""
        if not self.swapped:
            return self.waiting.peek() if self.waiting else None
        request = self.swapped.peek()
        if self.by_priority and self.waiting and self.waiting.peek().sort_key < request.sort_key:
            return self.waiting.peek()
        return request

    def _fork(self, parent: Request, first_tokens: Iterable[int]) -> list[tuple[Request, int]]:
        """Siblings 1 to n - 1 of a request whose prompt was just completed. They share all its blocks."""
        siblings = []
        for index, token_id in enumerate(first_tokens, start=1):
            sibling = parent.fork(index)
            self.requests[sibling.request_id] = sibling
            if parent.status is RequestStatus.RUNNING:
                self.kv_cache_manager.fork(parent, sibling)
            else:  # the step planned after this one took its blocks
                sibling.lose_blocks()
            siblings.append((sibling, token_id))
        return siblings

    def _place(self, siblings: list[Request]) -> None:
        """New siblings with blocks run if there are slots; the others keep a token and wait ahead of later arrivals."""
        num_slots = self.config.max_num_seqs - len(self.running)
        starting = [sibling for sibling in siblings if sibling.is_forked][:num_slots]
        for sibling in starting:
            sibling.status = RequestStatus.RUNNING
            self.running.append(sibling)
        for sibling in reversed(siblings):
            if sibling not in starting:
                self.kv_cache_manager.free(sibling)
                sibling.lose_blocks()
                self.waiting.add_first(sibling)

    def _forget_swap(self, request: Request) -> None:
        """The copy in the host pool is no good: the request is computed again after all."""
        self.swapped.remove(request)
        self.kv_cache_manager.free(request)
        request.lose_blocks()
        request.status = RequestStatus.PREEMPTED
        self.waiting.add_first(request)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> None:
        finished = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished:
                if request.status is not RequestStatus.RUNNING:
                    self._queue_of(request).remove(request)
                request.status = status
                finished.append(request)
        self._finish(finished)

    def _finish(self, finished: list[Request]) -> None:
        """Take finished requests out of every table; those that waited have already left their queue."""
        if not finished:
            return
        self.running = [request for request in self.running if not request.is_finished]
        for request in finished:
            if request.status is not RequestStatus.FINISHED_ERROR:
                self.kv_connector.request_finished(
                    request, self.kv_cache_manager.get_block_ids(request.request_id)
                )
            self.kv_cache_manager.free(request)
            self.num_tokens_sent.pop(request.request_id, None)
            del self.requests[request.request_id]
            self.finished_req_ids.append(request.request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def snapshot(self) -> SchedulerSnapshot:
        cache = self.kv_cache_manager.snapshot()
        return SchedulerSnapshot.of(self.running, self.waiting.in_order(), self.swapped.in_order(), cache)

    def check_integrity(self) -> None:
        """Every request is in exactly one queue, and holds what a request in this queue holds."""
        waiting, swapped = self.waiting.in_order(), self.swapped.in_order()
        queues = (*self.running, *waiting, *swapped)
        assert sorted(r.request_id for r in queues) == sorted(self.requests), (
            "a request is in no queue, or in two"
        )
        assert len(self.running) <= self.config.max_num_seqs, "more requests run than max_num_seqs"
        block_size, host_tables = self.cache_config.block_size, self.kv_cache_manager.host_tables
        for request in self.running:
            num_blocks = len(self.kv_cache_manager.get_block_ids(request.request_id))
            num_computed = request.num_computed_tokens
            # Blocks of rejected drafts are kept: the next tokens go there.
            assert cdiv(num_computed, block_size) <= num_blocks, "a table does not cover the computed tokens"
            assert num_blocks <= cdiv(num_computed + self.max_drafts, block_size), "a table is too long"
        for request in (*waiting, *swapped):
            assert not self.kv_cache_manager.get_block_ids(request.request_id), "who waits holds blocks"
        assert sorted(host_tables) == sorted(r.request_id for r in swapped), "host pool and queue differ"
        for request in swapped:
            num_saved = len(host_tables[request.request_id])
            assert num_saved == cdiv(request.num_computed_tokens, block_size), (
                "a saved table has a wrong length"
            )
        self.kv_cache_manager.check_integrity()
