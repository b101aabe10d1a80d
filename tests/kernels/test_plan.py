"""Recorded plans: a replay has the bits of the calls it stands for, for every size, and refuses what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from fast import kernels
from fast.kernels import PackedMatrix, Plan

MAX_TOKENS, MAX_SEQS, HIDDEN, FFN, VOCAB = 40, 5, 64, 96, 50


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(rows: int, columns: int, seed: int) -> PackedMatrix:
    return kernels.pack([("F32", random(rows, columns, seed=seed).view(torch.uint8))], columns)


@dataclass(frozen=True)
class Network:
    """An embedding and some layers of norm, product, activation and product."""

    embedding: PackedMatrix
    layers: tuple[tuple[torch.Tensor, PackedMatrix, PackedMatrix], ...]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = kernels.empty(len(ids), HIDDEN)
        kernels.embedding(hidden, ids, self.embedding)
        for weight, up, down in self.layers:
            hidden = self.layer(hidden, weight, up, down)
        return hidden

    @staticmethod
    def layer(
        hidden: torch.Tensor, weight: torch.Tensor, up: PackedMatrix, down: PackedMatrix
    ) -> torch.Tensor:
        normed, wide = kernels.empty(len(hidden), HIDDEN), kernels.empty(len(hidden), FFN)
        kernels.rms_norm(normed, hidden, weight, 1e-5)
        kernels.linear(wide, normed, up)
        kernels.gelu(wide, wide)
        out = kernels.empty(len(hidden), HIDDEN)
        kernels.linear(out, wide, down)
        return out


def make_network(num_layers: int) -> Network:
    layers = [
        (random(HIDDEN, seed=3 * i), matrix(FFN, HIDDEN, 3 * i + 1), matrix(HIDDEN, FFN, 3 * i + 2))
        for i in range(num_layers)
    ]
    return Network(matrix(VOCAB, HIDDEN, 99), tuple(layers))


def record(network: Network) -> tuple[Plan, torch.Tensor, torch.Tensor]:
    """The plan, its ids and its result."""
    plan = Plan(MAX_TOKENS, MAX_SEQS)
    ids = torch.zeros(MAX_TOKENS, dtype=torch.int32)
    with plan.recording():
        out = network.forward(ids)
    return plan, ids, out


@pytest.fixture
def plan() -> Iterator[Plan]:
    yield Plan(MAX_TOKENS, MAX_SEQS)
    kernels.rms_norm(*[torch.ones(2, 4)] * 2, torch.ones(4), 1e-5)  # nothing is recorded any more


@pytest.mark.parametrize("threads", [1, 3])
def test_a_replay_has_the_bits_of_the_calls_for_every_number_of_tokens(
    threads: int, use_threads: Callable[[int], None]
) -> None:
    use_threads(threads)
    network = make_network(3)
    plan, ids, out = record(network)
    assert plan.num_calls == 1 + 3 * 4
    for num_tokens in (1, MAX_TOKENS, 2, 7, 33):
        ids[:num_tokens] = torch.arange(num_tokens, dtype=torch.int32) * 7 % VOCAB
        expected = network.forward(ids[:num_tokens])
        out.fill_(float("nan"))
        plan.replay(num_tokens, 1)
        assert torch.equal(out[:num_tokens], expected), num_tokens


def test_rows_behind_the_step_are_left_alone() -> None:
    plan, _, out = record(make_network(2))
    out.fill_(-7.0)
    plan.replay(3, 1)
    assert (out[3:] == -7.0).all()
    assert (out[:3] != -7.0).all()


def test_recording_computes_nothing() -> None:
    x, weight = torch.ones(MAX_TOKENS, 4), torch.full((4,), 5.0)
    with Plan(MAX_TOKENS, 1).recording():
        kernels.rms_norm(x, x, weight, 1e-5)
    assert (x == 1).all()


def test_many_layers_work_in_the_memory_that_one_needs() -> None:
    addresses: set[int] = set()
    empty = kernels.empty

    def noting(*shape: int) -> torch.Tensor:
        made = empty(*shape)
        addresses.add(made.data_ptr())
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "empty", noting)
        record(make_network(12))
    assert len(addresses) == 4  # input, norm, the wide one, output: the output is the next layer's input


def test_memory_of_a_tensor_in_use_is_not_given_away() -> None:
    plan = Plan(4, 1)
    with plan.recording():
        view = kernels.empty(4, 8)[:, 2:4]  # of a tensor that nobody holds
        other = kernels.empty(4, 8)
    assert not view.data_ptr() <= other.data_ptr() < view.data_ptr() + 4 * 8 * 4
    assert abs(view.data_ptr() - other.data_ptr()) >= 4 * 8 * 4


def test_torch_may_not_compute_in_a_plan(plan: Plan) -> None:
    x = torch.ones(MAX_TOKENS, 4)
    with pytest.raises(RuntimeError, match="A plan records kernels, and aten.mul"), plan.recording():
        x * 2


def test_sampling_is_no_part_of_a_plan(plan: Plan) -> None:
    zero, one, integer = torch.zeros(1).double(), torch.ones(1).double(), torch.zeros(1).long()
    logits, top_k = torch.zeros(1, 9), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="sample: it is no part of a plan"), plan.recording():
        kernels.sample(logits, zero, top_k, one, zero, integer, integer, integer)


def test_a_call_on_other_rows_than_those_of_the_largest_step_is_refused(plan: Plan) -> None:
    x, weight = torch.ones(MAX_TOKENS - 1, 4), torch.ones(4)
    with (
        pytest.raises(ValueError, match="A plan of 40 tokens cannot record a call on 39 rows"),
        plan.recording(),
    ):
        kernels.rms_norm(x, x, weight, 1e-5)


def test_arguments_are_checked_when_a_plan_is_recorded(plan: Plan) -> None:
    x, weight = torch.ones(MAX_TOKENS, 4), torch.ones(5)
    with pytest.raises(ValueError, match="weight: expected shape"), plan.recording():
        kernels.rms_norm(x, x, weight, 1e-5)


def test_plans_are_recorded_one_at_a_time(plan: Plan) -> None:
    with plan.recording(), pytest.raises(ValueError, match="recording a plan already"):
        Plan(1, 1)._plan.begin_recording()


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "message"),
    [
        (0, 1, "A plan of 1 to 40 tokens cannot be replayed for 0"),
        (41, 1, "A plan of 1 to 40 tokens cannot be replayed for 41"),
        (3, 6, "A plan of 1 to 5 sequences cannot be replayed for 6"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(num_tokens: int, num_seqs: int, message: str) -> None:
    plan, _, out = record(make_network(1))
    out.fill_(-7.0)
    with pytest.raises(ValueError, match=message):
        plan.replay(num_tokens, num_seqs)
    assert (out == -7.0).all()


def test_a_plan_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token and one sequence, got 0 and 1"):
        Plan(0, 1)


def test_an_id_of_the_step_that_is_out_of_range_is_refused_before_anything_is_written() -> None:
    plan, ids, out = record(make_network(1))
    out.fill_(-7.0)
    ids[2] = VOCAB
    plan.replay(2, 1)  # it does not belong to this step
    assert (out[:2] != -7.0).all()
    out.fill_(-7.0)
    with pytest.raises(ValueError, match=r"ids: expected values in \[0, 50\) .* got 50 at index 2"):
        plan.replay(3, 1)
    assert (out == -7.0).all()


def test_an_array_of_the_step_is_looked_through_once_however_many_layers_read_it() -> None:
    plan = Plan(MAX_TOKENS, MAX_SEQS)
    positions, slots = torch.zeros(MAX_TOKENS, dtype=torch.int64), torch.zeros(MAX_TOKENS, dtype=torch.int64)
    cos_sin, caches = torch.zeros(30, 8), [torch.zeros(3, 4, 2, 8) for _ in range(4)]
    with plan.recording():
        for layer in range(2):
            heads = kernels.empty(MAX_TOKENS, 2, 8)
            kernels.rotary_embedding(positions, heads, heads, cos_sin)
            kernels.reshape_and_cache(heads, heads, *caches[2 * layer : 2 * layer + 2], slots)
    assert (plan.num_calls, plan.num_checks) == (4, 2)
    positions[0], slots[1] = 30, 12
    with pytest.raises(ValueError, match=r"positions: expected values in \[0, 30\) .* got 30 at index 0"):
        plan.replay(1, 1)
    positions[0] = 29
    plan.replay(1, 1)
    with pytest.raises(ValueError, match=r"slot_mapping: expected values in \[0, 12\) .* got 12 at index 1"):
        plan.replay(2, 1)


def test_block_tables_and_lengths_of_the_step_are_checked() -> None:
    plan = Plan(4, 2)
    starts, lens = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    tables, caches = torch.zeros(2, 3, dtype=torch.int32), [torch.zeros(6, 4, 1, 8) for _ in range(2)]
    with plan.recording():
        query = kernels.empty(4, 2, 8)
        kernels.paged_attention(kernels.empty(4, 2, 8), query, *caches, tables, starts, lens, 1.0)
    starts[:] = torch.tensor([0, 1, 3])
    lens[:] = torch.tensor([5, 12])
    plan.replay(3, 2)
    for place, wrong, message in (
        (tables[1], 6, r"block_tables: expected blocks in \[0, 6\), got 6 at entry 0 of sequence 1"),
        (lens[1:], 13, r"seq_lens: .* 12 \(max_blocks \* B\) of sequence 1, got 13"),
        (starts[2:], 4, "query_start_loc: expected to start at 0 and end at T=3, got 0 and 4"),
    ):
        before = int(place[0])
        place[0] = wrong
        with pytest.raises(ValueError, match=message):
            plan.replay(3, 2)
        place[0] = before
    plan.replay(3, 2)
