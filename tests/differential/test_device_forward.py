"""Steps on a device: padding, buffers that stay, the memory left for the KV cache. By default on the emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fast import kernels
from fast.device_forward import NO_SLOT, DeviceForward, padded_size, padding_sizes
from fast.device_memory import MemoryUse, largest_step, memory_left, run_largest_step
from fast.input_batch import StepInput
from reference.contracts.config import EngineConfig
from reference.contracts.protocols import Checkpoint
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.checkpoint import load_checkpoint
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.tiers import load_tier
from tests.devices import DEVICE
from tests.scripted import ScriptedTier
from tests.tiny_models import make_tiny_llama


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (32, [1, 2, 4, 8, 16, 24, 32]),
    ],
)
def test_sizes_ascend_to_the_largest_batch(max_num_seqs: int, sizes: list[int]) -> None:
    assert padding_sizes(max_num_seqs) == sizes


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5, 7, 8, 9, 64, 128, 130])
def test_every_batch_fits_and_is_at_most_doubled(max_num_seqs: int) -> None:
    sizes = padding_sizes(max_num_seqs)
    for num_seqs in range(1, max_num_seqs + 1):
        size = padded_size(num_seqs, sizes)
        assert num_seqs <= size < max(2 * num_seqs, num_seqs + 8)
        assert size == num_seqs or size not in range(num_seqs)


# Torch may pick another product for another number of rows: sums of up to 128 products of numbers up to 10, over 2
# layers, in another order, each rounded at 6e-8.
TOLERANCE = 1e-4

Observe = Callable[[DeviceForward, StepInput, torch.Tensor], None]


def run(model: Path, monkeypatch: pytest.MonkeyPatch, observe: Observe, num_requests: int) -> list[list[int]]:
    """An engine on the emulator; `observe` gets every step as it was loaded, and what the model made of it."""
    forward = DeviceForward.__call__

    def observed(self: DeviceForward, step: StepInput, embeds: torch.Tensor | None) -> torch.Tensor:
        hidden = forward(self, step, embeds)
        observe(self, step, hidden)
        return hidden

    monkeypatch.setattr(DeviceForward, "__call__", observed)
    args = EngineArgs(str(model), device=DEVICE, max_model_len=64, max_num_seqs=6, block_size=8)
    engine = LLMEngine.from_engine_args(args, load_tier("fast"))
    for i in range(num_requests):
        params = SamplingParams(max_tokens=3 + i, ignore_eos=True)
        engine.add_request(f"r{i}", list(range(10 + i, 15 + 2 * i)), params)
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    return [finished[f"r{i}"] for i in range(num_requests)]


def test_padded_rows_write_nothing_and_change_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When one of four requests is done, a row pads; each row is what the model makes of the step as it is."""
    make_tiny_llama(tmp_path)
    sizes = []

    def compare(forward: DeviceForward, step: StepInput, hidden: torch.Tensor) -> None:
        num_seqs = len(step.attention.seq_lens)
        if len(step.input_ids) != num_seqs:
            return
        size = padded_size(num_seqs, forward.sizes)
        sizes.append((num_seqs, size))
        assert forward._slot_mapping[num_seqs:size].tolist() == [NO_SLOT] * (size - num_seqs)
        assert not forward._seq_lens[num_seqs:size].any()  # a row that only pads has no context
        before = [cache.clone() for pair in forward.kv_caches for cache in pair]
        alone = forward.model.forward(step.input_ids, step.positions, forward.kv_caches, step.attention)
        torch.testing.assert_close(hidden, alone, rtol=0, atol=TOLERANCE)
        for cache, old in zip((c for pair in forward.kv_caches for c in pair), before, strict=True):
            torch.testing.assert_close(cache, old, rtol=0, atol=TOLERANCE)
            assert not cache[0].any()  # the null block

    tokens = run(tmp_path, monkeypatch, compare, 4)
    assert {(4, 4), (3, 4)} <= set(sizes)
    assert [len(each) for each in tokens] == [3, 4, 5, 6]


def test_a_steps_input_lies_where_that_of_every_step_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded graph reads these addresses and no others."""
    make_tiny_llama(tmp_path)
    addresses = []

    def note(forward: DeviceForward, step: StepInput, hidden: torch.Tensor) -> None:
        tensors = [step.input_ids, step.positions, step.logits_rows, *vars(step.attention).values()]
        addresses.append([tensor.data_ptr() for tensor in tensors])

    run(tmp_path, monkeypatch, note, 3)
    assert len(addresses) > 3
    assert all(each == addresses[0] for each in addresses)


def test_what_is_left_is_the_share_without_what_all_others_hold() -> None:
    use = MemoryUse(total=1000, free=300, allocated_peak=400, reserved=500, kv_cache=50)
    # Others hold 1000 - 300 - 500 = 200, the model and its step 400 - 50.
    assert memory_left(use, 0.9) == 900 - 200 - 350
    assert memory_left(replace(use, free=400), 0.9) == 900 - 100 - 350  # somebody gave 100 back
    assert memory_left(use, 0.5) < 0


def simt_config(model: Path, **options: Any) -> EngineConfig:
    args = EngineArgs(str(model), device=DEVICE, max_model_len=40, block_size=8, **options)
    return args.create_engine_config(load_checkpoint(model).config, "cpu")


@pytest.mark.parametrize(("max_num_seqs", "tokens"), [(3, 50), (8, 5), (1, 30)])
def test_the_largest_step_has_as_many_tokens_and_draws_as_the_limits_allow(
    tmp_path: Path, max_num_seqs: int, tokens: int
) -> None:
    make_tiny_llama(tmp_path)
    config = simt_config(tmp_path, max_num_seqs=max_num_seqs, max_num_batched_tokens=tokens)
    step = largest_step(config)
    assert sum(step.num_scheduled_tokens.values()) == tokens
    assert len(step.scheduled_new_reqs) == min(max_num_seqs, tokens)
    blocks = [block for request in step.scheduled_new_reqs for block in request.block_ids]
    assert sorted(blocks) == list(range(1, len(blocks) + 1))
    # Of K and V: 2 layers, the null block and these, 8 tokens of 2 heads of 16 numbers of 4 bytes.
    checkpoint = load_checkpoint(tmp_path)
    assert run_largest_step(config, checkpoint) == 2 * 2 * (1 + len(blocks)) * 8 * 2 * 16 * 4


class _MeasuringTier(ScriptedTier):
    """Says that a device has so many bytes."""

    memory: int | None = None

    def kv_cache_memory(self, config: EngineConfig, checkpoint: Checkpoint, utilization: float) -> int | None:  # type: ignore[override]
        return None if self.memory is None else int(self.memory * utilization)


@pytest.mark.parametrize(
    ("options", "memory", "num_blocks"),
    [
        ({}, 100_000, 90_000 // 4096),  # 8 tokens of 512 bytes a block
        ({"gpu_memory_utilization": 0.5}, 100_000, 50_000 // 4096),
        ({}, 10**9, 4 * 5 + 1),  # four requests of five blocks cannot hold more
        ({"num_blocks": 7}, 100_000, 7),
        ({"kv_cache_memory": 40_960}, 100_000, 10),
        ({}, None, 4 * 5 + 1),
    ],
)
def test_a_pool_without_a_size_is_what_the_device_has_room_for(
    tmp_path: Path, options: dict[str, Any], memory: int | None, num_blocks: int
) -> None:
    make_tiny_llama(tmp_path)
    args = EngineArgs(
        str(tmp_path), max_model_len=40, block_size=8, max_num_seqs=4, preemption_mode="swap", **options
    )
    checkpoint = load_checkpoint(tmp_path)
    tier = _MeasuringTier(load_tier("fast"))
    tier.memory = memory
    config = args.fit_to_device(args.create_engine_config(checkpoint.config, "cpu"), tier, checkpoint)
    assert config.cache.num_blocks == num_blocks
    assert config.cache.num_host_blocks == num_blocks - 1


@pytest.mark.parametrize("share", [0, -0.1, 1.1, True, "0.9"])
def test_a_share_of_memory_out_of_range_is_refused(share: Any) -> None:
    with pytest.raises(ValueError, match="gpu_memory_utilization must be above 0 and at most 1"):
        EngineArgs(gpu_memory_utilization=share)


def test_matrices_are_multiplied_in_full_float32_on_a_gpu() -> None:
    """TF32 keeps 10 bits: another process-wide setting of torch must not survive."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        simt = kernels.on_device("simt")
        assert simt is not None
        replace(simt, memory=torch.device("cuda"))
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)
