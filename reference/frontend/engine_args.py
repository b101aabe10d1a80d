"""The flat options of `LLM(...)` and of the command line, and how they become an `EngineConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from reference.contracts.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    PreemptionMode,
    SchedulerConfig,
    SchedulingPolicy,
    SpeculativeConfig,
    cdiv,
)
from reference.contracts.protocols import Checkpoint, Tier
from reference.frontend.speculative import SpeculativeArgs

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_KV_CACHE_MEMORY = 512 * 1024**2  # bytes
BYTES_PER_NUMBER = {"float32": 4, "bfloat16": 2}  # by dtype


@dataclass(frozen=True)
class EngineArgs:
    """Options of an engine; names, defaults and meanings are vLLM's where the thing exists there.

    Args:
        model: name of the embedded model, a Hugging Face style folder, or a GGUF file.
        block_size: tokens a KV cache block holds.
        max_num_seqs: requests that may run at once.
        max_num_batched_tokens: tokens one step may compute.
        enable_prefix_caching: let requests reuse the KV blocks of equal prefixes.
        enable_chunked_prefill: let a long prompt be computed over several steps.
        long_prefill_token_threshold: tokens one request may get in a step while others are there; 0 = no limit.
        scheduling_policy: "fcfs" or "priority".
        preemption_mode: what becomes of the K and V of a preempted request: "recompute" them later, or "swap" them to
            the host pool and back.
        swap_space: bytes for the host pool; unless given, as much as the KV cache has. Only with "swap".
        max_num_partial_prefills: prompts that may be in the middle of their computation at once; 0 = no limit.
        async_scheduling: plan a step while the one before it is still computed.
        num_blocks: size of the pool, with the null block; excludes kv_cache_memory.
        kv_cache_memory: bytes for the pool; unless given, 512 MiB, or less where max_num_seqs requests of full length
            need less. On "cuda", what `gpu_memory_utilization` leaves.
        gpu_memory_utilization: share of a GPU's memory for model, largest step and pool together, in (0, 1]; the step
            is run once to measure it. Without effect on other devices, and where the pool has a size.
        max_model_len: longest sequence in tokens; the model's own limit unless given.
        seed: from which requests without a seed get theirs.
        speculative: who guesses tokens that the model then checks several of in one step, as a table:
            `{"method": "ngram", "num_speculative_tokens": 4}` or
            `{"method": "draft_model", "model": "...", "num_speculative_tokens": 4}`; its other keys are those of
            `SpeculativeArgs`.
        device: "cpu", "cuda" (an NVIDIA GPU), "simt" (the CUDA kernels on the CPU, slowly), or "auto": "cuda" where one
            can be used, else "cpu". The reference tier has "cpu" alone.
        dtype: "float32", or "bfloat16" on "cuda" and "simt": half the memory, and other tokens now and then.
        trace: record a StepTrace for every step.
        keep_logits: keep the logits each token was drawn from (for comparing tiers).

    Raises:
        ValueError: an option is of the wrong type or out of range, or two of them exclude each other.
    """

    model: str = DEFAULT_MODEL
    block_size: int = 16
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: SchedulingPolicy = "fcfs"
    preemption_mode: PreemptionMode = "recompute"
    swap_space: int | None = None
    max_num_partial_prefills: int = 0
    async_scheduling: bool = False
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    seed: int = 0
    speculative: Mapping[str, Any] | None = field(default=None, hash=False)
    device: str = "auto"
    dtype: str = "float32"
    trace: bool = False
    keep_logits: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model must be a name or a path, got {self.model!r}.")
        if self.device not in ("auto", "cpu", "cuda", "simt"):
            raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'simt', got {self.device!r}.")
        if self.dtype not in BYTES_PER_NUMBER:
            raise ValueError(f"dtype must be 'float32' or 'bfloat16', got {self.dtype!r}.")
        utilization = self.gpu_memory_utilization
        if (
            isinstance(utilization, bool)
            or not isinstance(utilization, float | int)
            or not 0 < utilization <= 1
        ):
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {utilization!r}.")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be an integer, got {value!r}.")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}.")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}.")
        if self.scheduling_policy not in get_args(SchedulingPolicy):
            raise ValueError(
                f"scheduling_policy must be 'fcfs' or 'priority', got {self.scheduling_policy!r}."
            )
        if self.preemption_mode not in get_args(PreemptionMode):
            raise ValueError(f"preemption_mode must be 'recompute' or 'swap', got {self.preemption_mode!r}.")
        if self.swap_space is not None and self.preemption_mode != "swap":
            raise ValueError("swap_space is the memory for preemption_mode 'swap'; set that mode as well.")
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ValueError(
                "num_blocks and kv_cache_memory both set the size of the pool; give only one of them."
            )

        if self.speculative is not None:
            SpeculativeArgs.parse(self.speculative)

    @property
    def draft_model(self) -> str | None:
        """Name or path of the draft model, if `speculative` asks for one."""
        return None if self.speculative is None else SpeculativeArgs.parse(self.speculative).model

    def create_engine_config(
        self, model: ModelConfig, default_device: str, draft_model: ModelConfig | None = None
    ) -> EngineConfig:
        """Replace every "unless given" by a number. `draft_model` is the config of the model of that name.

        Raises:
            ValueError: the options contradict each other or the model.
        """
        max_model_len = self.max_model_len or model.max_position_embeddings
        if max_model_len > model.max_position_embeddings:
            raise ValueError(
                f"max_model_len ({max_model_len}) is above the {model.max_position_embeddings} positions the model "
                f"knows; lower it."
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < max_model_len:
            raise ValueError(
                f"Without chunked prefill a prompt must fit into one step: raise max_num_batched_tokens "
                f"({self.max_num_batched_tokens}) to max_model_len ({max_model_len}), or lower the latter."
            )
        num_blocks = self._num_blocks(model, max_model_len, self.num_blocks, self.kv_cache_memory)
        return EngineConfig(
            model=model,
            cache=CacheConfig(
                self.block_size,
                num_blocks,
                self.enable_prefix_caching,
                num_host_blocks=self._num_host_blocks(model, num_blocks),
                sliding_window=model.sliding_window,
            ),
            scheduler=SchedulerConfig(
                max_model_len=max_model_len,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                enable_chunked_prefill=self.enable_chunked_prefill,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
                scheduling_policy=self.scheduling_policy,
                preemption_mode=self.preemption_mode,
                max_num_partial_prefills=self.max_num_partial_prefills,
                async_scheduling=self.async_scheduling,
            ),
            seed=self.seed,
            speculative=self._speculative_config(draft_model, max_model_len),
            device=default_device if self.device == "auto" else self.device,
            dtype=self.dtype,
            trace=self.trace,
            keep_logits=self.keep_logits,
        )

    def fit_to_device(self, config: EngineConfig, tier: Tier, checkpoint: Checkpoint) -> EngineConfig:
        """The same config with the pool that the device has room for, where it measures that and no size was given.

        Raises:
            ValueError: there is no room.
        """
        if self.num_blocks is not None or self.kv_cache_memory is not None:
            return config
        memory = tier.kv_cache_memory(config, checkpoint, self.gpu_memory_utilization)
        if memory is None:
            return config
        most = self._num_blocks(config.model, config.scheduler.max_model_len, None, memory)
        useful = self._num_useful_blocks(config.scheduler.max_model_len)
        num_blocks = min(most, useful)
        num_host_blocks = self._num_host_blocks(config.model, num_blocks)
        return replace(
            config, cache=replace(config.cache, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
        )

    def _speculative_config(
        self, draft_model: ModelConfig | None, max_model_len: int
    ) -> SpeculativeConfig | None:
        if self.speculative is None:
            return None
        args = SpeculativeArgs.parse(self.speculative)
        num_blocks = 0
        if draft_model is not None:
            num_blocks = self._num_blocks(draft_model, max_model_len, args.num_blocks, args.kv_cache_memory)
        return SpeculativeConfig(
            method=args.method,
            num_speculative_tokens=args.num_speculative_tokens,
            prompt_lookup_min=args.prompt_lookup_min,
            prompt_lookup_max=args.prompt_lookup_max,
            draft_model=draft_model,
            num_draft_blocks=num_blocks,
        )

    def _num_blocks(
        self, model: ModelConfig, max_model_len: int, num_blocks: int | None, kv_cache_memory: int | None
    ) -> int:
        """Blocks of the model's pool, by number, by memory, or by what can be of use."""
        if num_blocks is not None:
            return num_blocks
        block_bytes = self._block_bytes(model)
        memory = DEFAULT_KV_CACHE_MEMORY if kv_cache_memory is None else kv_cache_memory
        if memory < 2 * block_bytes:  # the null block and one to use
            raise ValueError(
                f"kv_cache_memory ({memory} bytes) holds fewer than two blocks of {block_bytes} bytes; raise it or "
                f"lower block_size."
            )
        if kv_cache_memory is not None:
            return memory // block_bytes
        # A tiny model would get hundreds of thousands of blocks, of which running requests can hold but a few.
        return min(memory // block_bytes, self._num_useful_blocks(max_model_len))

    def _num_useful_blocks(self, max_model_len: int) -> int:
        """What running requests of full length hold together, and the null block."""
        return self.max_num_seqs * cdiv(max_model_len, self.block_size) + 1

    def _num_host_blocks(self, model: ModelConfig, num_blocks: int) -> int:
        if self.preemption_mode != "swap":
            return 0
        if self.swap_space is None:
            return num_blocks - 1
        return self.swap_space // self._block_bytes(model)

    def _block_bytes(self, model: ModelConfig) -> int:
        return model.kv_bytes_per_token(BYTES_PER_NUMBER[self.dtype]) * self.block_size


_LEAST = {
    "block_size": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "long_prefill_token_threshold": 0,
    "swap_space": 0,
    "max_num_partial_prefills": 0,
    "num_blocks": 2,
    "kv_cache_memory": 1,
    "max_model_len": 2,
    "seed": 0,
}
_OPTIONAL = ("num_blocks", "kv_cache_memory", "swap_space", "max_model_len")
_SWITCHES = ("enable_prefix_caching", "enable_chunked_prefill", "async_scheduling", "trace", "keep_logits")


def describe(config: EngineConfig) -> str:
    """The start-up line: blocks, the tokens they hold, and how many requests of full length fit."""
    cache, limit = config.cache, config.scheduler.max_model_len
    num_tokens = cache.num_usable_blocks * cache.block_size
    full_length = cache.num_usable_blocks / cdiv(limit, cache.block_size)
    bytes_per_token = config.model.kv_bytes_per_token(BYTES_PER_NUMBER[config.dtype])
    megabytes = cache.num_blocks * cache.block_size * bytes_per_token / 1024**2
    return (
        f"KV cache: {cache.num_usable_blocks} blocks of {cache.block_size} tokens = {num_tokens} tokens "
        f"({megabytes:.0f} MiB), room for {full_length:.2f} requests of {limit} tokens."
    )
