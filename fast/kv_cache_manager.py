"""Twin of [`reference/kv_cache_manager.py`](../reference/kv_cache_manager.py).

What differs:

- Hashes are incremental: a request's chain is kept and only continued, so each block of tokens is hashed once in the
  request's life, however often it is looked up, preempted and resumed. (Known tokens never change.)
- With a sliding window, a lookup walks back from the longest prefix and stops at the first window that is cached whole;
  the twin looks at every block. Which entries of a table are empty already is a count, not a search.
- A decode step that neither needs a block nor fills one, which is 14 of 16 at block size 16, returns after three
  comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence

from fast.block_pool import BlockPool
from reference.contracts.block_hash import ROOT_HASH, extra_keys, hash_block
from reference.contracts.config import CacheConfig, cdiv
from reference.contracts.request import Request
from reference.contracts.schedule import BlockCopy, BlockSwap
from reference.contracts.trace import CacheSnapshot, HexHashes


class KVCacheManager:
    """See `contracts.protocols.KVCacheManager` for the rules of each method."""

    def __init__(self, config: CacheConfig) -> None:
        self.block_size = config.block_size
        self.enable_caching = config.enable_prefix_caching
        self.sliding_window = config.sliding_window
        self.block_pool = BlockPool(config.num_blocks)
        self.block_tables: dict[str, list[int]] = {}
        self.block_hashes: dict[str, list[bytes]] = {}  # the chain so far; survives preemption
        self.num_cached_blocks: dict[str, int] = {}  # leading blocks of the table that were hit or registered
        # table[num_hit:num_cached] was registered by the request itself
        self.num_hit_blocks: dict[str, int] = {}
        self.cached_before_step: dict[str, int] = {}  # num_cached_blocks before this step raised it
        # what stood in the entries that left the window: table[i] is 0 for i < len(left_blocks[request])
        self.left_blocks: dict[str, list[int]] = {}
        self.block_copies: dict[str, BlockCopy] = {}
        self.shortage = (0, 0)
        self.host_pool = BlockPool(config.num_host_blocks + 1)
        self.host_tables: dict[str, list[int]] = {}
        self.host_shortage = (0, 0)
        self.swap_outs: list[BlockSwap] = []
        self.swap_ins: list[BlockSwap] = []
        self.hex_hashes = HexHashes(config.num_blocks)  # for snapshots

    def get_computed_blocks(self, request: Request) -> list[int]:
        if not self.enable_caching or request.sampling_params.skip_reading_prefix_cache:
            return []
        hits: list[int] = []
        num_full_blocks = (request.num_tokens - 1) // self.block_size
        block_hashes = self._block_hashes(request, num_full_blocks)[:num_full_blocks]
        if self.sliding_window is not None:
            return self._get_cached_window(block_hashes, self.sliding_window)
        for block_hash in block_hashes:
            block = self.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def _get_cached_window(self, block_hashes: Sequence[bytes], sliding_window: int) -> list[int]:
        """The table of the longest prefix of which the blocks that the token behind it sees are cached."""
        num_window_blocks = max(cdiv(sliding_window - 1, self.block_size), 1)
        window: list[int] = []  # cached blocks in a row, the last first
        for index in range(len(block_hashes) - 1, -1, -1):
            block = self.block_pool.get_cached_block(block_hashes[index])
            if block is None:
                window.clear()
                continue
            window.append(block)
            if len(window) == num_window_blocks:
                return [0] * index + window[::-1]
        return window[::-1]  # shorter than a window, it starts the request

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        computed_blocks: Sequence[int] = (),
        num_external_tokens: int = 0,
    ) -> list[int] | None:
        request_id = request.request_id
        table = self.block_tables.get(request_id)
        if self.sliding_window is not None and table is not None:
            self._free_left_of_window(request, table, self.sliding_window)
        num_computed_tokens = request.num_computed_tokens
        if table is None:
            if self.sliding_window is not None and request_id in self.host_tables:
                # Of what is swapped in, too, the entries that had left the window stay null; hits among them are of
                # no use.
                num_left = self.host_tables[request_id].count(0)
                if len(computed_blocks) < num_left:
                    computed_blocks = [0] * num_left
            num_found_tokens = len(computed_blocks) * self.block_size + num_external_tokens
            num_computed_tokens = max(num_computed_tokens, num_found_tokens)
        num_tokens = num_computed_tokens + num_new_tokens
        first_written = num_computed_tokens // self.block_size
        is_shared = (
            table is not None
            and first_written < len(table)
            and self.block_pool.ref_count[table[first_written]] > 1
        )
        # Not only this step fills blocks: drafts that were accepted in the last one can have filled one, too.
        fills_no_block = not self.enable_caching or (
            num_tokens // self.block_size <= self.num_cached_blocks.get(request_id, 0)
        )
        if (
            table is not None
            and fills_no_block
            and num_tokens <= len(table) * self.block_size
            and not is_shared
        ):
            return []  # the tokens go into a block that they neither open nor fill
        num_known = (len(table) if table is not None else 0) + len(computed_blocks)
        num_fresh = max(cdiv(num_tokens, self.block_size) - num_known, 0)
        num_free = self.block_pool.num_free_blocks
        num_needed = num_fresh + is_shared
        if computed_blocks:
            ref_count = self.block_pool.ref_count
            hits = [block for block in computed_blocks if block]
            num_needed += sum(ref_count[block] == 0 for block in hits)
        if num_needed > num_free:
            self.shortage = (num_needed, num_free)
            return None
        if table is not None and is_shared:
            self._copy_on_write(request_id, table, first_written)
        if computed_blocks:
            self.block_pool.touch(hits)
            if self.enable_caching:  # without, these are null entries of what is swapped in
                self.num_cached_blocks[request_id] = self.num_hit_blocks[request_id] = len(computed_blocks)
        new_blocks = [*computed_blocks, *self.block_pool.get_new_blocks(num_fresh)]
        if table is None:
            table = self.block_tables[request_id] = []
            if self.sliding_window is not None:
                self.left_blocks[request_id] = [block for block in computed_blocks if not block]
        table.extend(new_blocks)
        if request_id in self.host_tables:
            self._swap_in(request_id, table, first=len(computed_blocks))
        self._cache_full_blocks(request, table, min(num_tokens, request.num_tokens) // self.block_size)
        return new_blocks

    def _free_left_of_window(self, request: Request, table: list[int], sliding_window: int) -> None:
        """Give back the blocks that neither the next token nor any later one looks at."""
        left = self.left_blocks[request.request_id]
        first, last = len(left), (request.num_computed_tokens - sliding_window + 1) // self.block_size
        if last <= first:
            return
        dead = table[first:last]
        table[first:last] = [0] * len(dead)
        left += dead
        dead.reverse()
        self.block_pool.free_blocks(dead)

    def _copy_on_write(self, request_id: str, table: list[int], index: int) -> None:
        (target,) = self.block_pool.get_new_blocks(1)
        source, table[index] = table[index], target
        self.block_pool.ref_count[source] -= 1  # others still hold it
        self.block_copies[request_id] = BlockCopy(index, source, target)

    def cache_blocks(self, request: Request) -> None:
        num_full_blocks = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        self._cache_full_blocks(request, self.block_tables[request.request_id], num_full_blocks)

    def _cache_full_blocks(self, request: Request, table: list[int], num_full_blocks: int) -> None:
        """Register table[: num_full_blocks] as far as it is not yet registered."""
        first = self.num_cached_blocks.get(request.request_id, 0)
        if not self.enable_caching or num_full_blocks <= first:
            return
        block_hashes = self._block_hashes(request, num_full_blocks)
        for index in range(first, num_full_blocks):
            if table[index]:
                self.block_pool.cache_block(table[index], block_hashes[index])
            else:
                self.left_blocks[request.request_id][index] = 0  # left before it could be registered
        self.num_cached_blocks[request.request_id] = num_full_blocks
        self.cached_before_step.setdefault(request.request_id, first)

    def _block_hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """The request's hash chain, continued to at least `num_blocks` blocks."""
        chain = self.block_hashes.setdefault(request.request_id, [])
        for index in range(len(chain), num_blocks):
            tokens = request.all_token_ids[index * self.block_size : (index + 1) * self.block_size]
            parent = chain[-1] if chain else ROOT_HASH
            chain.append(
                hash_block(parent, tokens, extra_keys(index, request.cache_salt, request.embeds_digest))
            )
        return chain

    def fork(self, parent: Request, sibling: Request) -> None:
        table = self.block_tables[parent.request_id]
        self.block_pool.touch([block for block in table if block] if self.sliding_window else table)
        sibling_id, num_cached_blocks = sibling.request_id, self.num_cached_blocks.get(parent.request_id, 0)
        self.block_tables[sibling_id] = table.copy()
        if self.sliding_window is not None:
            self.left_blocks[sibling_id] = self.left_blocks[parent.request_id].copy()
        self.num_cached_blocks[sibling_id] = self.num_hit_blocks[sibling_id] = num_cached_blocks
        if self.enable_caching:
            num_prompt_blocks = parent.num_prompt_tokens // self.block_size
            self.block_hashes[sibling_id] = self._block_hashes(parent, num_prompt_blocks)[:num_prompt_blocks]

    def swap_out(self, request: Request) -> bool:
        table = self.block_tables[request.request_id][: cdiv(request.num_computed_tokens, self.block_size)]
        copy = self.block_copies.get(request.request_id)
        if copy is not None:
            table[copy.index] = copy.source  # the copy would have been made after the swap-outs of this step
        num_left = len(self.left_blocks.get(request.request_id, ()))
        live = table[num_left:]
        self.host_shortage = (len(live), self.host_pool.num_free_blocks)
        if len(live) > self.host_pool.num_free_blocks:
            return False
        self.free(request)
        host_blocks = self.host_pool.get_new_blocks(len(live))
        self.host_tables[request.request_id] = [0] * num_left + host_blocks
        self.swap_outs += map(BlockSwap, live, host_blocks)
        return True

    def _swap_in(self, request_id: str, table: list[int], first: int) -> None:
        """Bring back the saved blocks from index `first` on: those before it were found in the prefix cache."""
        host_table = self.host_tables.pop(request_id)
        self.swap_ins += map(BlockSwap, table[first : len(host_table)], host_table[first:])
        self.host_pool.free_blocks([block for block in reversed(host_table) if block])

    def get_block_copy(self, request_id: str) -> BlockCopy | None:
        return self.block_copies.get(request_id)

    def free(self, request: Request) -> None:
        table = self.block_tables.pop(request.request_id, None)
        if table is not None:
            del table[: len(self.left_blocks.pop(request.request_id, ()))]
            table.reverse()
            self.block_pool.free_blocks(table)
        for per_request in (
            self.num_cached_blocks,
            self.num_hit_blocks,
            self.cached_before_step,
            self.block_copies,
        ):
            per_request.pop(request.request_id, None)
        host_table = self.host_tables.pop(request.request_id, None)
        if host_table is not None:
            self.host_pool.free_blocks([block for block in reversed(host_table) if block])
        if request.is_finished:
            self.block_hashes.pop(request.request_id, None)

    def begin_step(self) -> None:
        self.cached_before_step.clear()
        self.block_copies.clear()
        self.swap_outs.clear()
        self.swap_ins.clear()
        self.block_pool.evicted.clear()

    def withdraw(self, request: Request, whole: bool = False) -> None:
        request_id = request.request_id
        last = self.num_cached_blocks.get(request_id, 0)
        first = (
            self.num_hit_blocks.get(request_id, 0) if whole else self.cached_before_step.get(request_id, last)
        )
        table, left = self.block_tables.get(request_id, []), self.left_blocks.get(request_id, ())
        for index in range(first, last):
            if index >= len(left):
                self.block_pool.uncache_block(table[index])
            elif self.block_pool.block_hash[left[index]] == self.block_hashes[request_id][index]:
                self.block_pool.uncache_block(left[index])  # nobody else has put anything into it since

    def withdraw_all(self) -> None:
        for block in range(self.block_pool.num_blocks):
            self.block_pool.uncache_block(block)

    def get_block_ids(self, request_id: str) -> tuple[int, ...]:
        return tuple(self.block_tables.get(request_id, ()))

    @property
    def usage(self) -> float:
        return 1 - self.block_pool.num_free_blocks / (self.block_pool.num_blocks - 1)

    def reset_prefix_cache(self) -> bool:
        return self.block_pool.reset_prefix_cache()

    def snapshot(self) -> CacheSnapshot:
        pool = self.block_pool
        return CacheSnapshot(
            block_tables={request_id: tuple(table) for request_id, table in self.block_tables.items()},
            ref_counts={block: count for block, count in enumerate(pool.ref_count) if count},
            free_order=tuple(pool.get_free_order()),
            hashes=self.hex_hashes.update(pool.block_hash),
            evicted=tuple(pool.evicted),
            host_tables={request_id: tuple(table) for request_id, table in self.host_tables.items()},
        )

    def check_integrity(self) -> None:
        self.block_pool.check_integrity()
        self.host_pool.check_integrity()
        saved = sum(block > 0 for table in self.host_tables.values() for block in table)
        assert saved + self.host_pool.num_free_blocks + 1 == self.host_pool.num_blocks, (
            "a host block is neither free nor in a table"
        )
        holders = [0] * self.block_pool.num_blocks
        for request_id, table in self.block_tables.items():
            for block in filter(None, table):
                holders[block] += 1
            num_left = len(self.left_blocks.get(request_id, ()))
            assert not any(table[:num_left]) and all(table[num_left:]), "table and window disagree"
            chain = self.block_hashes.get(request_id, [])
            for index in range(self.num_cached_blocks.get(request_id, 0)):
                found = self.block_pool.block_hash[table[index]]
                assert found in (chain[index], None), "a block has a wrong hash"  # None: it was withdrawn
        assert holders == self.block_pool.ref_count, "reference counts differ from the tables' holders"
