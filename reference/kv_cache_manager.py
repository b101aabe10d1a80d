"""Block tables: the page tables of the KV cache.

Token position p of a request lives in physical block `table[p // block_size]`, at offset `p % block_size`. Until the
request is freed its table grows at its end, and one entry may be replaced: that of a partly filled block which siblings
share, when the first of them writes to it (copy-on-write). A request that is swapped out has a table of blocks of the
host pool instead, until it comes back.

    table   [ hit ......... | registered ...... | written, not full yet | reserved ]
              from the cache  findable by others  tail of the sequence    this step writes here

In a model with a sliding window the table also empties from its start: an entry that no later token looks at becomes 0,
the null block, and its block is free for others.

Hashes are recomputed from the tokens whenever they are needed: slow, and impossible to get out of step.
(vLLM: `vllm/v1/core/kv_cache_manager.py`.)
"""

from __future__ import annotations

from collections.abc import Sequence

from reference.block_pool import BlockPool
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
        # A hit needs the blocks of the window - 1 tokens before the next one; without a window, all of them.
        window = config.sliding_window or config.num_blocks * config.block_size
        self.num_window_blocks = max(cdiv(window - 1, config.block_size), 1)
        self.block_pool = BlockPool(config.num_blocks)
        self.block_tables: dict[str, list[int]] = {}
        self.num_cached_blocks: dict[str, int] = {}  # leading blocks of the table that were hit or registered
        # blocks this request put into the cache since its admission, and under which hash
        self.registered: dict[str, list[tuple[int, bytes]]] = {}
        self.registered_in_step: dict[str, list[tuple[int, bytes]]] = {}
        self.block_copies: dict[str, BlockCopy] = {}  # planned in this step
        self.shortage = (0, 0)
        self.host_pool = BlockPool(config.num_host_blocks + 1)  # nothing in it is ever looked up by hash
        self.host_tables: dict[str, list[int]] = {}
        self.host_shortage = (0, 0)
        self.swap_outs: list[BlockSwap] = []  # planned in this step
        self.swap_ins: list[BlockSwap] = []
        self.hex_hashes = HexHashes(config.num_blocks)  # for snapshots

    def get_computed_blocks(self, request: Request) -> list[int]:
        if not self.enable_caching or request.sampling_params.skip_reading_prefix_cache:
            return []
        # The last known token is always computed again: its logits are what the next token is drawn from.
        num_full_blocks = (request.num_tokens - 1) // self.block_size
        cached = [
            self.block_pool.get_cached_block(block_hash) or 0  # 0: not in the cache
            for block_hash in self._block_hashes(request, num_full_blocks)
        ]
        longest = run = 0  # blocks of the longest usable prefix; cached blocks in a row, up to this one
        for num_blocks, block in enumerate(cached, start=1):
            run = run + 1 if block else 0
            if run >= min(num_blocks, self.num_window_blocks):
                longest = num_blocks
        first = max(longest - self.num_window_blocks, 0)
        return [0] * first + cached[first:longest]

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        computed_blocks: Sequence[int] = (),
        num_external_tokens: int = 0,
    ) -> list[int] | None:
        table = self.block_tables.get(request.request_id, [])
        self._free_left_of_window(request, table)
        # Of what is swapped in, too, the entries that had left the window stay null; hits among them are of no use.
        num_left = self.host_tables.get(request.request_id, []).count(0)
        if len(computed_blocks) < num_left:
            computed_blocks = [0] * num_left
        num_found_tokens = len(computed_blocks) * self.block_size + num_external_tokens
        num_tokens = max(request.num_computed_tokens, num_found_tokens) + num_new_tokens
        num_fresh = max(cdiv(num_tokens, self.block_size) - len(table) - len(computed_blocks), 0)
        shared = self._shared_block_to_write(request, table)
        # A hit that nobody holds sits in the free queue: taking it uses up one free block as well.
        num_needed = num_fresh + (shared is not None)
        hits = [block for block in computed_blocks if block]
        num_needed += sum(self.block_pool.ref_count[block] == 0 for block in hits)
        num_free = self.block_pool.get_num_free_blocks()
        if num_needed > num_free:
            self.shortage = (num_needed, num_free)
            return None

        if shared is not None:
            self._copy_on_write(request, table, shared)
        self.block_pool.touch(hits)  # first, so that no hit is evicted for a fresh block
        new_blocks = [*computed_blocks, *self.block_pool.get_new_blocks(num_fresh)]
        self.block_tables.setdefault(request.request_id, []).extend(new_blocks)
        if computed_blocks:
            self.num_cached_blocks[request.request_id] = len(computed_blocks)
        if request.request_id in self.host_tables:
            self._swap_in(request, first=len(computed_blocks))
        self._cache_full_blocks(request, min(num_tokens, request.num_tokens))
        return new_blocks

    def _free_left_of_window(self, request: Request, table: list[int]) -> None:
        """Give back the blocks that neither the next token nor any later one looks at.

        The next token stands at position num_computed_tokens and sees the W positions that end there.
        """
        if self.sliding_window is None:
            return
        first_seen = max(request.num_computed_tokens - self.sliding_window + 1, 0)
        dead = [index for index, block in enumerate(table[: first_seen // self.block_size]) if block]
        self.block_pool.free_blocks([table[index] for index in reversed(dead)])
        for index in dead:
            table[index] = 0

    def _shared_block_to_write(self, request: Request, table: Sequence[int]) -> int | None:
        """Index of the partly filled block that the next token goes into, if somebody else holds it as well."""
        index = request.num_computed_tokens // self.block_size
        is_shared = index < len(table) and self.block_pool.ref_count[table[index]] > 1
        return index if is_shared else None

    def _copy_on_write(self, request: Request, table: list[int], index: int) -> None:
        """Give the request a block of its own in place of a shared one; the runner copies the content."""
        (target,) = self.block_pool.get_new_blocks(1)
        source, table[index] = table[index], target
        self.block_pool.free_blocks([source])  # one holder less; others still hold it
        self.block_copies[request.request_id] = BlockCopy(index, source, target)

    def cache_blocks(self, request: Request) -> None:
        self._cache_full_blocks(request, min(request.num_computed_tokens, request.num_tokens))

    def _cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Register the blocks that are full once this step has computed tokens [0, num_tokens).

        That is before the forward pass: every layer writes the K and V of the whole batch before it attends, so a
        request admitted later in the same step may already read them.
        """
        first = self.num_cached_blocks.get(request.request_id, 0)
        last = num_tokens // self.block_size
        if not self.enable_caching or last <= first:
            return
        table = self.block_tables[request.request_id]
        for index, block_hash in enumerate(self._block_hashes(request, last)):
            if index >= first and table[index]:
                self.block_pool.cache_block(table[index], block_hash)
                entry = (table[index], block_hash)
                self.registered.setdefault(request.request_id, []).append(entry)
                self.registered_in_step.setdefault(request.request_id, []).append(entry)
        self.num_cached_blocks[request.request_id] = last

    def _block_hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """The hash chain of the first `num_blocks` blocks, from the root."""
        hashes = []
        parent = ROOT_HASH
        for index in range(num_blocks):
            tokens = request.all_token_ids[index * self.block_size : (index + 1) * self.block_size]
            parent = hash_block(parent, tokens, extra_keys(index, request.cache_salt, request.embeds_digest))
            hashes.append(parent)
        return hashes

    def fork(self, parent: Request, sibling: Request) -> None:
        table = self.block_tables[parent.request_id]
        self.block_pool.touch([block for block in table if block])
        self.block_tables[sibling.request_id] = list(table)
        self.num_cached_blocks[sibling.request_id] = self.num_cached_blocks.get(parent.request_id, 0)

    def swap_out(self, request: Request) -> bool:
        table = self.block_tables[request.request_id][: cdiv(request.num_computed_tokens, self.block_size)]
        if (copy := self.get_block_copy(request.request_id)) is not None:
            table[copy.index] = copy.source  # the copy would have been made after the swap-outs of this step
        live = [block for block in table if block]  # the others have left the window
        num_free = self.host_pool.get_num_free_blocks()
        self.host_shortage = (len(live), num_free)
        if len(live) > num_free:
            return False
        self.free(request)
        host_blocks = self.host_pool.get_new_blocks(len(live))
        self.host_tables[request.request_id] = [0] * (len(table) - len(live)) + host_blocks
        self.swap_outs += map(BlockSwap, live, host_blocks)
        return True

    def _swap_in(self, request: Request, first: int) -> None:
        """Bring back the saved blocks from index `first` on: those before it were found in the prefix cache."""
        host_table = self.host_tables.pop(request.request_id)
        table = self.block_tables[request.request_id][: len(host_table)]
        self.swap_ins += map(BlockSwap, table[first:], host_table[first:])
        self.host_pool.free_blocks([block for block in reversed(host_table) if block])

    def get_block_copy(self, request_id: str) -> BlockCopy | None:
        return self.block_copies.get(request_id)

    def free(self, request: Request) -> None:
        table = self.block_tables.pop(request.request_id, [])
        self.block_copies.pop(request.request_id, None)  # a victim of this step needs no copy any more
        self.block_pool.free_blocks([block for block in reversed(table) if block])
        self.num_cached_blocks.pop(request.request_id, None)
        self.registered.pop(request.request_id, None)
        self.registered_in_step.pop(request.request_id, None)
        host_table = self.host_tables.pop(request.request_id, [])
        self.host_pool.free_blocks([block for block in reversed(host_table) if block])

    def begin_step(self) -> None:
        self.registered_in_step.clear()
        self.block_copies.clear()
        self.swap_outs.clear()
        self.swap_ins.clear()
        self.block_pool.evicted.clear()

    def withdraw(self, request: Request, whole: bool = False) -> None:
        blocks = (self.registered if whole else self.registered_in_step).get(request.request_id, ())
        for block, block_hash in blocks:
            # A block that has left the window may hold something else by now.
            if self.block_pool.block_hash[block] == block_hash:
                self.block_pool.uncache_block(block)

    def withdraw_all(self) -> None:
        for block in range(self.block_pool.num_blocks):
            self.block_pool.uncache_block(block)

    def get_block_ids(self, request_id: str) -> tuple[int, ...]:
        return tuple(self.block_tables.get(request_id, ()))

    @property
    def usage(self) -> float:
        return 1 - self.block_pool.get_num_free_blocks() / (self.block_pool.num_blocks - 1)

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
        assert saved + self.host_pool.get_num_free_blocks() + 1 == self.host_pool.num_blocks, (
            "a host block is neither free nor in a table"
        )
        holders = [0] * self.block_pool.num_blocks
        for table in self.block_tables.values():
            for block in filter(None, table):
                holders[block] += 1
        assert holders == self.block_pool.ref_count, "reference counts differ from the tables' holders"
