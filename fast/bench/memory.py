"""`twinfer bench memory`: what sharing saves, counted on a real scheduler, and the arithmetic of a KV cache.

The example: ten sequences of 48 tokens from one prompt of 517. Tokens are scripted; blocks, copies and prefill tokens
are what the tier's scheduler really did.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from reference.contracts.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, cdiv
from reference.contracts.protocols import Tier
from reference.contracts.request import Request
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import ModelRunnerOutput
from reference.frontend.checkpoint import load_checkpoint
from reference.frontend.cli_options import add_tier_option, parse_memory
from reference.frontend.engine_args import DEFAULT_KV_CACHE_MEMORY, DEFAULT_MODEL
from reference.frontend.model_store import resolve_model
from reference.frontend.tiers import pick_tier

NUM_PROMPT_TOKENS, NUM_SEQUENCES, NUM_OUTPUT_TOKENS, BLOCK_SIZE = 517, 10, 48, 16


@dataclass(frozen=True)
class MemoryUse:
    """What one way to generate the ten sequences takes."""

    label: str
    peak_blocks: int
    prefill_tokens: int
    copies: int


def add_options(parser: argparse.ArgumentParser, tier: str | None) -> None:
    add_tier_option(parser, tier)
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, metavar="MODEL", help=f"whose KV cache (default: {DEFAULT_MODEL})"
    )
    parser.add_argument(
        "--kv-cache-memory", type=parse_memory, default=DEFAULT_KV_CACHE_MEMORY, metavar="SIZE",
        help="size of the pool: bytes, or 512MiB, 1GiB (default: 512MiB)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    model = load_checkpoint(resolve_model(arguments.model)).config
    uses = bench_memory(pick_tier(arguments.tier), model)
    print_memory(arguments.model, model, arguments.kv_cache_memory, uses)
    return 0


def bench_memory(tier: Tier, model: ModelConfig) -> list[MemoryUse]:
    """Run the example in each way; the last row is computed, because nobody here allocates like that."""
    separate = f"{NUM_SEQUENCES} separate requests"
    contiguous = NUM_SEQUENCES * cdiv(model.max_position_embeddings, BLOCK_SIZE)
    return [
        _run(tier, model, f"one request, n = {NUM_SEQUENCES}", n=NUM_SEQUENCES, caching=True),
        _run(tier, model, f"{separate}, prefix cache", n=1, caching=True),
        _run(tier, model, f"{separate}, nothing shared", n=1, caching=False),
        MemoryUse(
            f"contiguous, room for {model.max_position_embeddings:,} tokens each",
            contiguous,
            NUM_SEQUENCES * NUM_PROMPT_TOKENS,
            0,
        ),
    ]


def _run(tier: Tier, model: ModelConfig, label: str, n: int, caching: bool) -> MemoryUse:
    num_blocks = NUM_SEQUENCES * cdiv(NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS, BLOCK_SIZE) + 1
    scheduler = tier.make_scheduler(
        EngineConfig(
            model,
            CacheConfig(BLOCK_SIZE, num_blocks, caching),
            SchedulerConfig(max_model_len=1024, max_num_batched_tokens=NUM_SEQUENCES * NUM_PROMPT_TOKENS),
        )
    )
    for number in range(NUM_SEQUENCES // n):
        scheduler.add_request(
            Request(
                request_id=f"r{number}",
                all_token_ids=list(range(NUM_PROMPT_TOKENS)),
                num_prompt_tokens=NUM_PROMPT_TOKENS,
                sampling_params=SamplingParams(n=n, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True),
                seed=number,
                arrival=(number, 0),
            )
        )
    peak_blocks = prefill_tokens = copies = 0
    while scheduler.has_unfinished_requests():
        schedule = scheduler.schedule()
        peak_blocks = max(peak_blocks, len(scheduler.snapshot().cache.ref_counts))
        copies += len(schedule.block_copies)
        sampled, siblings = {}, {}
        for request_id, num_tokens in schedule.num_scheduled_tokens.items():
            request = scheduler.requests[request_id]
            if request.num_output_tokens == 0:
                prefill_tokens += num_tokens
            # Different tokens for each sequence, so that generated blocks are not shared.
            sampled[request_id] = [1000 + request.seed + request.arrival[1]]
            if request.has_unborn_siblings:
                siblings[request_id] = [1000 + index for index in range(1, n)]
        scheduler.update_from_output(schedule, ModelRunnerOutput(sampled, sibling_token_ids=siblings))
    return MemoryUse(label, peak_blocks, prefill_tokens, copies)


def print_memory(model_name: str, model: ModelConfig, memory: int, uses: list[MemoryUse]) -> None:
    """The example's table, then the arithmetic for `memory` bytes of KV cache."""
    console = Console(highlight=False)
    block_bytes = BLOCK_SIZE * model.kv_bytes_per_token()
    table = Table(
        title=f"{NUM_SEQUENCES} sequences of {NUM_OUTPUT_TOKENS} tokens from one prompt of {NUM_PROMPT_TOKENS}, "
        f"{BLOCK_SIZE} tokens a block"
    )
    table.add_column("way")
    for heading in ("peak blocks", "MiB", "prefill tokens", "copies"):
        table.add_column(heading, justify="right")
    for use in uses:
        mebibytes = use.peak_blocks * block_bytes / 2**20
        table.add_row(
            use.label, f"{use.peak_blocks:,}", f"{mebibytes:,.1f}", f"{use.prefill_tokens:,}", str(use.copies)
        )
    console.print(table)
    num_blocks = memory // block_bytes
    num_tokens = num_blocks * BLOCK_SIZE
    longest = model.max_position_embeddings
    console.print(
        f"{model_name}: 2 (K, V) x {model.num_hidden_layers} layers x {model.num_key_value_heads} KV heads x "
        f"{model.head_dim} x 4 bytes = {model.kv_bytes_per_token():,} bytes a token, {block_bytes:,} a block."
    )
    console.print(
        f"{memory / 2**20:,.0f} MiB hold {num_blocks:,} blocks = {num_tokens:,} tokens: "
        f"{num_blocks / cdiv(longest, BLOCK_SIZE):.2f} requests of {longest:,} tokens, or "
        f"{num_blocks // cdiv(NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS, BLOCK_SIZE):,} of "
        f"{NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS:,}."
    )
