"""Tiny models of every supported kind: what `make_tiny_model` is asked for, by a name for the test's id.

Lengths of rope scaling are small enough for prompts of a few dozen tokens to reach what was scaled.
"""

from __future__ import annotations

from typing import Any

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama3 scaling": {"rope_scaling": LLAMA3},
    "linear scaling, old name": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "yarn scaling": {"rope_scaling": YARN, "max_position_embeddings": 128},
    "yarn, new form, untied": {
        "rope_parameters": YARN | {"rope_theta": 5e4, "truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
        "rope_theta": ...,
        "tie_word_embeddings": False,
    },
    "yarn with mscale": {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    "biases everywhere": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "mistral": {"architecture": "MistralForCausalLM", "sliding_window": None, "tie_word_embeddings": False},
    "mistral, window as long as a sequence": {
        "architecture": "MistralForCausalLM",
        "sliding_window": 512,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
    },
    "mistral, window of 8": {"architecture": "MistralForCausalLM", "sliding_window": 8},
    "mistral, window of 16, untied": {
        "architecture": "MistralForCausalLM",
        "sliding_window": 16,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
    },
    "qwen2, window of 13": {
        "architecture": "Qwen2ForCausalLM",
        "head_dim": ...,
        "use_sliding_window": True,
        "sliding_window": 13,
        "max_window_layers": 0,
    },
    "qwen2": {"architecture": "Qwen2ForCausalLM", "head_dim": ..., "use_sliding_window": False},
    "qwen2, 9/3 heads, untied": {
        "architecture": "Qwen2ForCausalLM",
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": ...,
        "tie_word_embeddings": False,
    },
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 24, "num_key_value_heads": 4},
    "qwen3, biases and yarn": {
        "architecture": "Qwen3ForCausalLM",
        "head_dim": 32,
        "attention_bias": True,
        "rope_scaling": YARN,
        "tie_word_embeddings": False,
    },
    "gpt2": {"architecture": "GPT2LMHeadModel"},
    "gpt2, other sizes, untied": {
        "architecture": "GPT2LMHeadModel",
        "n_embd": 60,
        "n_head": 4,
        "n_inner": 100,
        "n_layer": 3,
        "activation_function": "gelu_pytorch_tanh",
        "tie_word_embeddings": False,
    },
}
