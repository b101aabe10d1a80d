"""The tokenizer inside a GGUF file, written out in Hugging Face's format.

The metadata holds a vocabulary, the merges and the name of the pre-tokenizer. The name only: the rules by which text is
cut before any merge are llama.cpp's knowledge, and are repeated here.
Source: `llama-vocab.cpp` of llama.cpp for the names; the models' own tokenizer.json for the rules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from reference.frontend.model_store import ModelError

# GGUF's token types; all others (normal, byte, unused) are plain vocabulary.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_CONTRACTIONS_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> Any:
    """Digits are cut apart before anything else; without it, text with spaces before a digit differs."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _with_digits(most: str) -> Any:
    """The rule of Llama 3 and Qwen 2: they differ in how many digits may stay together."""
    pattern = Regex(f"{_CONTRACTIONS_WORDS}|{most}|{_SYMBOLS_SPACES}")
    split = pre_tokenizers.Split(pattern, behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _with_digits(r"\p{N}{1,3}"),
    "qwen2": lambda: _with_digits(r"\p{N}"),
}


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`.

    Raises:
        ModelError: the tokenizer is of a kind that is not supported, or damaged.
        OSError: `folder` cannot be written.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise ModelError(
            f"the GGUF tokenizer {kind!r} with the pre-tokenizer {pre!r} is not supported; supported: 'gpt2' with "
            f"{', '.join(map(repr, PRE_TOKENIZERS))}; use the model's Hugging Face folder instead."
        )
    try:
        content = _tokenizer(metadata, pre).to_str()
        tokens = metadata["tokenizer.ggml.tokens"]
        special = {
            f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
            if f"tokenizer.ggml.{key}_token_id" in metadata
        }
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(f"its tokenizer is damaged ({type(error).__name__}: {error}).") from error
    settings = special | {"chat_template": metadata.get("tokenizer.chat_template")}
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")


def _tokenizer(metadata: Mapping[str, Any], pre: str) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    # Llama 3 has tokens that no chain of merges leads to; a text that is one token must become it.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    by_type = {
        kind: [token for token, t in zip(tokens, types, strict=True) if t == kind] for kind in set(types)
    }
    tokenizer.add_special_tokens(by_type.get(_UNKNOWN, []) + by_type.get(_CONTROL, []))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in by_type.get(_USER_DEFINED, [])])
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        bos_id = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos_id]} $A", special_tokens=[(tokens[bos_id], bos_id)]
        )
    return tokenizer
