"""The Llama family: a stack of identical layers, each attention then MLP, each added to a residual stream.

Llama 2 and 3, Mistral, Qwen2 and Qwen3 are this one function with a few switches, all of them in `ModelConfig`: how
rotary frequencies are stretched, which projections add a bias, whether queries and keys are normalised head by head,
and whether the head is the embedding over again.

Tokens of all requests stand in one flat batch [T, C]: every layer but attention works on each row alone, and attention
alone is told, by its metadata, which rows belong together. That is why prefill chunks and decodes can share a batch.

C is the hidden size, F the intermediate size; the other letters are the usual ones.
Sources: Touvron et al., "LLaMA" (2023); Qwen Team, "Qwen3 Technical Report" (2025), for the norm of q and k; structure
as in vLLM's `model_executor/models/llama.py`.
"""

from __future__ import annotations

import numpy as np

from reference.attention import AttentionMetadata, paged_attention, write_kv_cache
from reference.contracts.config import ModelConfig
from reference.contracts.protocols import Checkpoint
from reference.layers import Linear, RMSNorm, RotaryEmbedding, swiglu

KVCache = tuple[np.ndarray, np.ndarray]  # K and V of one layer, each [N, B, Hkv, D]


def _linear(checkpoint: Checkpoint, name: str, bias: bool = False) -> Linear:
    return Linear(checkpoint.tensor(f"{name}.weight"), checkpoint.tensor(f"{name}.bias") if bias else None)


class LlamaAttention:
    """Project to queries, keys and values, turn them by position, remember K and V, attend, project back."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, prefix: str, rotary_emb: RotaryEmbedding
    ) -> None:
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.sliding_window = config.sliding_window
        self.rotary_emb = rotary_emb
        self.q_proj = _linear(checkpoint, f"{prefix}.q_proj", config.qkv_bias)  # [H*D, C]
        self.k_proj = _linear(checkpoint, f"{prefix}.k_proj", config.qkv_bias)  # [Hkv*D, C]
        self.v_proj = _linear(checkpoint, f"{prefix}.v_proj", config.qkv_bias)  # [Hkv*D, C]
        self.o_proj = _linear(checkpoint, f"{prefix}.o_proj", config.o_proj_bias)  # [C, H*D]
        self.q_norm = self.k_norm = None
        if config.qk_norm:  # one weight [D] for all heads
            self.q_norm = RMSNorm(checkpoint.tensor(f"{prefix}.q_norm.weight"), config.rms_norm_eps)
            self.k_norm = RMSNorm(checkpoint.tensor(f"{prefix}.k_norm.weight"), config.rms_norm_eps)

    def forward(
        self, positions: np.ndarray, hidden: np.ndarray, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> np.ndarray:
        """[T, C] -> [T, C].

        The K and V of the whole batch are written before anyone attends: a token must see its own key, and a request
        may share a block that another request fills in this very step.
        """
        num_tokens = len(hidden)
        query = self.q_proj(hidden).reshape(num_tokens, self.num_heads, self.head_dim)  # [T, H, D]
        key = self.k_proj(hidden).reshape(num_tokens, self.num_kv_heads, self.head_dim)  # [T, Hkv, D]
        value = self.v_proj(hidden).reshape(num_tokens, self.num_kv_heads, self.head_dim)  # [T, Hkv, D]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = self.rotary_emb(positions, query, key)

        k_cache, v_cache = kv_cache
        write_kv_cache(key, value, k_cache, v_cache, metadata)
        # output is [T, H, D]
        output = paged_attention(query, k_cache, v_cache, metadata, self.scale, self.sliding_window)
        return self.o_proj(output.reshape(num_tokens, -1))  # [T, C]


class LlamaMLP:
    """SwiGLU: down(silu(gate(x)) * up(x)). Source: Shazeer, "GLU Variants Improve Transformer" (2020)."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, prefix: str) -> None:
        self.gate_proj = _linear(checkpoint, f"{prefix}.gate_proj", config.mlp_bias)  # [F, C]
        self.up_proj = _linear(checkpoint, f"{prefix}.up_proj", config.mlp_bias)  # [F, C]
        self.down_proj = _linear(checkpoint, f"{prefix}.down_proj", config.mlp_bias)  # [C, F]

    def forward(self, hidden: np.ndarray) -> np.ndarray:
        """[T, C] -> [T, C]."""
        activated = swiglu(hidden, (self.gate_proj, self.up_proj))  # [T, F]
        return self.down_proj(activated)  # [T, C]


class LlamaDecoderLayer:
    """One layer: norm, attention, norm, MLP, around a residual stream that is only ever added to.

    The addition of a block's output is left to the next norm, which needs the sum anyway (vLLM's convention): a layer
    takes and returns the pair (output not yet added, residual stream).
    """

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, prefix: str, rotary_emb: RotaryEmbedding
    ) -> None:
        self.self_attn = LlamaAttention(config, checkpoint, f"{prefix}.self_attn", rotary_emb)
        self.mlp = LlamaMLP(config, checkpoint, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(
            checkpoint.tensor(f"{prefix}.input_layernorm.weight"), config.rms_norm_eps
        )
        self.post_attention_layernorm = RMSNorm(
            checkpoint.tensor(f"{prefix}.post_attention_layernorm.weight"), config.rms_norm_eps
        )

    def forward(
        self,
        positions: np.ndarray,
        hidden: np.ndarray,
        residual: np.ndarray,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> tuple[np.ndarray, np.ndarray]:
        """(hidden [T, C], residual [T, C]) -> the same pair after this layer."""
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn.forward(positions, hidden, kv_cache, metadata)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp.forward(hidden), residual


class LlamaForCausalLM:
    """Embedding, layers, final norm, and the head that scores every token of the vocabulary.

    Raises:
        ValueError: the checkpoint lacks a tensor, or holds one that no part of this model asked for.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        self.embed_tokens = checkpoint.tensor("model.embed_tokens.weight")  # [V, C]
        rotary_emb = RotaryEmbedding(
            config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling
        )
        self.layers = [
            LlamaDecoderLayer(config, checkpoint, f"model.layers.{i}", rotary_emb)
            for i in range(config.num_hidden_layers)
        ]
        self.norm = RMSNorm(checkpoint.tensor("model.norm.weight"), config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.lm_head = Linear(self.embed_tokens if tied else checkpoint.tensor("lm_head.weight"))  # [V, C]
        checkpoint.check_all_used()

    def embed_input_ids(self, input_ids: np.ndarray) -> np.ndarray:
        """integer [T] -> [T, C], a new array: what stands at the bottom of the layers."""
        embeds: np.ndarray = self.embed_tokens[input_ids]
        return embeds

    def forward(
        self,
        input_ids: np.ndarray,
        positions: np.ndarray,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
        inputs_embeds: np.ndarray | None = None,
    ) -> np.ndarray:
        """Run all layers over a flat batch.

        Args:
            input_ids: [T] token ids of all requests, one after the other.
            positions: [T] position of each token in its own request.
            kv_caches: one (K, V) pair a layer, each [N, B, Hkv, D]; the batch's K and V are written into them.
            metadata: who is who in the batch.
            inputs_embeds: [T, C], in place of the embedding of `input_ids`.

        Returns:
            [T, C], the final norm applied.
        """
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds  # [T, C]
        residual = np.zeros_like(hidden)  # [T, C]
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden, residual = layer.forward(positions, hidden, residual, kv_cache, metadata)
        hidden, _ = self.norm(hidden, residual)
        return hidden

    def compute_logits(self, hidden: np.ndarray) -> np.ndarray:
        """[R, C] -> [R, V]. Only rows that sample are worth this: it is the largest matrix of the model."""
        return self.lm_head(hidden)
