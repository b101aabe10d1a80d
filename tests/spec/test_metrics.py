"""What the engine counts, and the line in the log. Clocks are scripted: nothing here is timed."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from reference.contracts.protocols import Tier
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.logger import logger
from reference.frontend.metrics import (
    LOG_INTERVAL_S,
    RECENT,
    DraftMetrics,
    Durations,
    EngineMetrics,
    PrefixCacheMetrics,
    StatLogger,
)
from reference.frontend.outputs import RequestMetrics
from tests.scripted import make_engine, make_scripted_config


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_clocked_engine(tier: Tier, **options: Any) -> tuple[LLMEngine, Clock]:
    engine, _ = make_engine(tier, make_scripted_config(**options))
    clock = Clock()
    engine.metrics.clock = engine.stat_logger.clock = clock
    engine.stat_logger.restart()
    return engine, clock


def add(engine: LLMEngine, request_id: str, prompt: list[int], max_tokens: int) -> None:
    engine.add_request(request_id, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def run(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


def test_b29_the_hit_rate_is_that_of_all_tokens_asked_for_and_empty_stats_are_ignored() -> None:
    cache = PrefixCacheMetrics()
    assert cache.hit_rate == 0.0
    cache.observe(20, 9)
    cache.observe(0, 0)
    cache.observe(80, 16)
    assert cache.hit_rate == 0.25
    assert (cache.queries, cache.hits) == (100, 25)


def test_the_hit_rate_follows_the_last_requests_and_the_totals_never_shrink() -> None:
    cache = PrefixCacheMetrics(window=2)
    cache.observe(100, 100)
    cache.observe(10, 1)
    for _ in range(2):
        cache.observe(0, 0)  # pushes nobody out
    assert cache.hit_rate == 101 / 110
    cache.observe(10, 1)
    assert cache.hit_rate == 0.1
    assert (cache.queries, cache.hits) == (120, 102)
    cache.forget_recent()
    assert cache.hit_rate == 0.0
    assert cache.queries == 120


def test_percentiles_are_values_that_occurred_among_the_last() -> None:
    durations = Durations()
    assert durations.summary().p50 is durations.summary().mean is None
    for value in (4.0, 1.0, 3.0, 2.0):
        durations.observe(value)
    summary = durations.summary()
    assert (summary.count, summary.total, summary.mean) == (4, 10.0, 2.5)
    assert (summary.p50, summary.p99) == (2.0, 4.0)
    for _ in range(RECENT):
        durations.observe(7.0)
    assert durations.summary().p50 == 7.0
    assert durations.summary().count == RECENT + 4


def test_prefix_cache_tokens_are_counted_at_admission(tier: Tier) -> None:
    engine, _ = make_clocked_engine(tier, block_size=4)
    prompt = list(range(300, 313))
    for name in ("a", "b"):
        add(engine, name, prompt, 2)
        run(engine)
    metrics = engine.metrics.snapshot()
    assert (metrics.prefix_cache_queries, metrics.prefix_cache_hits) == (26, 12)
    assert metrics.prefix_cache_hit_rate == 12 / 26
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (26, 4)
    assert metrics.requests_finished == {"length": 2}


def test_a_cache_that_is_off_is_asked_for_nothing(tier: Tier) -> None:
    engine, _ = make_clocked_engine(tier, caching=False)
    add(engine, "a", list(range(300, 313)), 2)
    run(engine)
    assert engine.metrics.snapshot().prefix_cache_queries == 0
    assert engine.metrics.snapshot().prompt_tokens == 13


def test_25780_hits_after_a_preemption_are_counted_apart(tier: Tier) -> None:
    """Distinct prompts share nothing, so the hit rate that a user is shown is 0, however often requests resume."""
    engine, _ = make_clocked_engine(tier, block_size=4, num_usable_blocks=10)
    for i in range(4):
        add(engine, f"r{i}", list(range(300 + 50 * i, 312 + 50 * i)), 12)
    run(engine)
    metrics = engine.metrics.snapshot()
    assert metrics.num_preemptions > 0
    assert metrics.resumed_prefix_cache_hits > 0
    assert metrics.resumed_prefix_cache_queries >= metrics.resumed_prefix_cache_hits
    assert (metrics.prefix_cache_queries, metrics.prefix_cache_hits) == (48, 0)
    assert metrics.prefix_cache_hit_rate == 0.0
    assert metrics.prompt_tokens == 48, "a prompt that is computed twice came once"


def test_the_gauges_follow_the_queues_and_the_pool(tier: Tier) -> None:
    engine, _ = make_clocked_engine(tier, block_size=4, num_usable_blocks=10, max_num_seqs=2, caching=False)
    for i in range(3):
        add(engine, f"r{i}", list(range(300, 308)), 3)
    engine.step()
    metrics = engine.metrics.snapshot()
    assert (metrics.num_requests_running, metrics.num_requests_waiting) == (2, 1)
    assert metrics.kv_cache_usage == pytest.approx(0.4)
    run(engine)
    metrics = engine.metrics.snapshot()
    assert (metrics.num_requests_running, metrics.num_requests_waiting, metrics.kv_cache_usage) == (0, 0, 0.0)


def test_queue_time_ends_with_the_first_admission(tier: Tier) -> None:
    engine, clock = make_clocked_engine(tier, max_num_seqs=1)
    add(engine, "a", [300, 301], 2)
    add(engine, "b", [300, 301], 2)
    add(engine, "c", [300, 301], 2)
    while engine.has_unfinished_requests():
        clock.now += 1.0
        engine.step()
        engine.abort_request("c")
    summary = engine.metrics.snapshot().queue_time
    assert (summary.count, summary.total) == (2, 1.0 + 3.0)
    assert engine.metrics.arrived == {}, "an aborted request leaves nothing behind"


def test_token_times_are_those_of_the_finished_requests(tier: Tier) -> None:
    engine, _ = make_clocked_engine(tier)
    metrics = engine.metrics
    metrics.request_finished(RequestMetrics(5, num_output_tokens=5, ttft_s=1.0, latency_s=3.0), "length")
    metrics.request_finished(RequestMetrics(5, num_output_tokens=1, ttft_s=2.0, latency_s=2.0), "stop")
    metrics.request_finished(RequestMetrics(5, num_output_tokens=3, ttft_s=4.0, latency_s=90.0), "abort")
    metrics.request_finished(RequestMetrics(5), "error")
    snapshot = metrics.snapshot()
    assert (snapshot.time_to_first_token.count, snapshot.time_to_first_token.total) == (3, 7.0)
    assert (snapshot.inter_token_latency.count, snapshot.inter_token_latency.total) == (1, 0.5)
    assert snapshot.requests_finished == {"length": 1, "stop": 1, "abort": 1, "error": 1}


def test_every_end_of_a_request_is_counted_once(tier: Tier) -> None:
    engine, _ = make_engine(tier, make_scripted_config(), nan_at={"c": 1}, script={"b": [5, 6, 7]})
    engine.add_request("a", [300], SamplingParams(max_tokens=9))
    engine.add_request("b", [300], SamplingParams(max_tokens=9, stop=engine.tokenizer.decode([6])))
    engine.add_request("c", [300], SamplingParams(max_tokens=9))
    engine.step()
    engine.abort_request(["a", "a", "unknown"])
    run(engine)
    assert engine.metrics.snapshot().requests_finished == {"abort": 1, "stop": 1, "error": 1}


def test_the_log_says_every_few_seconds_what_the_engine_does(
    tier: Tier, caplog: pytest.LogCaptureFixture
) -> None:
    engine, clock = make_clocked_engine(tier, block_size=4, num_usable_blocks=40, max_num_seqs=2)
    for i in range(3):
        add(engine, f"r{i}", list(range(300, 310)), 50)
    with caplog.at_level(logging.INFO, logger="twinfer"):
        for _ in range(10):
            engine.step()
        assert caplog.messages == []
        clock.now += 2 * LOG_INTERVAL_S
        engine.step()
        engine.step()
    (line,) = caplog.messages
    # 20 prompt tokens and 2 * 11 sampled in 10 seconds; 2 of 5 full blocks are shared: 2 + 2 * 3 blocks are held
    assert line == (
        "Prompt 2.0 tokens/s, generation 2.2 tokens/s, running 2 requests, waiting 1, KV cache 20.0% used, "
        "prefix cache hit rate 40.0%, 0 preemptions."
    )


def test_rates_begin_when_the_engine_begins_to_work_again(
    tier: Tier, caplog: pytest.LogCaptureFixture
) -> None:
    engine, clock = make_clocked_engine(tier)
    add(engine, "a", [300, 301], 2)
    run(engine)
    clock.now += 1000.0
    add(engine, "b", [300, 301], 4)
    with caplog.at_level(logging.INFO, logger="twinfer"):
        engine.step()
        assert caplog.messages == [], "idle time is no reason for a line"
        clock.now += LOG_INTERVAL_S
        engine.step()
    assert "generation 0.4 tokens/s" in caplog.text


def test_the_line_can_be_turned_off(tier: Tier, caplog: pytest.LogCaptureFixture) -> None:
    for silence in ("attribute", "level"):
        engine, clock = make_clocked_engine(tier)
        engine.log_stats = silence != "attribute"
        level = logging.INFO if silence == "attribute" else logging.WARNING
        add(engine, "a", [300, 301], 4)
        with caplog.at_level(level, logger="twinfer"):
            clock.now += 100 * LOG_INTERVAL_S
            engine.step()
        assert caplog.messages == []
    assert logger.name == "twinfer"


def test_a_stat_logger_takes_no_figures_before_its_time(tier: Tier) -> None:
    engine, clock = make_clocked_engine(tier)

    class Counting(EngineMetrics):
        num_snapshots = 0

        def snapshot(self) -> Any:
            self.num_snapshots += 1
            return super().snapshot()

    metrics = Counting(engine.engine_core.scheduler)
    stats = StatLogger(metrics, clock)
    for _ in range(1000):
        stats.step()
    assert metrics.num_snapshots == 0
    clock.now += LOG_INTERVAL_S
    stats.step()
    assert metrics.num_snapshots == 1


def test_drafts_are_counted_when_they_were_checked_and_by_position() -> None:
    """Behaviour 51: of 1 2 3 the model draws 1 and then 5."""
    drafts = DraftMetrics([0, 0, 0])
    drafts.observe([1, 2, 3], [1, 5])
    assert (drafts.num_verifications, drafts.num_draft_tokens, drafts.num_accepted_tokens) == (1, 3, 1)
    assert drafts.accepted_per_position == [1, 0, 0]
    drafts.observe([4, 5], [4, 5, 6])
    drafts.observe([7], [8])
    assert (drafts.num_verifications, drafts.num_draft_tokens, drafts.num_accepted_tokens) == (3, 6, 3)
    assert drafts.accepted_per_position == [2, 1, 0]


def test_drafts_without_a_sampled_token_count_for_nothing() -> None:
    """Behaviour 49: the request ended with an error, or was aborted."""
    drafts = DraftMetrics([0, 0])
    drafts.observe([1, 2], [])
    drafts.observe([], [3])
    assert drafts == DraftMetrics([0, 0])


def test_a_verification_that_breaks_down_leaves_the_draft_figures_as_they_were(tier: Tier) -> None:
    """Steps begin at the positions 0, 1 and 5; the last of them is the second with drafts."""
    engine, _ = make_engine(tier, nan_at={"a": 5}, num_drafts=3)
    add(engine, "a", [300, 301], 20)
    run(engine)
    now = engine.metrics.snapshot()
    assert now.requests_finished == {"error": 1}
    assert (now.num_drafts, now.num_draft_tokens, now.num_accepted_tokens) == (1, 3, 3)


def test_an_engine_reports_its_drafts_in_figures_and_in_the_log(
    tier: Tier, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten tokens: one, then two runs of 1 + 3, and the last alone."""
    engine, _ = make_engine(tier, num_drafts=3)
    clock = Clock()
    engine.metrics.clock = engine.stat_logger.clock = clock
    engine.stat_logger.restart()
    add(engine, "a", [300, 301], 10)
    with caplog.at_level(logging.INFO, logger="twinfer"):
        run(engine)
        clock.now += LOG_INTERVAL_S
        engine.stat_logger.step()
    now = engine.metrics.snapshot()
    assert (now.num_drafts, now.num_draft_tokens, now.num_accepted_tokens) == (2, 6, 6)
    assert now.num_accepted_tokens_per_position == (2, 2, 2)
    assert (now.draft_acceptance_rate, now.mean_acceptance_length) == (1.0, 4.0)
    assert caplog.messages[-1].endswith("Drafts 6, accepted 6 (100.0%), 4.00 tokens a verification.")


def test_without_speculation_there_are_no_figures_of_it(tier: Tier) -> None:
    engine, _ = make_engine(tier)
    add(engine, "a", [300, 301], 5)
    run(engine)
    now = engine.metrics.snapshot()
    assert (now.num_drafts, now.num_draft_tokens, now.num_accepted_tokens) == (0, 0, 0)
    assert (now.num_accepted_tokens_per_position, now.draft_acceptance_rate) == ((), 0.0)
    assert now.mean_acceptance_length == 1.0
