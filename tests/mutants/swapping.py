"""Bugs in preemption by swap and in the bookkeeping of drafts."""

from __future__ import annotations

from dataclasses import replace

from reference.contracts.request import Request
from tests.mutants.mutant import Plant, mutant

SWAP = "spec/test_swap.py"
DRAFTS = "spec/test_drafts.py"
TOKENS = "differential/test_swap.py::test_swapped_requests_give_the_tokens_of_an_ample_pool"


@mutant(
    "Blocks are saved before anybody overwrites them: afterwards, the host pool keeps what somebody else wrote.",
    ["spec/test_block_transfer.py::test_a_block_is_saved_before_it_becomes_the_target_of_a_copy"],
)
def saved_after_reuse(plant: Plant) -> None:
    @plant.override(plant.module("block_transfer").BlockTransfer)
    def execute(original, self, schedule):
        original(self, replace(schedule, swap_outs=()))
        original(self, replace(schedule, block_copies=(), swap_ins=()))


@mutant(
    "A resumed request counts its saved tokens as computed: unless copied back, it reads other people's K and V.",
    [TOKENS],
)
def swap_ins_skipped(plant: Plant) -> None:
    @plant.override(plant.module("block_transfer").BlockTransfer)
    def execute(original, self, schedule):
        original(self, replace(schedule, swap_ins=()))


@mutant(
    "A request that is back leaves the host pool: its blocks kept, the pool fills up and swaps become recomputes.",
    [f"{SWAP}::test_without_prefix_caching_everything_is_copied_back"],
)
def host_blocks_leaked(plant: Plant) -> None:
    @plant.override(plant.module("kv_cache_manager").KVCacheManager)
    def _swap_in(original, self, request, *others, **named):
        self.host_pool.touch(self.host_tables[getattr(request, "request_id", request)])
        original(self, request, *others, **named)


@mutant(
    "Swap-outs come before copies: a victim with a copy still to be made must save the source, not the empty target.",
    [f"{SWAP}::test_a_victim_with_a_pending_copy_saves_the_block_it_would_have_been_copied_from"],
)
def target_of_a_copy_saved(plant: Plant) -> None:
    @plant.override(plant.module("kv_cache_manager").KVCacheManager)
    def swap_out(original, self, request):
        self.block_copies.pop(request.request_id, None)
        return original(self, request)


@mutant(
    "Swapped requests resume before new ones are admitted: overtaken, they fill the host pool and wait for ever.",
    [f"{SWAP}::test_under_fcfs_a_swapped_request_resumes_before_those_that_wait"],
)
def swapped_requests_overtaken(plant: Plant) -> None:
    @plant.override(plant.module("scheduler").Scheduler)
    def _next_request(original, self):
        swapped = self.swapped
        if len(self.waiting):
            self.swapped = type(swapped)()
        request = original(self)
        self.swapped = swapped
        return request


@mutant(
    "Behind the first rejected draft K and V are those of wrong tokens: counted as computed, they are never replaced.",
    [f"{DRAFTS}::test_rejected_drafts_are_computed_no_more_and_their_blocks_stay"],
)
def rejected_drafts_not_rolled_back(plant: Plant) -> None:
    @plant.override(plant.module("scheduler").Scheduler)
    def update_from_output(original, self, schedule, output):
        return original(self, replace(schedule, scheduled_spec_decode_tokens={}), output)


@mutant(
    "Drafts are guesses of the very next tokens: kept for a later step, they are checked at the wrong positions.",
    [f"{DRAFTS}::test_a_step_without_a_proposal_leaves_no_drafts"],
)
def stale_drafts_kept(plant: Plant) -> None:
    @plant.override(Request)
    def take_drafts(original, self, draft_token_ids, max_total_tokens):
        if draft_token_ids:
            original(self, draft_token_ids, max_total_tokens)

    @plant.override(plant.module("scheduler").Scheduler)
    def _commit(original, self, plan):
        drafts = {name: request.spec_token_ids for name, request in self.requests.items()}
        schedule = original(self, plan)
        for name, token_ids in drafts.items():
            self.requests[name].spec_token_ids = token_ids
        return schedule


@mutant(
    "A preempted request loses its drafts: when it comes back, its prompt is computed first and the guesses are old.",
    [f"{DRAFTS}::test_a_preempted_request_loses_its_drafts"],
)
def victim_keeps_its_drafts(plant: Plant) -> None:
    @plant.override(plant.module("scheduler").Scheduler)
    def _preempt(original, self, victim, plan):
        drafts = victim.spec_token_ids
        original(self, victim, plan)
        victim.spec_token_ids = drafts


@mutant(
    "No draft goes where no token can stand: beyond max_tokens or the model's length it is computed for nothing.",
    [f"{DRAFTS}::test_no_draft_is_made_that_max_tokens_would_cut"],
)
def drafts_beyond_the_end(plant: Plant) -> None:
    @plant.override(Request)
    def take_drafts(original, self, draft_token_ids, max_total_tokens):
        self.spec_token_ids = list(draft_token_ids)
