"""How much of a GPU's memory the KV cache may take: what is left when the model is loaded and its largest step is run.

Source: vLLM's `determine_available_memory` in `v1/worker/gpu_worker.py`.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import torch

from fast import kernels
from fast.model_runner import ModelRunner
from reference.contracts.config import EngineConfig, cdiv
from reference.contracts.protocols import Checkpoint
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import NewRequestData, SchedulerOutput


@dataclass(frozen=True)
class MemoryUse:
    """Of one device, in bytes, at the end of its largest step."""

    total: int
    free: int
    allocated_peak: int  # by torch: weights, the step's own KV cache, and activations at their most
    reserved: int  # by torch, from the driver
    kv_cache: int  # of the allocated: the KV cache of the step


def memory_left(use: MemoryUse, utilization: float) -> int:
    """Bytes for a KV cache beside everything else, within a share of the device's memory; may be negative.

    What others hold, and what the driver and its libraries took, counts like the model's own memory.
    """
    others = use.total - use.free - use.reserved
    return int(use.total * utilization) - others - (use.allocated_peak - use.kv_cache)


def largest_step(config: EngineConfig) -> SchedulerOutput:
    """`max_num_batched_tokens` tokens of as many requests as may run, each of which samples."""
    scheduler, block_size = config.scheduler, config.cache.block_size
    num_seqs = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    requests, next_block = [], 1
    for i in range(num_seqs):
        length = (scheduler.max_num_batched_tokens + i) // num_seqs  # together all of them
        length = min(length, scheduler.max_model_len - 1)
        blocks = tuple(range(next_block, next_block + cdiv(length, block_size)))
        next_block += len(blocks)
        requests.append(
            NewRequestData(
                request_id=str(i),
                token_ids=(0,) * length,
                num_prompt_tokens=length,
                num_computed_tokens=0,
                block_ids=blocks,
                sampling_params=SamplingParams(temperature=1.0, top_k=10, top_p=0.9),
                seed=i,
            )
        )
    return SchedulerOutput(
        step=0,
        scheduled_new_reqs=tuple(requests),
        scheduled_running_reqs=(),
        num_scheduled_tokens={request.request_id: len(request.token_ids) for request in requests},
        preempted_req_ids=(),
        finished_req_ids=(),
    )


def run_largest_step(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """Load the model, run its largest step, and forget both. Returns the bytes of the KV cache that the step had."""
    step = largest_step(config)
    num_blocks = 1 + sum(len(request.block_ids) for request in step.scheduled_new_reqs)
    cache = replace(config.cache, num_blocks=num_blocks, num_host_blocks=0)
    runner = ModelRunner(replace(config, cache=cache, speculative=None), checkpoint)
    runner.execute(step)
    return sum(each.nbytes for pair in runner.kv_caches for each in pair)


def kv_cache_memory(config: EngineConfig, checkpoint: Checkpoint, utilization: float) -> int:
    """Bytes for the KV cache on the current GPU, found by running the largest step once. It loads the model for that.

    Args:
        config: of the engine; the size of its pool does not matter.
        checkpoint: the weights.
        utilization: the share of the device's memory that may be used, all in all.

    Raises:
        ValueError: nothing is left, or as `ModelRunner` does.
    """
    kernels.ladder(config.device)  # where there is no GPU to measure, it says why
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    kv_cache = run_largest_step(config, checkpoint)
    free, total = torch.cuda.mem_get_info()
    use = MemoryUse(total, free, torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved(), kv_cache)
    gc.collect()
    torch.cuda.empty_cache()
    left = memory_left(use, utilization)
    if left <= 0:
        raise ValueError(
            f"The model and its largest step leave nothing for the KV cache of {utilization:.0%} of the GPU's "
            f"{total / 1024**3:.1f} GiB, of which {free / 1024**3:.1f} are free: raise gpu_memory_utilization, or "
            f"lower max_num_batched_tokens or max_num_seqs."
        )
    return left
