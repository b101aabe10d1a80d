"""All unfinished requests, and where each of them stands.

    waiting    never admitted yet, or preempted and to be computed again: it holds nothing
    swapped    preempted, with the content of its blocks in the host pool
    running    it holds blocks of the KV cache

Who comes next: under FCFS the swapped ones, then the waiting ones; under the priority policy the smallest (priority,
arrival, id) of both. A preempted request returns to the head of its queue, so several victims keep their old order.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from reference.contracts.config import EngineConfig, cdiv
from reference.contracts.protocols import KVCacheManager, KVConnector, NullKVConnector
from reference.contracts.request import Request, RequestStatus
from reference.contracts.trace import SchedulerSnapshot


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
        self.waiting: list[Request] = []
        self.swapped: list[Request] = []
        self.finished_req_ids: list[str] = []  # since the last schedule()
        self.num_tokens_sent: dict[str, int] = {}  # tokens of each running request that the runner has seen

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
        queue = self._queue_of(request)
        if self.by_priority:
            insort(queue, request, key=lambda r: r.sort_key)
        elif front:
            queue.insert(0, request)
        else:
            queue.append(request)

    def _queue_of(self, request: Request) -> list[Request]:
        return self.swapped if request.status is RequestStatus.SWAPPED else self.waiting

    def _next_request(self) -> Request | None:
        """The request that is admitted next."""
        heads = [queue[0] for queue in (self.swapped, self.waiting) if queue]
        if self.by_priority:
            return min(heads, key=lambda r: r.sort_key, default=None)
        return heads[0] if heads else None

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
                self._enqueue(sibling, front=True)

    def _forget_swap(self, request: Request) -> None:
        """The copy in the host pool is no good: the request is computed again after all."""
        self.swapped.remove(request)
        self.kv_cache_manager.free(request)
        request.lose_blocks()
        request.status = RequestStatus.PREEMPTED
        self._enqueue(request, front=True)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> None:
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                request.status = status
                self._finish(request)

    def _finish(self, request: Request) -> None:
        """Take a finished request out of every table; a sibling that ends with its first token is in no queue yet."""
        for queue in (self.running, self.waiting, self.swapped):
            if request in queue:
                queue.remove(request)
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
        return SchedulerSnapshot.of(self.running, self.waiting, self.swapped, cache)

    def check_integrity(self) -> None:
        """Every request is in exactly one queue, and holds what a request in this queue holds."""
        queues = (*self.running, *self.waiting, *self.swapped)
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
        for request in (*self.waiting, *self.swapped):
            assert not self.kv_cache_manager.get_block_ids(request.request_id), "who waits holds blocks"
        assert sorted(host_tables) == sorted(r.request_id for r in self.swapped), "host pool and queue differ"
        for request in self.swapped:
            num_saved = len(host_tables[request.request_id])
            assert num_saved == cdiv(request.num_computed_tokens, block_size), (
                "a saved table has a wrong length"
            )
        self.kv_cache_manager.check_integrity()
