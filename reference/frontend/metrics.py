"""What an engine has done so far: counters, gauges and times, and the line that says so in the log.

Nothing here is computed while a step runs but a few additions. Times of tokens are taken from a request when it ends;
rates, percentiles and states when somebody asks. Names are vLLM's where the thing exists there
(`vllm/v1/metrics/stats.py`, `vllm/v1/metrics/loggers.py`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from reference.contracts.protocols import Scheduler
from reference.contracts.request import RequestStatus
from reference.contracts.schedule import EngineCoreOutput, SchedulerOutput
from reference.frontend.logger import logger
from reference.frontend.outputs import RequestMetrics

RECENT = 1000  # requests over which the hit rate and the percentiles are taken
LOG_INTERVAL_S = 5.0


@dataclass
class PrefixCacheMetrics:
    """Tokens the prefix cache was asked for and tokens it had, once for each admission.

    The totals never shrink. The rate is that of the last `window` requests, so that it follows the traffic.
    """

    window: int = RECENT
    queries: int = 0
    hits: int = 0
    _recent: deque[tuple[int, int]] = field(default_factory=deque)
    _recent_queries: int = 0
    _recent_hits: int = 0

    def observe(self, queries: int, hits: int) -> None:
        if queries == 0:
            return  # it would push a request out of the window and say nothing
        self.queries += queries
        self.hits += hits
        self._recent.append((queries, hits))
        self._recent_queries += queries
        self._recent_hits += hits
        if len(self._recent) > self.window:
            old_queries, old_hits = self._recent.popleft()
            self._recent_queries -= old_queries
            self._recent_hits -= old_hits

    @property
    def hit_rate(self) -> float:
        return self._recent_hits / self._recent_queries if self._recent_queries else 0.0

    def forget_recent(self) -> None:
        """The cache was emptied: what it could do before says nothing about what it can do now."""
        self._recent.clear()
        self._recent_queries = self._recent_hits = 0


@dataclass(frozen=True)
class DurationSummary:
    """Durations in seconds; the percentiles are of the last `RECENT` and None when there are none."""

    count: int
    total: float
    p50: float | None
    p99: float | None

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class Durations:
    """A sum that never shrinks, and the last values for percentiles."""

    count: int = 0
    total: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def observe(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        self.recent.append(seconds)

    def summary(self) -> DurationSummary:
        ranked = sorted(self.recent)

        def percentile(percent: int) -> float | None:
            """Nearest rank: the smallest value that at least `percent` of all do not exceed."""
            return ranked[math.ceil(len(ranked) * percent / 100) - 1] if ranked else None

        return DurationSummary(self.count, self.total, percentile(50), percentile(99))


@dataclass
class DraftMetrics:
    """What became of the drafts (vLLM's `SpecDecodingStats`). A verification checks all drafts of one request.

    `accepted_per_position[j]` counts the verifications that accepted draft j, and with it all before.
    """

    accepted_per_position: list[int]
    num_verifications: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def observe(self, draft_token_ids: Sequence[int], sampled_token_ids: Sequence[int]) -> None:
        """The last of the sampled tokens is the model's own; without any, nothing was verified."""
        if not draft_token_ids or not sampled_token_ids:
            return
        num_accepted = len(sampled_token_ids) - 1
        self.num_verifications += 1
        self.num_draft_tokens += len(draft_token_ids)
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1


@dataclass(frozen=True)
class Metrics:
    """State of an engine at one moment. Tokens unless said otherwise."""

    num_requests_running: int
    num_requests_waiting: int  # the swapped ones included
    num_requests_swapped: int
    kv_cache_usage: float  # held blocks / usable blocks, 0 to 1
    prefix_cache_queries: int  # of requests admitted for the first time
    prefix_cache_hits: int
    prefix_cache_hit_rate: float  # of the last 1000 of them
    # Requests that were preempted and find their own blocks again: counted apart, or a crowded engine whose users share
    # nothing would seem to have a good cache.
    resumed_prefix_cache_queries: int
    resumed_prefix_cache_hits: int
    num_preemptions: int
    num_swapped_out_blocks: int  # to the host pool, in preemption mode "swap"
    num_swapped_in_blocks: int  # and back: fewer, if the prefix cache still had some of them
    num_block_copies: int  # copies-on-write
    num_drafts: int  # times that the drafts of a request were checked
    num_draft_tokens: int  # that were checked
    num_accepted_tokens: int  # of these
    num_accepted_tokens_per_position: tuple[int, ...]  # by place among the drafts of a step
    prompt_tokens: int  # of the requests that were admitted
    generation_tokens: int
    requests_finished: dict[str, int]  # by finish reason
    queue_time: DurationSummary  # from arrival to the first admission
    time_to_first_token: DurationSummary  # from arrival, of the finished requests
    inter_token_latency: DurationSummary  # mean of each request that ended with its second or a later token

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted drafts as a share of those that were checked, 0 to 1."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a verification gives: the accepted drafts, and the model's own."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


class EngineMetrics:
    """Collects as the engine core and the front end report; `snapshot` gives the figures.

    Args:
        scheduler: asked for its state by `snapshot` only.
        enable_prefix_caching: a cache that is off is asked for nothing.
        clock: seconds, for queue times.
        num_drafts: drafts a request may have in a step; 0 without speculation.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        enable_prefix_caching: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        num_drafts: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.drafts = DraftMetrics([0] * num_drafts)
        self.enable_prefix_caching = enable_prefix_caching
        self.clock = clock
        self.prefix_cache = PrefixCacheMetrics()
        self.resumed_prefix_cache = PrefixCacheMetrics()
        self.num_preemptions = 0
        self.num_swapped_out_blocks = 0
        self.num_swapped_in_blocks = 0
        self.num_block_copies = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.requests_finished: dict[str, int] = {}
        self.queue_time = Durations()
        self.time_to_first_token = Durations()
        self.inter_token_latency = Durations()
        self.arrived: dict[str, float] = {}  # of the requests that were never admitted yet
        self._admitted: dict[str, float] = {}

    def request_added(self, request_id: str) -> None:
        self.arrived[request_id] = self.clock()

    def requests_aborted(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.arrived.pop(request_id, None)

    def step_scheduled(self, schedule: SchedulerOutput) -> None:
        self.num_preemptions += len(schedule.preempted_req_ids)
        self.num_swapped_out_blocks += len(schedule.swap_outs)
        self.num_swapped_in_blocks += len(schedule.swap_ins)
        self.num_block_copies += len(schedule.block_copies)
        for new in schedule.scheduled_new_reqs:
            if new.is_forked:
                continue  # nobody looked anything up for it
            arrived = self.arrived.pop(new.request_id, None)
            if arrived is not None:
                self._admitted[new.request_id] = self.clock() - arrived
                self.queue_time.observe(self._admitted[new.request_id])
                self.prompt_tokens += new.num_prompt_tokens
            if self.enable_prefix_caching and not new.sampling_params.skip_reading_prefix_cache:
                cache = self.resumed_prefix_cache if arrived is None else self.prefix_cache
                cache.observe(len(new.token_ids), new.num_cached_tokens)

    def take_admitted(self) -> dict[str, float]:
        """The requests that were admitted for the first time since this was last asked -> seconds they had waited."""
        admitted, self._admitted = self._admitted, {}
        return admitted

    def drafts_checked(
        self, drafts: Mapping[str, Sequence[int]], sampled_token_ids: Mapping[str, Sequence[int]]
    ) -> None:
        for request_id, token_ids in drafts.items():
            self.drafts.observe(token_ids, sampled_token_ids.get(request_id, ()))

    def step_finished(self, news: Iterable[EngineCoreOutput]) -> None:
        self.generation_tokens += sum([len(item.new_token_ids) for item in news])

    def request_finished(self, request: RequestMetrics, finish_reason: str) -> None:
        self.requests_finished[finish_reason] = self.requests_finished.get(finish_reason, 0) + 1
        if request.ttft_s is None:
            return
        self.time_to_first_token.observe(request.ttft_s)
        # One that was aborted or failed did not end with a token.
        if (
            finish_reason in ("stop", "length")
            and request.latency_s is not None
            and request.num_output_tokens > 1
        ):
            num_intervals = request.num_output_tokens - 1
            self.inter_token_latency.observe((request.latency_s - request.ttft_s) / num_intervals)

    def snapshot(self) -> Metrics:
        requests = self.scheduler.requests.values()
        num_running = sum(request.status is RequestStatus.RUNNING for request in requests)
        return Metrics(
            num_requests_running=num_running,
            num_requests_waiting=len(requests) - num_running,
            num_requests_swapped=sum(request.status is RequestStatus.SWAPPED for request in requests),
            kv_cache_usage=self.scheduler.kv_cache_manager.usage,
            prefix_cache_queries=self.prefix_cache.queries,
            prefix_cache_hits=self.prefix_cache.hits,
            prefix_cache_hit_rate=self.prefix_cache.hit_rate,
            resumed_prefix_cache_queries=self.resumed_prefix_cache.queries,
            resumed_prefix_cache_hits=self.resumed_prefix_cache.hits,
            num_preemptions=self.num_preemptions,
            num_swapped_out_blocks=self.num_swapped_out_blocks,
            num_swapped_in_blocks=self.num_swapped_in_blocks,
            num_block_copies=self.num_block_copies,
            num_drafts=self.drafts.num_verifications,
            num_draft_tokens=self.drafts.num_draft_tokens,
            num_accepted_tokens=self.drafts.num_accepted_tokens,
            num_accepted_tokens_per_position=tuple(self.drafts.accepted_per_position),
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            requests_finished=dict(self.requests_finished),
            queue_time=self.queue_time.summary(),
            time_to_first_token=self.time_to_first_token.summary(),
            inter_token_latency=self.inter_token_latency.summary(),
        )


class StatLogger:
    """Writes a line at INFO every few seconds while the engine works."""

    def __init__(self, metrics: EngineMetrics, clock: Callable[[], float] = time.perf_counter) -> None:
        self.metrics = metrics
        self.clock = clock
        self.restart()

    def restart(self) -> None:
        """The engine starts to work: rates count from here, and not from when it last did."""
        self.started = self.clock()
        self.prompt_tokens = self.metrics.prompt_tokens
        self.generation_tokens = self.metrics.generation_tokens

    def step(self) -> None:
        elapsed = self.clock() - self.started
        if elapsed < LOG_INTERVAL_S:
            return
        now = self.metrics.snapshot()
        line = (
            "Prompt %.1f tokens/s, generation %.1f tokens/s, running %d requests, waiting %d, KV cache %.1f%% used, "
            "prefix cache hit rate %.1f%%, %d preemptions."
        )
        speculation: tuple[float, ...] = ()
        if self.metrics.drafts.accepted_per_position:
            line += " Drafts %d, accepted %d (%.1f%%), %.2f tokens a verification."
            speculation = (
                now.num_draft_tokens,
                now.num_accepted_tokens,
                100 * now.draft_acceptance_rate,
                now.mean_acceptance_length,
            )
        logger.info(
            line,
            (now.prompt_tokens - self.prompt_tokens) / elapsed,
            (now.generation_tokens - self.generation_tokens) / elapsed,
            now.num_requests_running,
            now.num_requests_waiting,
            100 * now.kv_cache_usage,
            100 * now.prefix_cache_hit_rate,
            now.num_preemptions,
            *speculation,
        )
        self.restart()
