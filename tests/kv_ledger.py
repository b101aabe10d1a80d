"""A KV cache that remembers what was written into each slot, and a check of everything that is read.

What stands in a slot is the whole sequence up to its token: K and V depend on all of it. So a block that was never
computed, was copied too late, or belongs to another prefix does not go unnoticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from reference.contracts.schedule import SchedulerOutput

Slots = dict[tuple[int, int], int]  # (block, offset) -> content


@dataclass
class RequestState:
    """A request as a runner knows it from the schedules alone."""

    token_ids: list[int]
    block_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass
class KVLedger:
    """Does to its slots what a runner does to its KV cache."""

    block_size: int
    sliding_window: int | None = None
    states: dict[str, RequestState] = field(default_factory=dict)
    device: Slots = field(default_factory=dict)
    host: Slots = field(default_factory=dict)
    newest: dict[str, list[int]] = field(default_factory=dict)  # what the last step has drawn

    def update_states(self, schedule: SchedulerOutput) -> None:
        for request_id in (*schedule.finished_req_ids, *schedule.preempted_req_ids):
            self.states.pop(request_id, None)
        for new in schedule.scheduled_new_reqs:
            assert new.request_id not in self.states, f"{new.request_id} is new for the second time"
            self.states[new.request_id] = RequestState(
                list(new.token_ids), list(new.block_ids), new.num_prompt_tokens, new.num_computed_tokens
            )
        for running in schedule.scheduled_running_reqs:
            state = self.states[running.request_id]
            state.token_ids.extend(running.known_token_ids(self.newest))
            if running.block_copy is not None:
                state.block_ids[running.block_copy.index] = running.block_copy.target
            state.block_ids.extend(running.new_block_ids)
            state.num_computed_tokens = running.num_computed_tokens

    def move_blocks(self, schedule: SchedulerOutput) -> None:
        for swap in schedule.swap_outs:
            _move(self.device, swap.device, self.host, swap.host, self.block_size)
        for copy in schedule.block_copies:
            _move(self.device, copy.source, self.device, copy.target, self.block_size)
        for swap in schedule.swap_ins:
            _move(self.host, swap.host, self.device, swap.device, self.block_size)

    def compute(self, schedule: SchedulerOutput) -> None:
        """Write what the step computes, all requests first; then read all that it builds on."""
        for request_id, count in schedule.num_scheduled_tokens.items():
            state = self.states[request_id]
            contents = self._contents(schedule, request_id)
            for position in range(state.num_computed_tokens, state.num_computed_tokens + count):
                self.device[self._slot(state, position)] = contents[position]
        for request_id, count in schedule.num_scheduled_tokens.items():
            state = self.states[request_id]
            contents = self._contents(schedule, request_id)
            window = self.sliding_window or len(contents)
            first = max(state.num_computed_tokens - window + 1, 0)  # the first that the first new token sees
            for position in range(first, state.num_computed_tokens + count):
                found = self.device.get(self._slot(state, position))
                assert found == contents[position], f"{request_id} reads a wrong slot at position {position}"

    def _contents(self, schedule: SchedulerOutput, request_id: str) -> list[int]:
        """What stands at each position of the sequence, drafts included."""
        drafts = schedule.scheduled_spec_decode_tokens.get(request_id, ())
        return contents_of((*self.states[request_id].token_ids, *drafts))

    def _slot(self, state: RequestState, position: int) -> tuple[int, int]:
        block = state.block_ids[position // self.block_size]
        assert block > 0, "the null block is used"
        return block, position % self.block_size


def contents_of(token_ids: Sequence[int]) -> list[int]:
    content, contents = 0, []
    for token_id in token_ids:
        content = hash((content, token_id))
        contents.append(content)
    return contents


def _move(source: Slots, source_block: int, target: Slots, target_block: int, block_size: int) -> None:
    for offset in range(block_size):
        target.pop((target_block, offset), None)
        if (source_block, offset) in source:
            target[target_block, offset] = source[source_block, offset]
