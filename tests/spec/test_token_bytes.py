"""The bytes behind a token, and the limits a chat template runs under."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from reference.frontend.time_limit import TimeLimitError, time_limit
from reference.frontend.token_bytes import TokenBytes, byte_level_alphabet
from tests.scripted import byte_tokenizer
from tests.tiny_models import make_tiny_llama


def test_the_bytes_of_all_tokens_make_the_text() -> None:
    tokenizer = byte_tokenizer()
    for text in ("Hello there", "zwölf Öfen", "日本語", "😊\x00\x7f\u00ad"):
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_a_part_of_a_character_is_its_byte_and_no_replacement() -> None:
    tokenizer = byte_tokenizer()
    assert [tokenizer.token_bytes(token) for token in tokenizer.encode("😊")] == [
        b"\xf0", b"\x9f", b"\x98", b"\x8a"
    ]  # fmt: skip


def test_special_tokens_stand_for_their_name_and_unknown_ids_for_nothing() -> None:
    assert byte_tokenizer().token_bytes(1) == b"<eos>"
    assert byte_tokenizer().token_bytes(10**6) == b""


def test_the_alphabet_names_every_byte_once() -> None:
    assert sorted(byte_level_alphabet().values()) == list(range(256))


def test_byte_fallback_and_word_marks_of_sentencepiece() -> None:
    vocab = {"▁Hi": 0, "<0xF0>": 1, "<0x0A>": 2, "a▁b": 3}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    assert [TokenBytes(backend).of(i) for i in range(4)] == [b" Hi", b"\xf0", b"\n", b"a b"]


def never_ends() -> None:
    while True:
        pass


def test_code_that_does_not_end_is_ended() -> None:
    started = time.monotonic()
    with pytest.raises(TimeLimitError, match=r"0\.1 seconds"), time_limit(0.1):
        never_ends()
    assert time.monotonic() - started < 5
    assert sys.gettrace() is None


def test_a_template_that_does_not_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from reference.frontend import tokenizer as module

    monkeypatch.setattr(module, "_MAX_CHAT_SECONDS", 0.2)
    tokenizer = module.load_tokenizer(make_tiny_llama(tmp_path))
    loops = "".join(f"{{% for {name} in xs %}}" for name in "abc")
    endless = f"{{% set xs = range(99999) | list %}}{loops}{'{% endfor %}' * 3}"
    with pytest.raises(ValueError, match="longer than"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], chat_template=endless)
