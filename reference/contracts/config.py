"""Frozen configuration records. They are resolved once, at start-up, and never change afterwards.

The flat options a user passes (`LLM(..., block_size=16)`) live in `reference.frontend.engine_args`; what arrives here
has every `None` replaced by a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SchedulingPolicy = Literal["fcfs", "priority"]
PreemptionMode = Literal["recompute", "swap"]
SpeculativeMethod = Literal["ngram", "draft_model"]
RopeType = Literal["linear", "llama3", "yarn"]


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b for non-negative integers: the blocks that hold `a` tokens are `cdiv(a, block_size)`."""
    return -(-a // b)


@dataclass(frozen=True)
class RopeScaling:
    """How a model's rotary frequencies are stretched over more positions than it was first trained with.

    `contracts.rope` computes the frequencies. Names are those of Hugging Face's `rope_parameters`; each type reads only
    the fields that its comment names.
    """

    rope_type: RopeType
    factor: float
    original_max_position_embeddings: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # yarn; multiplies cosines and sines, and so every score by its square

    def __post_init__(self) -> None:
        if self.rope_type != "linear" and self.original_max_position_embeddings < 1:
            raise ValueError(f"rope scaling {self.rope_type!r} needs original_max_position_embeddings.")
        if self.rope_type == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor ({self.low_freq_factor}) must be below high_freq_factor "
                f"({self.high_freq_factor})."
            )


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer, in Hugging Face's names (`config.json`)."""

    architecture: str  # e.g. "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int  # longest sequence, rope scaling included
    rms_norm_eps: float  # of every norm; GPT-2's layer_norm_epsilon too
    rope_theta: float  # 0: positions are learned, nothing is turned
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False  # on the projections to q, k and v
    o_proj_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # an RMSNorm on every head of q and of k
    sliding_window: int | None = (
        None  # a token sees itself and the sliding_window - 1 tokens before it; None: all
    )

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads}): each KV head serves a whole group of query heads."
            )
        if self.rope_theta and self.head_dim % 2:
            raise ValueError(
                f"head_dim ({self.head_dim}) must be even: rotary embedding turns pairs of numbers."
            )
        if self.rope_scaling is not None and self.rope_scaling.rope_type == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"rope_theta must be above 1 for yarn, got {self.rope_theta}.")

    def kv_bytes_per_token(self, bytes_per_element: int = 4) -> int:
        """Bytes of K and V that one token occupies over all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * bytes_per_element


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache. `num_blocks` counts the null block 0, as vLLM's `num_gpu_blocks` does."""

    block_size: int
    num_blocks: int
    enable_prefix_caching: bool = True
    num_host_blocks: int = 0  # room for the blocks of requests that were swapped out
    sliding_window: int | None = None  # blocks that left the window of the next token are given back

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}.")
        if self.num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (block 0 is never handed out), got {self.num_blocks}."
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1, got {self.sliding_window}.")

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one scheduling step. Names and meanings are vLLM's."""

    max_model_len: int
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # 0 = off
    scheduling_policy: SchedulingPolicy = "fcfs"
    preemption_mode: PreemptionMode = "recompute"
    max_num_partial_prefills: int = 0  # 0 = no limit
    async_scheduling: bool = False  # plan a step while the one before it is computed

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold must be 0 (off) or more, got {self.long_prefill_token_threshold}."
            )
        if self.max_num_partial_prefills < 0:
            raise ValueError(
                f"max_num_partial_prefills must be 0 (off) or more, got {self.max_num_partial_prefills}."
            )
        if self.preemption_mode not in ("recompute", "swap"):
            raise ValueError(f"preemption_mode must be 'recompute' or 'swap', got {self.preemption_mode!r}.")
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ValueError(
                f"scheduling_policy must be 'fcfs' or 'priority', got {self.scheduling_policy!r}."
            )


@dataclass(frozen=True)
class SpeculativeConfig:
    """Who guesses the tokens that the model then checks several of in one step. Names are vLLM's."""

    method: SpeculativeMethod
    num_speculative_tokens: int  # guesses a request may get in one step
    prompt_lookup_min: int = (
        2  # ngram: the shortest and the longest tail of the sequence that is searched for in it
    )
    prompt_lookup_max: int = 5
    draft_model: ModelConfig | None = None  # draft_model: its shape, and the size of its own KV cache
    num_draft_blocks: int = 0

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens must be at least 1, got {self.num_speculative_tokens}.")
        if self.method == "draft_model" and (self.draft_model is None or self.num_draft_blocks < 2):
            raise ValueError(
                "method 'draft_model' needs the draft model's config and at least 2 blocks for its KV cache."
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must be at least 1 and at most prompt_lookup_max "
                f"({self.prompt_lookup_max})."
            )


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is built from, besides the weights."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    seed: int = 0
    speculative: SpeculativeConfig | None = None
    device: str = "cpu"
    dtype: str = "float32"  # of weights, activations and KV cache; or "bfloat16"
    trace: bool = False  # record a StepTrace for every step
    keep_logits: bool = False  # the runner hands out the logits rows it sampled from (twinfer diff)

    def __post_init__(self) -> None:
        if self.speculative is not None and self.scheduler.async_scheduling:
            raise ValueError(
                "async_scheduling plans a step before the tokens of the last one are known, and speculation guesses "
                "from just these; switch one of them off."
            )
        draft = None if self.speculative is None else self.speculative.draft_model
        if draft is not None and draft.vocab_size != self.model.vocab_size:
            raise ValueError(
                f"The draft model has a vocabulary of {draft.vocab_size} tokens and the model one of "
                f"{self.model.vocab_size}; choose a draft model with the same tokenizer."
            )

    @property
    def max_total_tokens(self) -> int:
        """Longest sequence that can exist: the model's limit, or what the whole pool holds plus one token.

        The last token of a sequence is sampled but never fed back, so it needs no slot.
        """
        return min(
            self.scheduler.max_model_len,
            self.cache.num_usable_blocks * self.cache.block_size + 1,
        )
