"""Llama. Twin: `reference/models/llama.py`.

What differs:

- Queries, keys and values come from one matrix, gate and up from another: three and two small matrix products
  become one each, with one start-up cost and more rows to share among the cores.
- The parts of a fused product stay views of it: rotary embedding, cache write and attention work on them in
  place.
- Single weights, the tied embedding and head among them, are used where the checkpoint maps them; only the
  fused ones are copied.

C is the hidden size, F the intermediate size; the other letters are the usual ones.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
import torch.nn.functional

from fast.attention import AttentionMetadata, paged_attention, write_kv_cache
from fast.layers import Linear, RMSNorm, RotaryEmbedding, silu_and_mul
from reference.contracts.config import ModelConfig
from reference.contracts.protocols import Checkpoint

KVCache = tuple[torch.Tensor, torch.Tensor]  # K and V of one layer, each [N, B, Hkv, D]


def _as_tensor(array: np.ndarray) -> torch.Tensor:
    """The same memory as a tensor. Torch warns of read-only memory (a mapped file); weights are only read."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _weight(checkpoint: Checkpoint, *names: str) -> torch.Tensor:
    """A weight [out, in]; several of one input are stacked along `out` (a copy, made by all cores)."""
    tensors = [_as_tensor(checkpoint.tensor(f"{name}.weight")) for name in names]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


class LlamaAttention:
    """Project to queries, keys and values, turn them by position, remember K and V, attend, project back."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, prefix: str, rotary_emb: RotaryEmbedding
    ) -> None:
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.split_sizes = (num_heads, num_kv_heads, num_kv_heads)  # heads of q, k, v in the fused product
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.rotary_emb = rotary_emb
        qkv = _weight(checkpoint, f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
        self.qkv_proj = Linear(qkv)  # [(H + 2*Hkv)*D, C]
        self.o_proj = Linear(_weight(checkpoint, f"{prefix}.o_proj"))  # [C, H*D]

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """[T, C] -> [T, C].

        The K and V of the whole batch are written before anyone attends: a token must see its own key, and a
        request may share a block that another request fills in this very step.
        """
        num_tokens = len(hidden)
        qkv = self.qkv_proj(hidden).view(num_tokens, -1, self.head_dim)  # [T, H + 2*Hkv, D]
        query, key, value = qkv.split_with_sizes(self.split_sizes, dim=1)  # [T, H, D], [T, Hkv, D] twice
        query, key = self.rotary_emb(positions, query, key)

        k_cache, v_cache = kv_cache
        write_kv_cache(key, value, k_cache, v_cache, metadata)
        output = paged_attention(query, k_cache, v_cache, metadata, self.scale)  # [T, H, D]
        return self.o_proj(output.view(num_tokens, -1))  # [T, C]


class LlamaMLP:
    """SwiGLU: down(silu(gate(x)) * up(x)). Source: Shazeer, "GLU Variants Improve Transformer" (2020)."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, prefix: str) -> None:
        self.gate_up_proj = Linear(_weight(checkpoint, f"{prefix}.gate_proj", f"{prefix}.up_proj"))  # [2F, C]
        self.down_proj = Linear(_weight(checkpoint, f"{prefix}.down_proj"))  # [C, F]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden)))


class LlamaDecoderLayer:
    """One layer: norm, attention, norm, MLP, around a residual stream that is only ever added to.

    The addition of a block's output is left to the next norm, which needs the sum anyway (vLLM's convention):
    a layer takes and returns the pair (output not yet added, residual stream).
    """

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, prefix: str, rotary_emb: RotaryEmbedding
    ) -> None:
        self.self_attn = LlamaAttention(config, checkpoint, f"{prefix}.self_attn", rotary_emb)
        self.mlp = LlamaMLP(config, checkpoint, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(_weight(checkpoint, f"{prefix}.input_layernorm"), config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(
            _weight(checkpoint, f"{prefix}.post_attention_layernorm"), config.rms_norm_eps
        )

    def forward(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden [T, C], residual [T, C]) -> the same pair after this layer; both are overwritten."""
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
        self.embed_tokens = _weight(checkpoint, "model.embed_tokens")  # [V, C]
        rotary_emb = RotaryEmbedding(config.head_dim, config.max_position_embeddings, config.rope_theta)
        self.layers = [
            LlamaDecoderLayer(config, checkpoint, f"model.layers.{i}", rotary_emb)
            for i in range(config.num_hidden_layers)
        ]
        self.norm = RMSNorm(_weight(checkpoint, "model.norm"), config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.lm_head = Linear(self.embed_tokens if tied else _weight(checkpoint, "lm_head"))  # [V, C]
        checkpoint.check_all_used()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Run all layers over a flat batch.

        Args:
            input_ids: integer [T], token ids of all requests, one after the other.
            positions: int64 [T], position of each token in its own request.
            kv_caches: one (K, V) pair a layer, each [N, B, Hkv, D]; K and V of the batch are written there.
            metadata: who is who in the batch.

        Returns:
            [T, C], the final norm applied.
        """
        hidden = torch.nn.functional.embedding(input_ids, self.embed_tokens)  # [T, C]
        residual = torch.zeros_like(hidden)  # [T, C]
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden, residual = layer.forward(positions, hidden, residual, kv_cache, metadata)
        hidden, _ = self.norm(hidden, residual)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, C] -> [R, V]. Only rows that sample are worth this: it is the largest matrix of the model."""
        return self.lm_head(hidden)
