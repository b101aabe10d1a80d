"""Both tiers driven by the same random commands must agree on everything, and keep every invariant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reference.contracts.config import EngineConfig
from reference.contracts.request import child_request_id
from reference.contracts.schedule import SchedulerOutput
from reference.frontend.tiers import load_tier
from tests.factories import Driver, make_config, make_request
from tests.scale import RULE_STEPS, STEPS_AN_EXAMPLE

TIERS = [load_tier(name) for name in ("reference", "fast")]

# Few prompts over a tiny alphabet, so that shared prefixes, whole hits and duplicates are the rule.
PROMPTS = st.tuples(st.integers(0, 2), st.integers(1, 30)).map(lambda p: [p[0]] * 4 + [7] * p[1])


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    chunked = draw(st.booleans())
    max_model_len = 48
    return make_config(
        block_size=draw(st.sampled_from([1, 4, 16])),
        num_usable_blocks=draw(st.integers(3, 60)),
        caching=draw(st.booleans()),
        max_model_len=max_model_len,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(1, 64)) if chunked else max_model_len,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3, 10])),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
        preemption_mode=draw(st.sampled_from(["recompute", "swap"])),
        num_host_blocks=draw(st.sampled_from([0, 3, 12, 60])),
        num_drafts=draw(st.sampled_from([0, 0, 1, 3, 9])),
        max_num_partial_prefills=draw(st.sampled_from([0, 0, 1, 2])),
    )


class TwoTiers(RuleBasedStateMachine):
    """Drives `reference` and `fast` with one sequence of commands."""

    @initialize(config=configs())
    def start(self, config: EngineConfig) -> None:
        self.drivers = [Driver(tier, config) for tier in TIERS]
        self.config = config
        self.num_requests = 0
        self.idle_steps = 0  # in a row

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "s"]),
        eos=st.booleans(),
        n=st.sampled_from([1, 1, 2, 5]),
    )
    def add(
        self, prompt: list[int], max_tokens: int, priority: int, salt: str | None, eos: bool, n: int
    ) -> None:
        options: dict[str, Any] = {
            "arrival": self.num_requests,
            "priority": priority,
            "cache_salt": salt,
            "n": n,
        }
        if eos:
            options["eos_token_ids"] = [
                40_000 + (31 * prompt[0] + 7 * 3) % 9_000
            ]  # the fourth scripted token
        refused = []
        for driver in self.drivers:
            try:
                driver.add(make_request(f"r{self.num_requests}", prompt, max_tokens=max_tokens, **options))
                refused.append(None)
            except ValueError as error:
                refused.append(str(error))
        assert refused[0] == refused[1]
        self.num_requests += 1

    @precondition(lambda self: self.num_requests > 0)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        victim = f"r{data.draw(st.integers(0, self.num_requests - 1))}"
        index = data.draw(st.sampled_from([0, 0, 1]))
        for driver in self.drivers:
            driver.abort(child_request_id(victim, index))

    @rule(broken=st.integers(0, 40), failing=st.integers(0, 40))
    def step(self, broken: int, failing: int) -> None:
        """One step; once in a while a request's logits are broken, or the whole forward pass fails."""
        schedules = [driver.schedule() for driver in self.drivers]
        assert schedules[0] == schedules[1]
        assert self.drivers[0].scheduler.snapshot() == self.drivers[1].scheduler.snapshot()
        assert self.drivers[0].scheduler.notes == self.drivers[1].scheduler.notes
        self._check_notes(schedules[0])
        assert list(schedules[0].num_scheduled_tokens) == list(schedules[1].num_scheduled_tokens)
        self._check_progress(schedules[0])
        news = []
        for driver, schedule in zip(self.drivers, schedules, strict=True):
            if failing == 0:
                news.append(driver.scheduler.fail_step(schedule, "planned failure"))
                driver.scheduler.check_integrity()
                continue
            output = driver.sample(schedule)
            if broken == 0 and output.sampled_token_ids:
                bad = next(iter(output.sampled_token_ids))
                del output.sampled_token_ids[bad]
                output.sibling_token_ids.pop(bad, None)
                output = replace(output, errors={bad: "NaN"})
            news.append(driver.update(schedule, output))
        assert news[0] == news[1]

    def _check_notes(self, schedule: SchedulerOutput) -> None:
        """Whoever is preempted, and the head of a queue that admission did not empty, are told why."""
        scheduler = self.drivers[0].scheduler
        notes, snapshot = scheduler.notes, scheduler.snapshot()
        waiting = snapshot.waiting
        assert notes is not None
        assert tuple(notes.preempted) == schedule.preempted_req_ids
        heads = (*snapshot.swapped[:1], *waiting[:1])
        assert len(notes.refused) == bool(heads)
        if heads and scheduler.config.scheduling_policy == "fcfs":
            assert list(notes.refused) == [heads[0]]
        assert set(notes.refused) <= set(heads)

    def _check_progress(self, schedule: SchedulerOutput) -> None:
        """A step with work to do computes a token, or frees blocks for the next one (a request that outranks nobody
        and stands first in the running list can only leave), and cannot happen often in a row."""
        if not self.drivers[0].scheduler.has_unfinished_requests() or schedule.num_scheduled_tokens:
            self.idle_steps = 0
            return
        assert schedule.preempted_req_ids, "there is work, and nothing was scheduled"
        self.idle_steps += 1
        assert self.idle_steps < self.config.scheduler.max_num_seqs, "requests preempt each other without end"

    @invariant()
    def snapshots_agree(self) -> None:
        if hasattr(self, "drivers"):
            first, second = (driver.scheduler.snapshot() for driver in self.drivers)
            assert first == second
            for snapshot, driver in zip((first, second), self.drivers, strict=True):
                pool: Any = driver.manager.block_pool  # type: ignore[attr-defined]
                hashes = [(b, key.hex()) for b, key in enumerate(pool.block_hash) if key is not None]
                assert list(snapshot.cache.hashes.items()) == hashes

    def teardown(self) -> None:
        if hasattr(self, "drivers"):
            for driver in self.drivers:
                driver.run()
                driver.assert_nothing_leaked()
            assert self.drivers[0].outputs == self.drivers[1].outputs
            assert self.drivers[0].finish_reasons == self.drivers[1].finish_reasons


TestTwoTiers = TwoTiers.TestCase
TestTwoTiers.settings = settings(
    max_examples=max(RULE_STEPS // STEPS_AN_EXAMPLE, 1),
    stateful_step_count=STEPS_AN_EXAMPLE,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
