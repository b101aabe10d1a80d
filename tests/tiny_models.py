"""Random models of a few thousand parameters in Hugging Face's format, small enough to be made anew by every test.

They are not trained, but they are not degenerate either: the logits' standard deviation is about 3.5, so that greedy
choices are far apart, and the layers outweigh the embedding, so that a greedy answer depends on the whole context.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = "<bos>", "<eos>"
NUM_SPECIAL = 2
MIN_VOCAB_SIZE = NUM_SPECIAL + 256

# Four letters of the alphabet merge in pairs, so that token borders and character borders differ.
MERGES = [(a, b) for a in "etao" for b in "nrst"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<bos>{{ message['role'] }}\n{{ message['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)

LOGITS_STD = 3.5
# Comes from the final norm and not from the embedding: a tied model with a loud embedding repeats its last token.
FINAL_NORM_GAIN = 4.0


def make_tiny_llama(
    folder: Path | str,
    *,
    vocab_size: int = 320,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate_size: int = 128,
    max_position: int = 512,
    tie: bool = True,
    seed: int = 0,
) -> Path:
    """Write a random Llama checkpoint with its tokenizer and return its folder.

    The files are config.json, generation_config.json, model.safetensors (float32), tokenizer.json and
    tokenizer_config.json. `head_dim` defaults to hidden_size / num_heads. Raises ValueError when `vocab_size` is
    below 258: every byte and both special tokens need an id.
    """
    return make_tiny_model(
        folder,
        seed=seed,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim or hidden_size // num_heads,
        max_position_embeddings=max_position,
        tie_word_embeddings=tie,
    )


def make_tiny_model(
    folder: Path | str,
    architecture: str = "LlamaForCausalLM",
    *,
    seed: int = 0,
    query_gain: float = 1.0,
    **changes: Any,
) -> Path:
    """The same for any architecture; `changes` are fields of config.json, `...` leaves one out.

    `query_gain` multiplies all queries of the Llama family: below 1, attention looks at more tokens at once.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": [architecture], "model_type": MODEL_TYPES[architecture]}
    config |= GPT2_CONFIG if architecture == "GPT2LMHeadModel" else LLAMA_CONFIG
    config = {name: value for name, value in (config | changes).items() if value is not ...}
    save_tokenizer(folder, config["vocab_size"])
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    weights = random_weights(config, seed)
    last = (
        "q_norm" if architecture == "Qwen3ForCausalLM" else "q_proj"
    )  # what has the last say in a query's length
    for name in weights:
        if f".{last}." in name:
            weights[name] *= np.float32(query_gain)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


MODEL_TYPES = {
    "GPT2LMHeadModel": "gpt2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
LLAMA_CONFIG: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GPT2_CONFIG: dict[str, Any] = {
    "vocab_size": 320,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def random_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """All tensors of a model; `config` is the content of config.json.

    Biases and norms of q and k come from a generator of their own: the other weights stay those of a plain Llama.
    """
    architecture = config["architectures"][0]
    if architecture == "GPT2LMHeadModel":
        return random_gpt2_weights(config, seed)
    weights = random_llama_weights(config, seed)
    rng = np.random.default_rng([seed, 1])
    biased: tuple[str, ...] = ()
    if architecture == "Qwen2ForCausalLM":
        biased = ("q_proj", "k_proj", "v_proj")
    elif config.get("attention_bias"):
        biased = ("q_proj", "k_proj", "v_proj", "o_proj")
    if config.get("mlp_bias"):
        biased += ("gate_proj", "up_proj", "down_proj")
    for name, weight in list(weights.items()):
        layer, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind in biased:
            weights[f"{layer}.{kind}.bias"] = rng.standard_normal(len(weight), dtype=np.float32)
        if kind == "q_proj" and architecture == "Qwen3ForCausalLM":
            for norm in ("q_norm", "k_norm"):
                gains = rng.uniform(0.8, 2.4, config["head_dim"])  # scores spread as without the norm
                weights[f"{layer}.{norm}.weight"] = np.asarray(gains, dtype=np.float32)
    return weights


def random_llama_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """float32 tensors under Hugging Face's names, drawn from `seed` alone; `config` is the content of config.json."""
    rng = np.random.default_rng(seed)
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    query, key_value = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        normal = rng.standard_normal((rows, columns), dtype=np.float32)
        return normal * np.float32(gain / np.sqrt(columns))

    def norm(gain: float = 1.0) -> np.ndarray:
        # Far from constant, so that a norm whose weight is forgotten changes every logit.
        return np.asarray(gain * rng.uniform(0.5, 1.5, hidden), dtype=np.float32)

    weights = {"model.embed_tokens.weight": matrix(vocab, hidden, LOGITS_STD / FINAL_NORM_GAIN)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": norm(),
            prefix + "self_attn.q_proj.weight": matrix(query, hidden, 2.5),
            prefix + "self_attn.k_proj.weight": matrix(key_value, hidden, 2.5),
            prefix + "self_attn.v_proj.weight": matrix(key_value, hidden, 2.0),
            prefix + "self_attn.o_proj.weight": matrix(hidden, query, 2.0),
            prefix + "post_attention_layernorm.weight": norm(),
            prefix + "mlp.gate_proj.weight": matrix(ffn, hidden, 2.0),
            prefix + "mlp.up_proj.weight": matrix(ffn, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, ffn),
        }
    weights["model.norm.weight"] = norm(FINAL_NORM_GAIN)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(vocab, hidden, LOGITS_STD / FINAL_NORM_GAIN)
    return weights


def random_gpt2_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """The same for GPT-2, whose matrices are [in, out]."""
    rng = np.random.default_rng(seed)
    hidden, vocab = config["n_embd"], config["vocab_size"]
    ffn = config.get("n_inner") or 4 * hidden
    weights: dict[str, np.ndarray] = {}

    def normal(*shape: int, std: float) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)

    def linear(name: str, inputs: int, outputs: int, gain: float) -> None:
        weights[f"{name}.weight"] = normal(inputs, outputs, std=gain / np.sqrt(inputs))
        weights[f"{name}.bias"] = normal(outputs, std=0.5)

    def norm(name: str, gain: float = 1.0) -> None:
        weights[f"{name}.weight"] = np.asarray(gain * rng.uniform(0.5, 1.5, hidden), dtype=np.float32)
        weights[f"{name}.bias"] = normal(hidden, std=0.2)

    std = LOGITS_STD / FINAL_NORM_GAIN / np.sqrt(hidden)
    weights["transformer.wte.weight"] = normal(vocab, hidden, std=std)
    weights["transformer.wpe.weight"] = normal(config["n_positions"], hidden, std=std)
    for layer in range(config["n_layer"]):
        prefix = f"transformer.h.{layer}"
        norm(f"{prefix}.ln_1")
        linear(f"{prefix}.attn.c_attn", hidden, 3 * hidden, 2.2)
        linear(f"{prefix}.attn.c_proj", hidden, hidden, 2.0)
        norm(f"{prefix}.ln_2")
        linear(f"{prefix}.mlp.c_fc", hidden, ffn, 2.0)
        linear(f"{prefix}.mlp.c_proj", ffn, hidden, 1.0)
    norm("transformer.ln_f", FINAL_NORM_GAIN)
    if config.get("tie_word_embeddings") is False:
        weights["lm_head.weight"] = normal(vocab, hidden, std=std)
    return weights


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Byte-level BPE: id 0 `<bos>`, 1 `<eos>`, then the 256 bytes, a few merges, and fillers that are never encoded."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be at least {MIN_VOCAB_SIZE}, got {vocab_size}.")
    tokens = [BOS, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = MERGES[: vocab_size - len(tokens)]
    tokens += [a + b for a, b in merges]
    tokens += [f"<extra_{i}>" for i in range(vocab_size - len(tokens))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
