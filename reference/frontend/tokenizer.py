"""Text to token ids and back, and chat messages to text, on the libraries `tokenizers` and `jinja2`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from reference.frontend.checkpoint import model_folder, read_json, read_model_config, read_text
from reference.frontend.model_store import ModelError
from reference.frontend.time_limit import TimeLimitError, time_limit
from reference.frontend.token_bytes import TokenBytes

LONG_TEXT = 4096  # characters; shorter ones are done sooner than anybody notices
_MAX_CHAT_CHARACTERS = 1024**2  # a template that writes more than this is broken or hostile
_MAX_CHAT_SECONDS = 2.0
_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
)  # templates may use them by these names
# What rendering may raise besides jinja2's own errors: a template is a program.
_TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    TimeLimitError,
)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model folder or GGUF file.

    Raises:
        ModelError: `tokenizer.json` is missing or damaged.
    """
    return Tokenizer(model_folder(path))


class Tokenizer:
    """A model's tokenizer, with its special tokens and chat template.

    Attributes:
        vocab_size: number of tokens that text can become; a model's padded vocabulary may be larger.
        special_ids: ids that are markup and not text.
        bos_token_id, eos_token_ids: from the model's config; any of the latter ends a text.
    """

    def __init__(self, folder: Path) -> None:
        config = read_model_config(folder)
        settings = folder / "tokenizer_config.json"
        self._settings = read_json(settings) if settings.is_file() else {}
        self._special_texts = {name: _token_text(self._settings.get(name)) for name in _SPECIAL_TOKENS}
        self._backend = _read_backend(folder, self._settings, self._special_texts)
        self._template_source = _chat_template(folder, self._settings)
        self.bos_token_id = config.bos_token_id
        self.eos_token_ids = config.eos_token_ids
        self.vocab_size: int = self._backend.get_vocab_size()
        self._num_ids = max(self.vocab_size, config.vocab_size)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def to_json(self) -> str:
        """The whole tokenizer in the format of `tokenizer.json`."""
        return str(self._backend.to_str())

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; a beginning-of-sequence token only if the model's tokenizer adds one.

        Raises ValueError when `text` is no text that UTF-8 can express.
        """
        return self._encode(text, add_special_tokens=True)

    def encode_word(self, text: str) -> list[int]:
        """Token ids of a piece of text in the middle of another: nothing is added at its beginning."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            if len(text) > LONG_TEXT:  # only the batch lets other threads run meanwhile
                (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
            else:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            return list(encoding.ids)
        except TypeError as error:
            what = "a lone surrogate" if isinstance(text, str) else type(text).__name__
            raise ValueError(f"A prompt must be text in valid Unicode, got {what}.") from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that are no valid UTF-8 become U+FFFD; ids that only pad the vocabulary, nothing.

        Raises ValueError when an id is outside the model's vocabulary.
        """
        for token_id in token_ids:
            if not 0 <= token_id < self._num_ids:
                raise ValueError(f"Token id {token_id} is outside the vocabulary of {self._num_ids} tokens.")
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for, which may be a part of a character; nothing for ids without a text."""
        return self._token_bytes.of(token_id)

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self._backend)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, as the vocabulary writes it."""
        return max(map(len, self._backend.get_vocab()))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
    ) -> str:
        """The conversation as the text the model was trained on.

        Args:
            messages: who said what.
            add_generation_prompt: end with the beginning of an answer.
            chat_template: Jinja source instead of the model's own.

        Raises:
            ValueError: the model has no chat template, a message is malformed, or the template refuses.
        """
        _check_messages(messages)
        parts: list[str] = []
        length = 0
        template = self._template if chat_template is None else _compile_template(chat_template)
        try:
            with time_limit(_MAX_CHAT_SECONDS):
                for part in template.generate(
                    messages=[dict(message) for message in messages],
                    add_generation_prompt=add_generation_prompt,
                    **self._special_texts,
                ):
                    parts.append(part)
                    length += len(part)
                    if length > _MAX_CHAT_CHARACTERS:
                        raise ValueError(f"it wrote more than {_MAX_CHAT_CHARACTERS} characters.")
        except _TEMPLATE_ERRORS as error:
            raise ValueError(f"The chat template refused the messages: {error}") from error
        return "".join(parts)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the answer. The template itself writes all special tokens."""
        return self._encode(self.apply_chat_template(messages), add_special_tokens=False)

    @cached_property
    def _template(self) -> Template:
        """Compiled as Hugging Face does it, with the same helpers."""
        if self._template_source is None:
            raise ValueError("This model has no chat template; use plain prompts instead of messages.")
        return _compile_template(self._template_source)


def _compile_template(source: str) -> Template:
    # Templates come with models, or from clients, and are not trusted: no attribute walks, no changes to what is given.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    try:
        return environment.from_string(source)
    except (TemplateError, RecursionError) as error:
        raise ValueError(f"The chat template cannot be parsed: {error}") from error


def _read_backend(
    folder: Path, settings: Mapping[str, Any], special: Mapping[str, str]
) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{folder} has no tokenizer.json; save the model's tokenizer in that format first.")
    content = read_text(file)
    try:
        backend = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file} is damaged ({error}).") from error
    backend.no_truncation()  # left behind by training, and no business of an engine
    backend.no_padding()
    if "add_bos_token" in settings or "add_eos_token" in settings:
        _set_post_processor(backend, settings, special)
    return backend


def _set_post_processor(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """As in transformers, a rule written in `tokenizer_config.json` overrides the one in `tokenizer.json`."""
    bos, eos = (
        [special[f"{kind}_token"]] if settings.get(f"add_{kind}_token") and special[f"{kind}_token"] else []
        for kind in ("bos", "eos")
    )
    ids = {text: backend.token_to_id(text) for text in bos + eos}
    if None in ids.values():
        raise ModelError(f"tokenizer.json lacks a token that tokenizer_config.json adds: {', '.join(ids)}.")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=[*bos, "$A", *eos], special_tokens=list(ids.items())
    )


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """From `chat_template.jinja`, else from `tokenizer_config.json`: one template, or a list with a default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if not isinstance(template, str | None):
        raise ModelError(f"{folder / 'tokenizer_config.json'} is damaged: its chat_template is not text.")
    return template


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError("messages must be a non-empty list of {'role': ..., 'content': ...}.")
    for message in messages:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(k), str) for k in ("role", "content")
        ):
            raise ValueError(f"A message needs 'role' and 'content' as text, got {message!r:.100}.")


def _token_text(token: Any) -> str:
    """A special token in `tokenizer_config.json` is a text, or a table with its text under `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Instead of jinja2's own, which escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
