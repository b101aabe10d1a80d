"""Blocks on the move: swap-outs, copies and swap-ins of one step, in this order, in every layer."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from reference.contracts.schedule import BlockCopy, BlockSwap, SchedulerOutput
from tests.tier_arrays import as_tier_array

NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 6, 4, 2, 3
NUM_LAYERS = 2


class Transfer:
    """A tier's `BlockTransfer`, over caches in which everything in block b of layer l is 10 * l + b (K), + 0.5 (V)."""

    def __init__(self, tier_name: str, num_host_blocks: int = 3) -> None:
        blocks = np.arange(NUM_BLOCKS, dtype=np.float32).reshape(-1, 1, 1, 1)
        shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        self.caches = [
            tuple(
                as_tier_array(tier_name, np.broadcast_to(blocks + 10 * layer + part, shape).copy())
                for part in (0.0, 0.5)
            )
            for layer in range(NUM_LAYERS)
        ]
        module = importlib.import_module(f"{tier_name}.block_transfer")
        self.transfer = module.BlockTransfer(self.caches, num_host_blocks)

    def step(self, outs: Any = (), copies: Any = (), ins: Any = ()) -> None:
        self.transfer.execute(
            SchedulerOutput(
                step=0,
                scheduled_new_reqs=(),
                scheduled_running_reqs=(),
                num_scheduled_tokens={},
                preempted_req_ids=(),
                finished_req_ids=(),
                swap_outs=tuple(BlockSwap(*swap) for swap in outs),
                block_copies=tuple(BlockCopy(0, *copy) for copy in copies),
                swap_ins=tuple(BlockSwap(*swap) for swap in ins),
            )
        )

    def contents(self) -> list[int]:
        """What stands in each block; the same in every layer, in K and V, and at every place of the block."""
        found = [
            np.asarray(cache) - 10 * layer - part
            for layer, caches in enumerate(self.caches)
            for part, cache in zip((0.0, 0.5), caches, strict=True)
        ]  # each [N, B, Hkv, D]
        whole = np.stack(found, axis=1).reshape(NUM_BLOCKS, -1)  # [N, 2 * layers * B * Hkv * D]
        assert (whole == whole[:, :1]).all(), "a block was moved in part"
        return [int(content) for content in whole[:, 0]]


@pytest.fixture
def transfer(tier_name: str) -> Transfer:
    return Transfer(tier_name)


def test_a_block_that_was_saved_comes_back_in_another_place(transfer: Transfer) -> None:
    transfer.step(outs=[(4, 1), (2, 3)])
    assert transfer.contents() == [0, 1, 2, 3, 4, 5]
    transfer.step(ins=[(1, 3), (3, 1)])
    assert transfer.contents() == [0, 2, 2, 4, 4, 5]


def test_a_block_is_saved_before_it_becomes_the_target_of_a_copy(transfer: Transfer) -> None:
    transfer.step(outs=[(4, 1)], copies=[(5, 4)])
    transfer.step(ins=[(2, 1)])
    assert transfer.contents() == [0, 1, 4, 3, 5, 5]


def test_a_block_is_copied_before_another_comes_back_into_its_place(transfer: Transfer) -> None:
    transfer.step(outs=[(1, 2)])
    transfer.step(copies=[(3, 5)], ins=[(3, 2)])
    assert transfer.contents() == [0, 1, 2, 1, 4, 3]


def test_a_block_that_is_saved_and_comes_back_in_one_step_is_itself(transfer: Transfer) -> None:
    transfer.step(outs=[(4, 1)], ins=[(2, 1)])
    assert transfer.contents() == [0, 1, 4, 3, 4, 5]


def test_one_source_may_have_several_targets(transfer: Transfer) -> None:
    transfer.step(copies=[(2, 3), (2, 4)])
    assert transfer.contents() == [0, 1, 2, 2, 2, 5]


def test_a_step_without_moves_changes_nothing(transfer: Transfer) -> None:
    transfer.step()
    assert transfer.contents() == [0, 1, 2, 3, 4, 5]
