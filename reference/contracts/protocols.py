"""The seams of the engine. Each tier implements `Tier`, `Scheduler`, `KVCacheManager` and `ModelRunner`.

The front end is written once against these Protocols; it receives a `Tier` and never names the module it came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reference.contracts.config import EngineConfig, ModelConfig
from reference.contracts.request import EngineCoreRequest, Request, RequestStatus
from reference.contracts.schedule import (
    BlockCopy,
    BlockSwap,
    EngineCoreOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from reference.contracts.trace import CacheSnapshot, SchedulerNotes, SchedulerSnapshot

if TYPE_CHECKING:
    import numpy as np


class PackedTensor(NamedTuple):
    """A matrix [out, in] as its file stores it."""

    type: str  # one of `PACKED_TYPES`
    rows: np.ndarray  # uint8 [out, bytes of a row], possibly memory-mapped and read-only
    in_features: int


# Type -> (weights that share a block of a row, bytes of the block). Names and layouts are those of GGUF.
PACKED_TYPES = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
}


class Checkpoint(Protocol):
    """A model's weights, whatever file they came from, under Hugging Face's tensor names."""

    config: ModelConfig

    def tensor(self, name: str) -> np.ndarray:
        """float32, C-contiguous, possibly memory-mapped and read-only. Raises ValueError when it is missing."""
        ...

    def packed_tensor(self, name: str) -> PackedTensor | None:
        """The same numbers in their stored type; None for a type that is not in `PACKED_TYPES`, and for a vector."""
        ...

    def check_all_used(self) -> None:
        """Raise ValueError naming every tensor that nobody asked for: an unknown tensor means a misread model."""
        ...


class Grammar(Protocol):
    """What one sequence may still say; its state is how far the output has come."""

    def accept(self, token_id: int) -> None:
        """The output goes on with this token."""
        ...

    def count_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens may follow, from the first on. Changes nothing."""
        ...

    def bitmask(self, draft_token_ids: Sequence[int]) -> np.ndarray:
        """Tokens allowed now, and after each of the drafts, which must be valid: see `SchedulerOutput`."""
        ...

    def fork(self) -> Grammar:
        """A copy that goes its own way."""
        ...


class KVConnector(Protocol):
    """Where K and V may come from besides this engine's cache: a store on disk, another engine (vLLM's seam).

    The scheduler calls it in this process; a connector that holds K and V must have written them into the blocks when
    `update_state_after_alloc` returns.
    """

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens behind the prefix-cache hit that need not be computed; at least one is always left."""
        ...

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """The request was admitted with this block table, and with so many tokens from the connector."""
        ...

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> None:
        """The request ended; its blocks still hold its K and V, and are given back after this call."""
        ...


class NullKVConnector:
    """The `KVConnector` of an engine without one."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        return 0

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        pass

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> None:
        pass


class KVCacheManager(Protocol):
    """Owns the block tables and decides which physical blocks a request may write.

    Invariants (asserted by `check_integrity`): free + held + null = all blocks; no block is both free and held; a
    block's reference count is the number of tables it stands in; a table covers the computed tokens of its request, but
    for entries left of the sliding window, which are 0.
    """

    shortage: tuple[int, int]  # blocks needed and blocks free when an allocation last could not be met
    host_shortage: tuple[int, int]  # the same of the host pool, for the last `swap_out`
    host_tables: dict[str, list[int]]  # of the swapped requests: blocks of the host pool, in logical order
    swap_outs: list[BlockSwap]  # planned in this step
    swap_ins: list[BlockSwap]

    def get_computed_blocks(self, request: Request) -> list[int]:
        """Longest chain of cached full blocks that starts the request; at least one token is left to compute.

        Empty for a request that skips reading the cache (see `SamplingParams`).
        With a sliding window only the blocks that the first token behind them sees must be cached; the others are 0.

        Touches nothing: the blocks are taken by the `allocate_slots` call that gets them as `computed_blocks`.
        """
        ...

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        computed_blocks: Sequence[int] = (),
        num_external_tokens: int = 0,
    ) -> list[int] | None:
        """Make room for the next `num_new_tokens` tokens after the computed ones.

        Computed are the request's own computed tokens or, if these are more, the hits in `computed_blocks` and behind
        them `num_external_tokens` from a KV connector. Of a swapped request, what the hits do not cover is swapped in.

        Blocks left of the sliding window are given back first. Returns the blocks appended to the table,
        `computed_blocks` included, or None when there is no room; then nothing else has changed. Full blocks whose last
        token is computed by this step enter the prefix cache now, before the forward pass.
        """
        ...

    def cache_blocks(self, request: Request) -> None:
        """Register the blocks that are full, where `allocate_slots` did not know the last of their tokens yet."""
        ...

    def fork(self, parent: Request, sibling: Request) -> None:
        """Let `sibling` hold all blocks of `parent`, the partly filled last one included. Takes no block."""
        ...

    def get_block_copy(self, request_id: str) -> BlockCopy | None:
        """The copy-on-write that the last `allocate_slots` of this step planned for the request.

        Writing to a partly filled block that somebody else holds too needs a copy: the new block takes its place in the
        table. The last holder writes in place.
        """
        ...

    def swap_out(self, request: Request) -> bool:
        """Give back the request's blocks, with its computed tokens saved in the host pool.

        False when the host pool has no room for them; then nothing has changed.
        """
        ...

    def free(self, request: Request) -> None:
        """Give back the request's blocks, the tail first, so that shared heads are evicted last.

        What a swapped request holds in the host pool is given back as well.
        """
        ...

    def begin_step(self) -> None:
        """From now on `withdraw` refers to a new step."""
        ...

    def withdraw(self, request: Request, whole: bool = False) -> None:
        """Take blocks out of the prefix cache whose content was never computed.

        Those the request registered in this step; with `whole`, all that it registered since it was admitted (their
        content turned out to be broken).
        """
        ...

    def withdraw_all(self) -> None:
        """Empty the prefix cache, whoever holds its blocks: it is not known which of them were never computed."""
        ...

    def get_block_ids(self, request_id: str) -> tuple[int, ...]:
        """The block table; empty when the request holds nothing."""
        ...

    @property
    def usage(self) -> float:
        """Held blocks as a share of all that can be held, 0 to 1."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget all hashes. False, and nothing changes, while any block is held."""
        ...

    def snapshot(self) -> CacheSnapshot: ...

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        ...


class Scheduler(Protocol):
    """Decides who computes how many tokens. Its order of decisions is the contract: see `docs/rules.md`."""

    kv_cache_manager: KVCacheManager
    kv_connector: KVConnector
    requests: dict[str, Request]  # all unfinished ones
    notes: (
        SchedulerNotes | None
    )  # where `schedule` writes down its reasons; None unless somebody asks for them

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises ValueError on a duplicate id or a prompt that the pool can never hold."""
        ...

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> None:
        """End requests from outside (abort, error) and free their blocks; unknown ids are ignored."""
        ...

    def schedule(self) -> SchedulerOutput:
        """Plan one step: running requests first, in order, then, if nobody was preempted, waiting ones."""
        ...

    def update_from_output(
        self, schedule: SchedulerOutput, output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Take in the sampled tokens, apply the stop rules, free what finished."""
        ...

    def fail_step(self, schedule: SchedulerOutput, reason: str) -> list[EngineCoreOutput]:
        """The forward pass raised: end the requests of this step with `error`, keep nothing they registered."""
        ...

    def has_unfinished_requests(self) -> bool: ...

    def snapshot(self) -> SchedulerSnapshot: ...

    def check_integrity(self) -> None: ...


class ModelRunner(Protocol):
    """Turns a schedule into tokens. Holds weights, KV cache and its own copy of each scheduled request's tokens."""

    def execute(self, schedule: SchedulerOutput) -> ModelRunnerOutput: ...


class Executor(Protocol):
    """Who runs the runner: this process, several, a cluster."""

    def execute(self, schedule: SchedulerOutput) -> ModelRunnerOutput: ...


class EngineCoreClient(Protocol):
    """How the front end talks to the engine core: in process here, over threads or sockets elsewhere."""

    def add_request(self, request: EngineCoreRequest) -> None: ...

    def abort_requests(self, request_ids: Iterable[str]) -> None: ...

    def get_output(self) -> list[EngineCoreOutput]:
        """Run (or wait for) one step and return its news; empty when there is nothing to do."""
        ...

    def has_unfinished_requests(self) -> bool: ...


class Tier(Protocol):
    """Factories of one implementation. Found through the entry-point group `twinfer.tiers`."""

    name: str

    def why_unavailable(self) -> str | None:
        """None when its models can run here, else one sentence saying what is missing and how to get it."""
        ...

    def default_device(self) -> str: ...

    def kv_cache_memory(self, config: EngineConfig, checkpoint: Checkpoint, utilization: float) -> int | None:
        """Bytes left for K and V of a device's memory, of which this share may be used; None: it is not measured."""
        ...

    def make_kv_cache_manager(self, config: EngineConfig) -> KVCacheManager: ...

    def make_scheduler(self, config: EngineConfig) -> Scheduler: ...

    def make_model_runner(
        self, config: EngineConfig, checkpoint: Checkpoint, draft_checkpoint: Checkpoint | None = None
    ) -> ModelRunner: ...
