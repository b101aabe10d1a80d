"""GPT-2: the stack of `llama.py` with the parts of 2019.

What differs from a Llama: a learned vector for each position is added to the embedding, and nothing is turned; the norm
also subtracts the mean; the MLP has one way up instead of a gate and an up; every projection has a bias; queries, keys
and values come from one matrix; each query head has KV of its own. Blocks, cache and attention are the same.

C is the hidden size, F the intermediate size, P the number of positions; the other letters are the usual ones.
Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019); structure as in vLLM's
`model_executor/models/gpt2.py`.
"""

from __future__ import annotations

import numpy as np

from reference.attention import AttentionMetadata, paged_attention, write_kv_cache
from reference.contracts.config import ModelConfig
from reference.contracts.protocols import Checkpoint
from reference.layers import LayerNorm, Linear, gelu

KVCache = tuple[np.ndarray, np.ndarray]  # K and V of one layer, each [N, B, H, D]


def _linear(checkpoint: Checkpoint, name: str) -> Linear:
    """GPT-2 stores its matrices [in, out], the other way round than everybody else."""
    return Linear(checkpoint.tensor(f"{name}.weight").T, checkpoint.tensor(f"{name}.bias"))


def _norm(checkpoint: Checkpoint, name: str, config: ModelConfig) -> LayerNorm:
    weight, bias = checkpoint.tensor(f"{name}.weight"), checkpoint.tensor(f"{name}.bias")
    return LayerNorm(weight, bias, config.rms_norm_eps)


class GPT2Attention:
    """Project to queries, keys and values, remember K and V, attend, project back."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, prefix: str) -> None:
        self.num_heads = config.num_attention_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.c_attn = _linear(checkpoint, f"{prefix}.c_attn")  # [3C, C]
        self.c_proj = _linear(checkpoint, f"{prefix}.c_proj")  # [C, C]

    def forward(self, hidden: np.ndarray, kv_cache: KVCache, metadata: AttentionMetadata) -> np.ndarray:
        """[T, C] -> [T, C]. The K and V of the whole batch are written before anyone attends."""
        num_tokens = len(hidden)
        qkv = self.c_attn(hidden).reshape(num_tokens, 3, self.num_heads, self.head_dim)  # [T, 3, H, D]
        query, key, value = qkv[:, 0], qkv[:, 1], qkv[:, 2]  # each [T, H, D]

        k_cache, v_cache = kv_cache
        write_kv_cache(key, value, k_cache, v_cache, metadata)
        output = paged_attention(query, k_cache, v_cache, metadata, self.scale)  # [T, H, D]
        return self.c_proj(output.reshape(num_tokens, -1))  # [T, C]


class GPT2MLP:
    """Up, gelu, down."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.c_fc = _linear(checkpoint, f"{prefix}.c_fc")  # [F, C]
        self.c_proj = _linear(checkpoint, f"{prefix}.c_proj")  # [C, F]

    def forward(self, hidden: np.ndarray) -> np.ndarray:
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
        self, hidden: np.ndarray, residual: np.ndarray, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> tuple[np.ndarray, np.ndarray]:
        """(hidden [T, C], residual [T, C]) -> the same pair after this layer."""
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
        self.wte = checkpoint.tensor("transformer.wte.weight")  # [V, C]
        self.wpe = checkpoint.tensor("transformer.wpe.weight")  # [P, C]
        self.layers = [
            GPT2Block(config, checkpoint, f"transformer.h.{i}") for i in range(config.num_hidden_layers)
        ]
        self.ln_f = _norm(checkpoint, "transformer.ln_f", config)
        tied = config.tie_word_embeddings
        self.lm_head = Linear(self.wte if tied else checkpoint.tensor("lm_head.weight"))  # [V, C]
        checkpoint.check_all_used()

    def embed_input_ids(self, input_ids: np.ndarray) -> np.ndarray:
        """integer [T] -> [T, C], a new array: to which the positions are still to be added."""
        embeds: np.ndarray = self.wte[input_ids]
        return embeds

    def forward(
        self,
        input_ids: np.ndarray,
        positions: np.ndarray,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
        inputs_embeds: np.ndarray | None = None,
    ) -> np.ndarray:
        """Run all layers over a flat batch; arguments and result as in `LlamaForCausalLM.forward`."""
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds  # [T, C]
        residual = self.wpe[positions]  # [T, C], to which the first norm adds the tokens
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden, residual = layer.forward(hidden, residual, kv_cache, metadata)
        hidden, _ = self.ln_f(hidden, residual)
        return hidden

    def compute_logits(self, hidden: np.ndarray) -> np.ndarray:
        """[R, C] -> [R, V]. Only rows that sample are worth this: it is the largest matrix of the model."""
        return self.lm_head(hidden)
