"""Text to token ids and back, and chat messages to text. The work is done by the `tokenizers` and `jinja2` libraries."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from reference.frontend.checkpoint import model_folder, read_json, read_model_config
from reference.frontend.model_store import ModelError

_MAX_CHAT_CHARACTERS = 1024**2  # a template that writes more than this is broken or hostile


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model folder or GGUF file.

    Raises:
        ModelError: `tokenizer.json` is missing or damaged.
    """
    return Tokenizer(model_folder(path))


class Tokenizer:
    """A model's tokenizer, with its special tokens and chat template."""

    def __init__(self, folder: Path) -> None:
        self._backend = _read_backend(folder)
        self._settings = read_json(folder / "tokenizer_config.json") if _exists(folder, "tokenizer_config.json") else {}
        self._template_source = _chat_template(folder, self._settings)
        config = read_model_config(folder)
        self.bos_token_id = config.bos_token_id
        self.eos_token_ids = config.eos_token_ids
        self.vocab_size: int = self._backend.get_vocab_size()
        added = self._backend.get_added_tokens_decoder()
        self.special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(self.special_tokens.values())

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; a beginning-of-sequence token only if the model's tokenizer adds one."""
        return list(self._backend.encode(text).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that are no valid UTF-8 become U+FFFD; ids the tokenizer does not know, nothing."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as the text the model was trained on.

        Raises:
            ValueError: the model has no chat template, a message is malformed, or the template refuses.
        """
        _check_messages(messages)
        parts: list[str] = []
        length = 0
        try:
            for part in self._template.generate(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **{name: _token_text(self._settings.get(name)) for name in ("bos_token", "eos_token")},
            ):
                parts.append(part)
                length += len(part)
                if length > _MAX_CHAT_CHARACTERS:
                    raise ValueError(f"The chat template wrote more than {_MAX_CHAT_CHARACTERS} characters.")
        except TemplateError as error:
            raise ValueError(f"The chat template refused the messages: {error}") from error
        return "".join(parts)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the answer. The template itself writes all special tokens."""
        text = self.apply_chat_template(messages)
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _template(self) -> Any:
        if self._template_source is None:
            raise ValueError("This model has no chat template; use plain prompts instead of messages.")
        # The template comes with the model and is not trusted: no attribute walks, no changes to what it is given.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        try:
            return environment.from_string(self._template_source)
        except TemplateError as error:
            raise ValueError(f"The model's chat template cannot be parsed: {error}") from error


def _exists(folder: Path, name: str) -> bool:
    return (folder / name).is_file()


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{folder} has no tokenizer.json.")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file} cannot be read ({error}).") from error


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """From `chat_template.jinja`, else from `tokenizer_config.json` (one template, or a list with a default)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError("messages must be a non-empty list of {'role': ..., 'content': ...}.")
    for message in messages:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f"A message needs 'role' and 'content' as text, got {message!r:.100}.")


def _token_text(token: Any) -> str:
    """A special token in `tokenizer_config.json` is a text or a table with its text under `content`."""
    return str(token["content"]) if isinstance(token, dict) else token or ""


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def write_tokenizer_from_gguf(metadata: Mapping[str, Callable[[], Any]], folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` from a GGUF file's metadata.

    Args:
        metadata: name -> a function that reads the value (reading 49,152 strings is slow; nobody may need them).

    Raises:
        ModelError: the tokenizer is of a kind that is not supported.
    """

    def get(name: str, default: Any = None) -> Any:
        return metadata[name]() if name in metadata else default

    kind, pre = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"The GGUF tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported; supported: 'gpt2' with "
            f"{', '.join(map(repr, _PRE_TOKENIZERS))}. Use the model's Hugging Face folder instead."
        )
    tokens: list[str] = get("tokenizer.ggml.tokens")
    types: list[int] = get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ", 1)) for merge in get("tokenizer.ggml.merges")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL]
    backend.add_special_tokens(special)
    bos, eos = get("tokenizer.ggml.bos_token_id"), get("tokenizer.ggml.eos_token_id")
    if get("tokenizer.ggml.add_bos_token", False):
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": None if bos is None else tokens[bos],
        "eos_token": None if eos is None else tokens[eos],
        "chat_template": get("tokenizer.chat_template"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")


_CONTROL = 3  # GGUF's token type of special tokens


def _byte_level() -> Any:
    return tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_then_byte_level() -> Any:
    """SmolLM splits numbers into digits before anything else; without it, text with spaces before digits differs."""
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    return tokenizers.pre_tokenizers.Sequence([digits, _byte_level()])


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "smollm": _digits_then_byte_level,
    "gpt-2": _byte_level,
    "default": _byte_level,
}
