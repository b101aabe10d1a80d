"""The Llama family. Twin: `reference/models/llama.py`.

What differs:

- Queries, keys and values come from one matrix, gate and up from another, biases included: three and two small
  matrix products become one each, with one start-up cost and more rows to share among the cores.
- The parts of a fused product stay views of it: the norms of q and k, rotary embedding, cache write and
  attention work on them in place.
- Matrices keep the type of their file, repacked once for the kernels; a tied embedding and head are one of them.

C is the hidden size, F the intermediate size; the other letters are the usual ones.
"""

from __future__ import annotations

import torch

from fast.attention import AttentionMetadata, paged_attention, write_kv_cache
from fast.layers import Linear, RMSNorm, RotaryEmbedding, swiglu
from fast.models.weights import embedding, packed_matrix, parameter
from reference.contracts.config import ModelConfig
from reference.contracts.protocols import Checkpoint

KVCache = tuple[torch.Tensor, torch.Tensor]  # K and V of one layer, each [N, B, Hkv, D]


def _linear(checkpoint: Checkpoint, prefix: str, *names: str, bias: bool) -> Linear:
    """Projections of one input as one: weights [out, in] and biases [out] are stacked along `out`."""
    weight = packed_matrix(checkpoint, *(f"{prefix}.{name}.weight" for name in names))
    biases = [parameter(checkpoint.tensor(f"{prefix}.{name}.bias")) for name in names] if bias else []
    return Linear(weight, torch.cat(biases) if bias else None)


def _norm(checkpoint: Checkpoint, name: str, config: ModelConfig) -> RMSNorm:
    return RMSNorm(parameter(checkpoint.tensor(f"{name}.weight")), config.rms_norm_eps)


class LlamaAttention:
    """Project to queries, keys and values, turn them by position, remember K and V, attend, project back."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, prefix: str, rotary_emb: RotaryEmbedding
    ) -> None:
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.split_sizes = (num_heads, num_kv_heads, num_kv_heads)  # heads of q, k, v in the fused product
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.sliding_window = config.sliding_window
        self.rotary_emb = rotary_emb
        # [(H + 2*Hkv)*D, C]
        self.qkv_proj = _linear(checkpoint, prefix, "q_proj", "k_proj", "v_proj", bias=config.qkv_bias)
        self.o_proj = _linear(checkpoint, prefix, "o_proj", bias=config.o_proj_bias)  # [C, H*D]
        self.q_norm = self.k_norm = None
        if config.qk_norm:  # one weight [D] for all heads
            self.q_norm = _norm(checkpoint, f"{prefix}.q_norm", config)
            self.k_norm = _norm(checkpoint, f"{prefix}.k_norm", config)

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
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = self.rotary_emb(positions, query, key)

        k_cache, v_cache = kv_cache
        write_kv_cache(key, value, k_cache, v_cache, metadata)
        # output is [T, H, D]
        output = paged_attention(query, k_cache, v_cache, metadata, self.scale, self.sliding_window)
        return self.o_proj(output.view(num_tokens, -1))  # [T, C]


class LlamaMLP:
    """SwiGLU: down(silu(gate(x)) * up(x)). Source: Shazeer, "GLU Variants Improve Transformer" (2020)."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, prefix: str) -> None:
        # [2F, C]
        self.gate_up_proj = _linear(checkpoint, prefix, "gate_proj", "up_proj", bias=config.mlp_bias)
        self.down_proj = _linear(checkpoint, prefix, "down_proj", bias=config.mlp_bias)  # [C, F]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        activated = swiglu(hidden, self.gate_up_proj)  # [T, F]
        return self.down_proj(activated)


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
        self.input_layernorm = _norm(checkpoint, f"{prefix}.input_layernorm", config)
        self.post_attention_layernorm = _norm(checkpoint, f"{prefix}.post_attention_layernorm", config)

    def forward(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden [T, C], residual [T, C]) -> the same pair after this layer; both are overwritten.

        The first layer has no residual yet: its input is the stream.
        """
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
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
        self.embed_tokens = packed_matrix(checkpoint, "model.embed_tokens.weight")  # [V, C]
        rotary_emb = RotaryEmbedding(
            config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling
        )
        self.layers = [
            LlamaDecoderLayer(config, checkpoint, f"model.layers.{i}", rotary_emb)
            for i in range(config.num_hidden_layers)
        ]
        self.norm = _norm(checkpoint, "model.norm", config)
        tied = config.tie_word_embeddings
        self.lm_head = Linear(
            self.embed_tokens if tied else packed_matrix(checkpoint, "lm_head.weight")
        )  # [V, C]
        checkpoint.check_all_used()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """integer [T] -> [T, C], a new tensor: what stands at the bottom of the layers."""
        return embedding(input_ids, self.embed_tokens)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run all layers over a flat batch.

        Args:
            input_ids: int32 [T], token ids of all requests, one after the other.
            positions: int64 [T], position of each token in its own request.
            kv_caches: one (K, V) pair a layer, each [N, B, Hkv, D]; K and V of the batch are written there.
            metadata: who is who in the batch.
            inputs_embeds: [T, C], in place of the embedding of `input_ids`; overwritten.

        Returns:
            [T, C], the final norm applied.
        """
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds  # [T, C]
        residual: torch.Tensor | None = None  # [T, C] from the first layer on
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden, residual = layer.forward(positions, hidden, residual, kv_cache, metadata)
        assert residual is not None  # a model has layers
        hidden, _ = self.norm(hidden, residual)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, C] -> [R, V]. Only rows that sample are worth this: it is the largest matrix of the model."""
        return self.lm_head(hidden)
