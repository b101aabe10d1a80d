"""Bugs in the block pool, the prefix cache and copy-on-write."""

from __future__ import annotations

from dataclasses import replace

from reference.contracts import block_hash
from reference.contracts.block_hash import ROOT_HASH
from reference.contracts.schedule import BlockCopy
from tests.mutants.mutant import SHARED, Plant, mutant

POOL = "spec/test_block_pool.py"
MANAGER = "spec/test_kv_cache_manager.py"
SIBLINGS = "spec/test_copy_on_write.py"
SCHEDULER = "spec/test_scheduler.py"


@mutant(
    "K and V of a block depend on all tokens before it: named by its own tokens alone, it is found behind any prefix.",
    [f"{MANAGER}::test_equal_blocks_behind_different_prefixes_are_not_shared"],
)
def hash_without_parent(plant: Plant) -> None:
    @plant.override(plant.module("kv_cache_manager"))
    def hash_block(original, parent, token_ids, extra_keys=()):
        return original(ROOT_HASH, token_ids, extra_keys)


@mutant(
    "A salt keeps tenants apart: left out of the hash, one of them finds the prompts of another.",
    [f"{MANAGER}::test_b05_the_same_salt_hits_and_another_salt_or_none_misses"],
)
def salt_forgotten(plant: Plant) -> None:
    @plant.override(plant.module("kv_cache_manager"))
    def extra_keys(original, block_index, cache_salt, *others):
        return original(block_index, None, *others)


@mutant(
    "Extra keys carry their kind: without it a salt and an adapter of one name make the same block.",
    [f"{MANAGER}::test_b05_extra_keys_of_different_kinds_never_collide"],
    tiers=SHARED,
)
def extra_keys_without_kind(plant: Plant) -> None:
    @plant.override(block_hash)
    def hash_block(original, parent, token_ids, extra_keys=()):
        return original(parent, token_ids, [("", value) for _, value in extra_keys])


@mutant(
    "Tables are freed tail first: the other way round a shared beginning is evicted before the rare ends behind it.",
    [f"{MANAGER}::test_blocks_are_freed_tail_first_so_that_shared_heads_are_evicted_last"],
)
def tail_freed_after_head(plant: Plant) -> None:
    @plant.override(plant.module("block_pool").BlockPool)
    def free_blocks(original, self, blocks):
        original(self, list(blocks)[::-1])


@mutant(
    "Blocks without a hash go to the front as one batch: put there one by one they end up in reverse order.",
    [f"{POOL}::test_freed_blocks_without_hash_go_to_the_front_as_one_batch_in_the_given_order"],
)
def freed_one_by_one(plant: Plant) -> None:
    @plant.override(plant.module("block_pool").BlockPool)
    def free_blocks(original, self, blocks):
        for block in blocks:
            original(self, [block])


@mutant(
    "What the cache can still find goes to the back of the free queue: at the front it is overwritten first.",
    [f"{POOL}::test_freed_blocks_with_hash_go_to_the_back_so_that_the_oldest_is_evicted_first"],
)
def newest_content_evicted_first(plant: Plant) -> None:
    @plant.override(plant.module("block_pool").BlockPool)
    def free_blocks(original, self, blocks):
        hashes, self.block_hash = self.block_hash, [None] * self.num_blocks
        original(self, blocks)
        self.block_hash = hashes


@mutant(
    "A hit is one holder more: not counted, the block is free for everybody while two requests read it.",
    [f"{MANAGER}::test_a_hit_while_the_owner_runs_shares_its_blocks_and_counts_two_holders"],
)
def hits_not_touched(plant: Plant) -> None:
    @plant.override(plant.module("block_pool").BlockPool)
    def touch(original, self, blocks):
        pass


@mutant(
    "Hits are touched before new blocks are taken: afterwards is too late, a hit may have been handed out as new.",
    [f"{MANAGER}::test_hits_are_touched_first_and_so_never_evicted_for_the_same_allocation"],
)
def hits_touched_too_late(plant: Plant) -> None:
    pool = plant.module("block_pool").BlockPool
    touch_now = pool.touch
    late: list[int] = []

    @plant.override(pool)
    def touch(original, self, blocks):
        late.extend(blocks)

    @plant.override(pool)
    def get_new_blocks(original, self, num_blocks):
        taken = original(self, num_blocks)
        touch_now(self, late)
        late.clear()
        return taken


@mutant(
    "Handing a block out is its eviction: with the hash kept, the old content is found where new content stands.",
    [f"{POOL}::test_handing_a_block_out_again_is_eviction_and_forgets_its_hash"],
)
def evicted_block_still_found(plant: Plant) -> None:
    @plant.override(plant.module("block_pool").BlockPool)
    def uncache_block(original, self, block):
        pass


@mutant(
    "Of blocks with one hash the first inserted is found: any other choice is as correct, and gives other tables.",
    [f"{POOL}::test_one_hash_may_live_on_several_blocks_and_lookup_returns_the_first_inserted"],
)
def lowest_block_found_first(plant: Plant) -> None:
    @plant.override(plant.module("block_pool").BlockPool)
    def get_cached_block(original, self, block_hash):
        return self.block_hash.index(block_hash) if block_hash in self.block_hash else None


@mutant(
    "The last known token is always computed: a prompt that is found whole leaves no logits to draw from.",
    [f"{MANAGER}::test_b01_a_wholly_cached_prompt_leaves_at_least_one_token_to_compute"],
)
def whole_prompt_found(plant: Plant) -> None:
    @plant.override(plant.module("kv_cache_manager").KVCacheManager)
    def get_computed_blocks(original, self, request):
        return original(self, replace(request, all_token_ids=[*request.all_token_ids, 0]))


@mutant(
    "A block is needed as soon as a token goes behind the last one: counted one token short, it has no place.",
    [
        f"{MANAGER}::test_generated_tokens_fill_and_register_blocks_too",
        f"{SCHEDULER}::test_b11_no_token_is_lost_or_doubled_across_preemption_at_a_block_border",
    ],
)
def new_block_one_token_late(plant: Plant) -> None:
    @plant.override(plant.module("kv_cache_manager").KVCacheManager)
    def allocate_slots(original, self, request, num_new_tokens, *others):
        return original(self, request, num_new_tokens - 1, *others)


@mutant(
    "Only full blocks are registered: a half full one is found by requests that then miss its second half.",
    [f"{MANAGER}::test_only_blocks_whose_every_token_is_computed_are_registered"],
)
def half_full_block_registered(plant: Plant) -> None:
    is_reference = plant.tier_name == "reference"

    @plant.override(plant.module("kv_cache_manager").KVCacheManager)
    def _cache_full_blocks(original, self, request, *others):
        num_blocks = len(self.block_tables[request.request_id])  # all, instead of those that are full
        original(self, request, *others[:-1], num_blocks * (self.block_size if is_reference else 1))


@mutant(
    "An allocation that cannot be met changes nothing: hits that were touched before the count stay held for nobody.",
    [f"{MANAGER}::test_an_allocation_that_cannot_be_met_changes_nothing"],
)
def refused_allocation_keeps_hits(plant: Plant) -> None:
    @plant.override(plant.module("kv_cache_manager").KVCacheManager)
    def allocate_slots(original, self, request, num_new_tokens, computed_blocks=(), *others):
        self.block_pool.touch(computed_blocks)
        new_blocks = original(self, request, num_new_tokens, computed_blocks, *others)
        if new_blocks is not None:
            self.block_pool.free_blocks(computed_blocks)
        return new_blocks


@mutant(
    "Blocks are registered before they are computed: if the step fails, or its request is preempted, they must go.",
    [
        f"{SCHEDULER}::test_d1_blocks_registered_in_the_step_of_a_preemption_are_withdrawn",
        "spec/test_engine_core.py::test_blocks_of_a_step_that_did_not_finish_are_never_found_again",
    ],
)
def uncomputed_blocks_stay_findable(plant: Plant) -> None:
    @plant.override(plant.module("kv_cache_manager").KVCacheManager)
    def withdraw(original, self, request, whole=False):
        pass


@mutant(
    "NaN in a row may have been in the cache for steps: what the request registered since its admission must go.",
    [f"{SCHEDULER}::test_a_request_with_broken_logits_ends_alone_and_leaves_nothing_in_the_cache"],
)
def broken_blocks_stay_findable(plant: Plant) -> None:
    @plant.override(plant.module("kv_cache_manager").KVCacheManager)
    def withdraw(original, self, request, whole=False):
        original(self, request)


@mutant(
    "Copy-on-write replaces the table's entry: appended, as in the article, the copy stands at another position.",
    [f"{SIBLINGS}::test_each_writer_but_the_last_gets_a_copy_in_place_of_the_shared_block"],
)
def cow_appends(plant: Plant) -> None:
    @plant.override(plant.module("kv_cache_manager").KVCacheManager)
    def _copy_on_write(original, self, request, table, index):
        (target,) = self.block_pool.get_new_blocks(1)
        self.block_copies[getattr(request, "request_id", request)] = BlockCopy(index, table[index], target)
        table.append(target)


@mutant(
    "Who writes to a shared block needs a copy: written in place, one sibling's token appears in all the others.",
    [
        f"{SIBLINGS}::test_each_writer_but_the_last_gets_a_copy_in_place_of_the_shared_block",
        "spec/test_parallel_sampling.py::test_sequence_i_has_the_tokens_of_a_request_of_its_own_with_seed_plus_i",
    ],
)
def shared_block_written_in_place(plant: Plant) -> None:
    @plant.override(plant.module("kv_cache_manager").KVCacheManager)
    def allocate_slots(original, self, request, *others):
        table = self.block_tables.get(request.request_id, [])
        written = table[request.num_computed_tokens // self.block_size :][:1]
        holders = [self.block_pool.ref_count[block] for block in written]
        for block in written:
            self.block_pool.ref_count[block] = 1
        new_blocks = original(self, request, *others)
        for block, count in zip(written, holders, strict=True):
            self.block_pool.ref_count[block] = count
        return new_blocks


@mutant(
    "A fork shares every block: not counted, the first sibling that ends frees them under the others.",
    [f"{SIBLINGS}::test_a_fork_shares_every_block_and_takes_none"],
)
def fork_not_counted(plant: Plant) -> None:
    @plant.override(plant.module("kv_cache_manager").KVCacheManager)
    def fork(original, self, parent, sibling):
        original(self, parent, sibling)
        for block in self.block_tables[parent.request_id]:
            self.block_pool.ref_count[block] -= 1


@mutant(
    "The order in which hits are touched decides nothing: each only leaves the queue. No test can tell, nor should it.",
    [POOL, MANAGER, SIBLINGS],
    changes_nothing=True,
)
def hits_touched_backwards(plant: Plant) -> None:
    @plant.override(plant.module("block_pool").BlockPool)
    def touch(original, self, blocks):
        original(self, list(blocks)[::-1])


@mutant(
    "A kept hash chain saves time and decides nothing: forgotten at each preemption, it is computed again.",
    [MANAGER, SIBLINGS, SCHEDULER],
    tiers=("fast",),
    changes_nothing=True,
)
def hash_chain_forgotten(plant: Plant) -> None:
    @plant.override(plant.module("kv_cache_manager").KVCacheManager)
    def free(original, self, request):
        original(self, request)
        self.block_hashes.pop(request.request_id, None)
