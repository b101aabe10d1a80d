"""Bugs in who computes how many tokens, who is preempted, and when a request ends."""

from __future__ import annotations

from reference.contracts.config import EngineConfig
from reference.contracts.request import Request, RequestStatus
from reference.frontend.async_core import AsyncEngineCore
from tests.mutants.mutant import SHARED, Plant, mutant

SCHEDULER = "spec/test_scheduler.py"


@mutant(
    "A victim that was already scheduled in this step gives its tokens back: lost, the others compute too little.",
    [f"{SCHEDULER}::test_a_victim_scheduled_in_the_same_step_returns_its_tokens_to_the_budget"],
)
def victims_budget_not_returned(plant: Plant) -> None:
    @plant.override(plant.module("scheduler").Scheduler)
    def _preempt(original, self, victim, plan):
        token_budget = plan.token_budget
        original(self, victim, plan)
        plan.token_budget = token_budget


@mutant(
    "Nobody is admitted in a step that preempts: the newcomer would take the blocks that were just freed.",
    [f"{SCHEDULER}::test_nobody_is_admitted_in_a_step_that_preempted"],
)
def admission_beside_preemption(plant: Plant) -> None:
    @plant.override(plant.module("scheduler").Scheduler)
    def _schedule_running(original, self, plan):
        original(self, plan)
        if plan.preempted:
            self._schedule_waiting(plan)


@mutant(
    "First come, first served: the last of the running is preempted. Taking the first throws away the most work.",
    [f"{SCHEDULER}::test_preemption_takes_the_last_running_request_and_returns_it_to_the_head"],
)
def first_of_the_running_preempted(plant: Plant) -> None:
    scheduler = plant.module("scheduler").Scheduler
    if plant.tier_name == "reference":
        plant.replace(scheduler, "_choose_victim", lambda self: self.running[0])
    else:
        plant.replace(scheduler, "_victim_position", lambda self: 0)


@mutant(
    "A preempted request returns to the head of the queue: at the back it waits for everybody who came after it.",
    [f"{SCHEDULER}::test_several_victims_keep_their_old_order_at_the_head_of_the_queue"],
)
def victim_to_the_back_of_the_queue(plant: Plant) -> None:
    table = plant.module("request_table")
    if plant.tier_name == "fast":
        plant.replace(table._FcfsQueue, "add_first", table._FcfsQueue.add)
        return

    @plant.override(table.RequestTable)
    def _enqueue(original, self, request, front=False):
        original(self, request)


@mutant(
    "Long prompts are cut so that others get a turn: a lone request has no others, and would only be slowed down.",
    [f"{SCHEDULER}::test_long_prefill_threshold_does_not_hold_up_a_lone_request"],
)
def lone_request_held_up(plant: Plant) -> None:
    @plant.override(plant.module("scheduler").Scheduler)
    def _schedule_running(original, self, plan):
        if self.config.long_prefill_token_threshold:
            plan.chunk_limit = self.config.long_prefill_token_threshold
        original(self, plan)


@mutant(
    "The cap on partial prefills counts what this step leaves unfinished: ignored, long prompts share out the budget.",
    [f"{SCHEDULER}::test_max_num_partial_prefills_caps_the_prompts_in_the_middle_of_their_computation"],
)
def partial_prefills_not_counted(plant: Plant) -> None:
    plant.replace(plant.module("scheduler").Scheduler, "_has_partial_prefills", lambda self, plan: False)


@mutant(
    "The last token needs no slot, and there is none for one more: a limit that is one too high asks for it.",
    [
        f"{SCHEDULER}::test_b09_a_request_as_large_as_the_pool_is_served_to_the_last_slot",
        f"{SCHEDULER}::test_the_model_length_ends_a_request_without_computing_the_last_token",
    ],
)
def one_token_too_many(plant: Plant) -> None:
    limit = EngineConfig.max_total_tokens.fget  # type: ignore[attr-defined]
    plant.replace(EngineConfig, "max_total_tokens", property(lambda config: limit(config) + 1))


@mutant(
    "End-of-sequence comes before length: a request that ends with its last allowed token has said all it had to say.",
    [f"{SCHEDULER}::test_end_of_sequence_comes_before_stop_ids_and_length"],
)
def length_before_end_of_sequence(plant: Plant) -> None:
    @plant.override(plant.module("scheduler"))
    def append_and_check_stop(original, request, token_id, max_total_tokens):
        is_finished = original(request, token_id, max_total_tokens)
        if request.num_output_tokens == request.sampling_params.max_tokens:
            request.status = RequestStatus.FINISHED_LENGTH
        return is_finished


@mutant(
    "Among equal priorities the earlier arrival goes first: without it the id decides, which is nobody's rule.",
    [f"{SCHEDULER}::test_priority_admits_by_priority_then_arrival_then_id"],
)
def arrival_ignored(plant: Plant) -> None:
    @plant.override(Request)
    def __post_init__(original, self):
        self.sort_key = (self.priority, (0, 0), self.request_id)


@mutant(
    "A step that failed may not have told the runner whom to forget: unless said again, their rows stay for good.",
    [f"{SCHEDULER}::test_after_a_failed_step_the_runner_hears_again_what_it_should_forget"],
)
def failed_step_forgets_the_finished(plant: Plant) -> None:
    @plant.override(plant.module("scheduler").Scheduler)
    def fail_step(original, self, schedule, reason):
        outputs = original(self, schedule, reason)
        told = (*schedule.finished_req_ids, *schedule.preempted_req_ids)
        self.finished_req_ids = [name for name in self.finished_req_ids if name not in told]
        return outputs


@mutant(
    "An abort frees whatever the request held: kept, its blocks belong to nobody and never come back.",
    [f"{SCHEDULER}::test_abort_in_any_state_frees_everything"],
)
def abort_keeps_the_blocks(plant: Plant) -> None:
    @plant.override(plant.module("kv_cache_manager").KVCacheManager)
    def free(original, self, request):
        if request.status is not RequestStatus.FINISHED_ABORTED:
            original(self, request)


ASYNC = "spec/test_async_scheduling.py"


@mutant(
    "A block that a token filled whose id was not known yet is registered when it is: else it is never found.",
    [f"{ASYNC}::test_blocks_are_found_in_the_cache_as_after_a_synchronous_run"],
)
def late_blocks_unregistered(plant: Plant) -> None:
    plant.replace(plant.module("kv_cache_manager").KVCacheManager, "cache_blocks", lambda self, request: None)


@mutant(
    "With a step planned on top, a failed one no longer knows what it registered: what is kept may never be computed.",
    [f"{ASYNC}::test_nothing_of_a_failed_step_is_found_in_the_cache"],
)
def failed_step_stays_cached(plant: Plant) -> None:
    plant.replace(plant.module("kv_cache_manager").KVCacheManager, "withdraw_all", lambda self: None)


@mutant(
    "Siblings begin with their parent's first token: planned on top of it, the parent writes where they all read.",
    [f"{ASYNC}::test_a_prompt_that_siblings_begin_behind_sits_out_the_step_planned_on_top_of_it"],
)
def parent_runs_ahead(plant: Plant) -> None:
    plant.replace(Request, "can_run_ahead", lambda self, max_total_tokens: True)


@mutant(
    "An id may end and come back while a step is in flight: its token belongs to the request that was planned.",
    [f"{ASYNC}::test_an_id_that_ends_and_comes_back_does_not_get_the_tokens_of_the_one_before"],
    tiers=SHARED,
)
def token_of_a_stranger(plant: Plant) -> None:
    plant.replace(AsyncEngineCore, "_without_strangers", lambda self, flight: flight.step)
