"""GPT-2. Twin: `reference/models/gpt2.py`.

What differs:

- Matrices are turned to [out, in] and packed for the kernels once, when they are loaded.
- Queries, keys and values stay views of their fused product; norms and gelu work in place.

C is the hidden size, F the intermediate size, P the number of positions; the other letters are the usual ones.
"""

from __future__ import annotations

import torch

from fast import kernels
from fast.attention import AttentionMetadata, paged_attention, write_kv_cache
from fast.layers import LayerNorm, Linear, gelu
from fast.models.weights import as_tensor, embedding, packed_matrix, parameter
from reference.contracts.config import ModelConfig
from reference.contracts.protocols import Checkpoint

KVCache = tuple[torch.Tensor, torch.Tensor]  # K and V of one layer, each [N, B, H, D]


def _linear(checkpoint: Checkpoint, name: str) -> Linear:
    weight = as_tensor(checkpoint.tensor(f"{name}.weight"))
    return Linear(weight.t(), parameter(checkpoint.tensor(f"{name}.bias")))


def _norm(checkpoint: Checkpoint, name: str, config: ModelConfig) -> LayerNorm:
    weight, bias = (parameter(checkpoint.tensor(f"{name}.{kind}")) for kind in ("weight", "bias"))
    return LayerNorm(weight, bias, config.rms_norm_eps)


class GPT2Attention:
    """Project to queries, keys and values, remember K and V, attend, project back."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, prefix: str) -> None:
        self.num_heads = config.num_attention_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.c_attn = _linear(checkpoint, f"{prefix}.c_attn")  # [3C, C]
        self.c_proj = _linear(checkpoint, f"{prefix}.c_proj")  # [C, C]

    def forward(self, hidden: torch.Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> torch.Tensor:
        """[T, C] -> [T, C]. The K and V of the whole batch are written before anyone attends."""
        num_tokens = len(hidden)
        qkv = self.c_attn(hidden).view(num_tokens, 3, self.num_heads, self.head_dim)  # [T, 3, H, D]
        query, key, value = qkv.unbind(1)  # each [T, H, D]

        k_cache, v_cache = kv_cache
        write_kv_cache(key, value, k_cache, v_cache, metadata)
        output = paged_attention(query, k_cache, v_cache, metadata, self.scale)  # [T, H, D]
        return self.c_proj(output.view(num_tokens, -1))  # [T, C]


class GPT2MLP:
    """Up, gelu, down."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.c_fc = _linear(checkpoint, f"{prefix}.c_fc")  # [F, C]
        self.c_proj = _linear(checkpoint, f"{prefix}.c_proj")  # [C, F]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        return self.c_proj(gelu(self.c_fc(hidden)))


class GPT2Block:
    """One layer: norm, attention, norm, MLP, around a residual stream that is only ever added to.

    As in `LlamaDecoderLayer`, the addition of a block's output is left to the next norm.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, prefix: str) -> None:
        self.ln_1 = _norm(checkpoint, f"{prefix}.ln_1", config)
        self.attn = GPT2Attention(config, checkpoint, f"{prefix}.attn")
        self.ln_2 = _norm(checkpoint, f"{prefix}.ln_2", config)
        self.mlp = GPT2MLP(checkpoint, f"{prefix}.mlp")

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden [T, C], residual [T, C]) -> the same pair after this layer; both are overwritten."""
        hidden, residual = self.ln_1(hidden, residual)
        hidden = self.attn.forward(hidden, kv_cache, metadata)
        hidden, residual = self.ln_2(hidden, residual)
        return self.mlp.forward(hidden), residual


class GPT2LMHeadModel:
    """Embeddings of token and position, layers, final norm, and the head that scores the vocabulary.

    Raises:
        ValueError: the checkpoint lacks a tensor, or holds one that no part of this model asked for.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        self.wte = packed_matrix(checkpoint, "transformer.wte.weight")  # [V, C]
        self.wpe = parameter(checkpoint.tensor("transformer.wpe.weight"))  # [P, C]
        self.layers = [
            GPT2Block(config, checkpoint, f"transformer.h.{i}") for i in range(config.num_hidden_layers)
        ]
        self.ln_f = _norm(checkpoint, "transformer.ln_f", config)
        tied = config.tie_word_embeddings
        self.lm_head = Linear(self.wte if tied else packed_matrix(checkpoint, "lm_head.weight"))  # [V, C]
        checkpoint.check_all_used()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """integer [T] -> [T, C], a new tensor: to which the positions are still to be added."""
        return embedding(input_ids, self.wte)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run all layers over a flat batch; arguments and result as in `LlamaForCausalLM.forward`."""
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds  # [T, C]
        residual = kernels.empty(*hidden.shape)  # [T, C], to which the first norm adds the tokens
        kernels.position_embedding(residual, positions, self.wpe)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden, residual = layer.forward(hidden, residual, kv_cache, metadata)
        hidden, _ = self.ln_f(hidden, residual)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, C] -> [R, V]. Only rows that sample are worth this: it is the largest matrix of the model."""
        return self.lm_head(hidden)
