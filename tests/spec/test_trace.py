"""The trace says what the scheduler decided and, in its own words, why. Expected sentences are worked out by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from reference.contracts.protocols import Tier
from reference.contracts.trace import StepTrace
from reference.frontend.engine_core import EngineCore
from reference.frontend.trace_run import summarise
from tests.scripted import NO_WEIGHTS, ScriptedTier, make_scripted_config
from tests.spec.test_engine_core import request, run


def make_core(tier: Tier, **options: Any) -> EngineCore:
    return EngineCore(make_scripted_config(trace=True, **options), ScriptedTier(tier), NO_WEIGHTS)


def two_growing_requests(tier: Tier, **options: Any) -> list[StepTrace]:
    """a and b hold two of five blocks each after 4 + 1 tokens; when both need a third there is one."""
    core = make_core(tier, block_size=4, num_usable_blocks=5, caching=False, **options)
    core.add_request(request("a", 4, arrival=0, max_tokens=8))
    core.add_request(request("b", 4, arrival=1, max_tokens=8))
    run(core)
    return core.traces


def test_a_preemption_is_explained_by_who_needed_what_and_who_ranked_last(tier: Tier) -> None:
    traces = two_growing_requests(tier)
    (trace,) = [trace for trace in traces if trace.preempted]
    assert trace.preempted == ("b",)
    # b is the first for which nothing is left, and gives way itself.
    assert trace.preemption_reasons == {"b": "preempted b: b needed 1 block, 0 free, b arrived last"}
    assert trace.refusal_reasons == {"b": "b waits: nobody is admitted in a step that preempts"}
    assert trace.state.waiting == ("b",)


def test_a_victim_makes_room_for_the_request_that_the_sentence_names(tier: Tier) -> None:
    core = make_core(tier, block_size=4, num_usable_blocks=4, caching=False)
    core.add_request(request("a", 7, arrival=0, max_tokens=8))
    core.add_request(request("b", 5, arrival=1, max_tokens=8))
    run(core)
    # Two blocks each after the prompts; a reaches its ninth token first.
    first = next(trace for trace in core.traces if trace.preempted)
    assert first.preemption_reasons == {"b": "preempted b: a needed 1 block, 0 free, b arrived last"}


def test_under_priority_the_lowest_is_named_and_a_tie_is_said_to_be_one(tier: Tier) -> None:
    for priorities, victim, rank in (
        ((5, 0), "a", "has the lowest priority"),
        ((3, 3), "b", "arrived last of the lowest priority"),
    ):
        core = make_core(tier, block_size=4, num_usable_blocks=4, caching=False, scheduling_policy="priority")
        for name, arrival, priority in zip("ab", (0, 1), priorities, strict=True):
            item = request(name, 7, arrival=arrival, max_tokens=8)
            core.add_request(type(item)(**{**vars(item), "priority": priority}))
        run(core)
        first = next(trace for trace in core.traces if trace.preempted)
        (sentence,) = first.preemption_reasons.values()
        assert sentence.startswith(f"preempted {victim}: ")
        assert sentence.endswith(f" needed 1 block, 0 free, {victim} {rank}")


def test_a_request_without_enough_blocks_waits_for_them(tier: Tier) -> None:
    core = make_core(tier, block_size=4, num_usable_blocks=5, caching=False)
    core.add_request(request("a", 12, max_tokens=2))
    core.add_request(request("b", 16, arrival=1, max_tokens=2))
    core.step()
    assert core.traces[0].refusal_reasons == {"b": "b waits: needs 4 blocks, 2 free"}


def test_cached_blocks_that_nobody_holds_count_as_needed(tier: Tier) -> None:
    core = make_core(tier, block_size=4, num_usable_blocks=5)
    core.add_request(request("a", range(300, 313), max_tokens=1))
    run(core)
    core.add_request(
        request("c", range(500, 512), arrival=1, max_tokens=2)
    )  # takes three: one of a's is lost
    core.add_request(request("d", range(300, 313), arrival=2, max_tokens=2))
    core.step()
    assert core.traces[-1].state.cache.evicted == (3,), "a's last full block was the least recently used"
    assert core.traces[-1].refusal_reasons == {"d": "d waits: needs 4 blocks, 2 free"}


def test_a_request_without_a_slot_waits_for_max_num_seqs(tier: Tier) -> None:
    core = make_core(tier, max_num_seqs=1)
    core.add_request(request("a", 5, max_tokens=2))
    core.add_request(request("b", 5, arrival=1, max_tokens=2))
    core.add_request(request("c", 5, arrival=2, max_tokens=2))
    core.step()
    assert core.traces[0].refusal_reasons == {"b": "b waits: max_num_seqs is 1"}


def test_a_request_behind_a_spent_budget_waits_for_the_next_step(tier: Tier) -> None:
    core = make_core(tier, max_num_batched_tokens=8)
    core.add_request(request("a", 20, max_tokens=2))
    core.add_request(request("b", 5, arrival=1, max_tokens=2))
    core.step()
    assert core.traces[0].refusal_reasons == {"b": "b waits: the step's token budget is spent"}


def test_without_chunked_prefill_a_long_prompt_waits_for_a_budget_that_holds_it(tier: Tier) -> None:
    core = make_core(
        tier, max_model_len=92, max_num_batched_tokens=92, enable_chunked_prefill=False, block_size=16
    )
    core.add_request(request("a", 80, max_tokens=2))
    core.add_request(request("b", 80, arrival=1, max_tokens=2))
    core.step()
    assert core.traces[0].refusal_reasons == {
        "b": "b waits: prompt of 80 tokens exceeds the remaining budget of 12 and chunked prefill is off"
    }


def test_what_a_cached_prompt_still_needs_is_called_its_remainder(tier: Tier) -> None:
    core = make_core(
        tier, max_model_len=92, max_num_batched_tokens=92, enable_chunked_prefill=False, block_size=16
    )
    core.add_request(request("a", range(300, 380), max_tokens=2))
    core.add_request(request("b", [*range(300, 332), *range(600, 640)], arrival=1, max_tokens=2))
    core.step()
    assert core.traces[0].refusal_reasons == {
        "b": "b waits: remainder of 40 tokens exceeds the remaining budget of 12 and chunked prefill is off"
    }


def test_when_everybody_gets_in_nobody_was_refused(tier: Tier) -> None:
    core = make_core(tier)
    core.add_request(request("a", 5, max_tokens=2))
    run(core)
    assert [trace.refusal_reasons for trace in core.traces] == [{}, {}]


def test_tokens_are_prefill_until_the_newest_output_token_is_all_that_is_missing(tier: Tier) -> None:
    core = make_core(tier, block_size=4, max_num_batched_tokens=5)
    core.add_request(request("a", 11, max_tokens=3))
    run(core)
    kinds = [(trace.num_scheduled_tokens["a"], trace.kinds["a"]) for trace in core.traces]
    # The last chunk is a single token, and still a prompt's.
    assert kinds == [(5, "prefill"), (5, "prefill"), (1, "prefill"), (1, "decode"), (1, "decode")]


def test_output_computed_again_after_a_preemption_is_prefill(tier: Tier) -> None:
    traces = two_growing_requests(tier, max_num_batched_tokens=4)
    preempted_in = next(trace.step for trace in traces if trace.preempted)
    resumed = [t for t in traces if t.step > preempted_in and "b" in t.num_scheduled_tokens]
    chunks = [(t.state.num_computed_tokens["b"], t.num_scheduled_tokens["b"], t.kinds["b"]) for t in resumed]
    # 4 prompt tokens and 4 of output, by 4 a step; the second chunk begins behind the prompt.
    assert chunks[:3] == [(4, 4, "prefill"), (8, 4, "prefill"), (9, 1, "decode")]


def test_used_and_unused_budget_add_up_and_known_tokens_are_recorded(tier: Tier) -> None:
    core = make_core(tier, max_num_batched_tokens=8)
    core.add_request(request("a", 11, max_tokens=2))
    run(core)
    assert [(t.budget_used, t.budget_unused) for t in core.traces] == [(8, 0), (3, 5), (1, 7)]
    assert [t.state.num_tokens["a"] for t in core.traces] == [11, 11, 12]
    assert [t.state.num_computed_tokens["a"] for t in core.traces] == [8, 11, 12]


def test_an_abort_between_two_steps_ends_the_request_in_the_step_before_it(tier: Tier) -> None:
    core = make_core(tier)
    core.add_request(request("a", 5, max_tokens=9))
    core.add_request(request("b", 5, arrival=1, max_tokens=9))
    core.step()
    core.abort_requests(["b", "unknown"])
    core.step()
    assert core.traces[0].finished == {"b": "abort"}
    assert core.traces[1].finished == {}


def test_steps_follow_each_other_in_time(tier: Tier) -> None:
    core = make_core(tier)
    core.add_request(request("a", 5, max_tokens=4))
    run(core)
    for earlier, later in pairwise(core.traces):
        assert 0 < earlier.started <= earlier.started + earlier.seconds <= later.started


def test_a_scheduler_that_is_not_asked_takes_no_notes(tier: Tier) -> None:
    core = EngineCore(make_scripted_config(max_num_seqs=1), ScriptedTier(tier), NO_WEIGHTS)
    core.add_request(request("a", 5, max_tokens=2))
    core.add_request(request("b", 5, arrival=1, max_tokens=2))
    run(core)
    assert core.scheduler.notes is None


def test_snapshots_share_the_hashes_that_did_not_change_and_keep_those_that_did(tier: Tier) -> None:
    core = make_core(tier, block_size=4, num_usable_blocks=8)
    core.add_request(request("a", range(300, 309), max_tokens=6))
    run(core)
    core.add_request(request("b", range(600, 630), arrival=1, max_tokens=2))  # needs the whole pool
    run(core)
    hashes = [trace.state.cache.hashes for trace in core.traces]
    assert hashes[1] is hashes[0], "the second token fills no block"
    assert list(hashes[0]) == [1, 2]
    assert list(hashes[3]) == [1, 2, 3]
    assert hashes[3][1] is hashes[0][1], "one string for all steps"
    later = hashes[-1]
    assert list(later) == sorted(later)
    assert set(later.values()).isdisjoint(hashes[0].values()), "a's blocks were taken by b"
    assert list(hashes[0]) == [1, 2], "what was recorded does not change"


def test_the_totals_of_a_run_keep_what_resumed_requests_find_apart(tier: Tier) -> None:
    core = make_core(tier, block_size=4, num_usable_blocks=10)
    for i in range(4):
        core.add_request(request(f"r{i}", range(300 + 50 * i, 312 + 50 * i), arrival=i, max_tokens=12))
    run(core)
    summary, counted = summarise(core.traces), core.metrics.snapshot()
    assert (summary.num_queried_tokens, summary.num_cached_tokens, summary.hit_rate) == (48, 0, 0.0)
    assert summary.num_resumed_cached_tokens == counted.resumed_prefix_cache_hits > 0
    assert summary.num_resumed_queried_tokens == counted.resumed_prefix_cache_queries
    assert summary.num_preemptions == counted.num_preemptions > 0
    assert summary.num_sampled_tokens == counted.generation_tokens == 48
    assert (summary.peak_blocks, summary.num_usable_blocks) == (10, 10)
