"""Text is given out once and never taken back, and it is the decode of the ids, cut at a stop."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from reference.contracts.sampling_params import SamplingParams
from reference.frontend.detokenizer import IncrementalDetokenizer
from reference.frontend.tokenizer import Tokenizer
from tests.scripted import BOS, EOS, PieceTokenizer, byte_tokenizer

REPLACEMENT = "\ufffd"
EMOJI = "\U0001f60a"  # four bytes, and four tokens of the byte tokenizer


class Stream:
    """Feeds a detokenizer as the output processor does, and keeps every delta."""

    def __init__(self, tokenizer: Any, **params: Any) -> None:
        self.detokenizer = IncrementalDetokenizer(cast(Tokenizer, tokenizer), SamplingParams(**params))
        self.deltas: list[str] = []

    def feed(self, *token_ids: int, finish_reason: str | None = None) -> str:
        stop = self.detokenizer.update(token_ids, finish_reason)
        self.deltas.append(self.detokenizer.take_delta(finish_reason is not None or stop is not None))
        return self.deltas[-1]

    def feed_all(self, token_ids: Sequence[int], finish_reason: str = "length") -> str:
        """One token a step, until the last or a stop string; returns the whole text."""
        for position, token_id in enumerate(token_ids):
            self.feed(token_id, finish_reason=finish_reason if position == len(token_ids) - 1 else None)
            if self.stop_string is not None:
                break
        assert "".join(self.deltas) == self.detokenizer.given_text == self.detokenizer.text
        return self.detokenizer.text

    @property
    def stop_string(self) -> str | None:
        return self.detokenizer.stop_string


def _byte_token_ids() -> list[int]:
    """Token id of each byte: ids count the sorted characters that stand for bytes in GPT-2's table, from 2 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
    order = sorted(symbols)
    return [2 + order.index(symbol) for symbol in symbols]


_BYTE_TOKEN_IDS = _byte_token_ids()


def byte_ids(text: str) -> list[int]:
    """One token a byte, whatever the merges say."""
    return [_BYTE_TOKEN_IDS[byte] for byte in text.encode()]


def test_the_concatenated_deltas_are_the_full_decode() -> None:
    tokenizer = byte_tokenizer()
    text = f"Grüße aus 北京, {EMOJI}\n  zwei  Leerzeichen."
    for ids in (tokenizer.encode(text), byte_ids(text)):
        assert Stream(tokenizer).feed_all(ids) == text == tokenizer.decode(ids)


def test_a_character_is_given_out_when_its_last_byte_has_come() -> None:
    first, *middle, last = byte_ids(EMOJI)
    stream = Stream(byte_tokenizer())
    assert stream.feed(*byte_ids("a"), first) == "a"
    assert [stream.feed(token_id) for token_id in middle] == ["", ""]
    assert stream.feed(last) == EMOJI


def test_b37_a_character_cut_at_the_end_is_flushed_as_the_full_decode_shows_it() -> None:
    tokenizer = byte_tokenizer()
    for cut in (1, 2, 3):
        ids = byte_ids("ok " + EMOJI)[: 3 + cut]
        stream = Stream(tokenizer)
        assert stream.feed_all(ids, "length") == tokenizer.decode(ids) == "ok " + REPLACEMENT
        assert "".join(stream.deltas[:-1]) == "ok ", "half a character is given out at the end only"


@pytest.mark.parametrize("finish_reason", ["abort", "error"])
def test_a_request_that_ends_without_a_last_token_shows_what_was_held_back(finish_reason: str) -> None:
    stream = Stream(byte_tokenizer(), stop=["never to come"])
    stream.feed(*byte_ids("ok " + EMOJI)[:-1])
    stream.feed(finish_reason=finish_reason)
    assert "".join(stream.deltas) == "ok " + REPLACEMENT


def test_b39_random_ids_never_raise_and_decode_as_a_whole() -> None:
    """2,000 sequences of 64 ids: lone continuation bytes, overlong forms, special tokens, anything."""
    tokenizer = byte_tokenizer()
    rng = random.Random(0)
    for number in range(2000):
        pool = (range(258), range(130, 258), range(300))[
            number % 3
        ]  # all bytes; mostly high ones; merges too
        ids = rng.choices(pool, k=64)
        assert Stream(tokenizer, skip_special_tokens=bool(number % 2)).feed_all(ids) == tokenizer.decode(
            ids, bool(number % 2)
        )


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, 299), min_size=1, max_size=40),
    cuts=st.lists(st.integers(1, 5), min_size=40, max_size=40),
)
def test_the_text_does_not_depend_on_how_many_tokens_come_at_once(ids: list[int], cuts: list[int]) -> None:
    stream = Stream(byte_tokenizer())
    rest = list(ids)
    for cut in cuts:
        part, rest = rest[:cut], rest[cut:]
        stream.feed(*part, finish_reason=None if rest else "length")
        if not rest:
            break
    assert "".join(stream.deltas) == byte_tokenizer().decode(ids)


def test_8627_chinese_text_has_no_replacement_character() -> None:
    text = "你好,世界。分页注意力把键值缓存分成块。"
    stream = Stream(byte_tokenizer())
    assert stream.feed_all(byte_ids(text)) == text
    assert all(REPLACEMENT not in delta for delta in stream.deltas)


def word_tokenizer(decoder: Any, *extra: str) -> Any:
    """Words with SentencePiece's `▁` for a space, and `<s>` as special token 0."""
    vocab = ["<s>", "▁", "▁the", "▁cat", "s", "▁▁", "▁sat", ".", *extra]
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=[]))
    backend.decoder = decoder
    backend.add_special_tokens(["<s>"])

    class _Tokenizer:
        special_ids = frozenset({0})

        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            return str(backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    return _Tokenizer()


def llama2_decoder() -> Any:
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


@pytest.mark.parametrize("decoder", [decoders.Metaspace(), llama2_decoder()], ids=["metaspace", "llama2"])
def test_spaces_between_words_survive_a_decoder_that_strips_the_first(decoder: Any) -> None:
    tokenizer = word_tokenizer(decoder)
    rng = random.Random(1)
    for _ in range(1000):
        ids = rng.choices(range(8), k=rng.randint(1, 10))
        assert Stream(tokenizer).feed_all(ids) == tokenizer.decode(ids), ids


def test_byte_fallback_shows_whole_characters_and_never_raises() -> None:
    """A run of byte tokens decodes as a whole only while it is valid; see the module's rule for what happens if not."""
    tokenizer = word_tokenizer(llama2_decoder(), "<0xE4>", "<0xBD>", "<0xA0>", "<0xFF>")
    assert Stream(tokenizer).feed_all([2, 8, 9, 10, 3]) == "the你 cat"
    assert Stream(tokenizer).feed_all([2, 8, 9, 3]) == tokenizer.decode([2, 8, 9, 3])
    assert Stream(tokenizer).feed_all([8, 9, 10, 11, 3]).startswith("你")


def test_b35_the_beginning_of_a_stop_string_is_never_streamed() -> None:
    pieces = PieceTokenizer("DEF", "G", "HI", "J", "X")
    stream = Stream(pieces, stop="DEFGHIJ")
    assert [stream.feed(token_id) for token_id in (0, 1, 2, 3)] == ["", "", "", ""]
    assert stream.stop_string == "DEFGHIJ"

    stream = Stream(pieces, stop="DEFGHIJ")
    stream.feed(0)
    stream.feed(4, finish_reason="length")
    assert "".join(stream.deltas) == "DEFX"
    assert stream.stop_string is None


def test_as_many_characters_are_held_back_as_the_longest_stop_string_may_need() -> None:
    stream = Stream(PieceTokenizer(*"abcdefgh"), stop=["xy", "wxyz"])
    assert [stream.feed(i) for i in range(6)] == ["", "", "", "a", "b", "c"]
    assert stream.feed(6, finish_reason="length") == "defg"


def test_b29_a_stop_string_among_the_first_min_tokens_does_not_count_then_or_later() -> None:
    stream = Stream(PieceTokenizer("e", "x"), stop="e", min_tokens=3)
    for token_id in (0, 1, 0):
        stream.feed(token_id)
        assert stream.stop_string is None
    stream.feed(1)
    assert stream.stop_string is None
    stream.feed(0)
    assert stream.stop_string == "e"
    assert stream.detokenizer.text == "exex"


def test_b29_a_stop_string_that_begins_before_min_tokens_and_ends_after_them_counts() -> None:
    stream = Stream(PieceTokenizer("ST", "OP", "x"), stop="STOP", min_tokens=2)
    stream.feed(2)
    stream.feed(0)
    stream.feed(1)
    assert (stream.stop_string, stream.detokenizer.text) == ("STOP", "x")


def test_b29_the_text_of_a_special_token_stops_only_after_min_tokens() -> None:
    stream = Stream(byte_tokenizer(), stop="<eos>", min_tokens=1)
    stream.feed(EOS)
    assert stream.stop_string is None
    stream.feed(EOS)
    assert stream.stop_string == "<eos>"


def test_the_stop_string_that_is_completed_first_wins_whatever_its_place_in_the_list() -> None:
    pieces = PieceTokenizer("one two three")
    for stop in (["three", "two"], ["two", "three"]):
        stream = Stream(pieces, stop=stop)
        stream.feed(0)
        assert (stream.stop_string, stream.detokenizer.text) == ("two", "one ")


def test_of_stop_strings_completed_together_the_one_that_starts_first_cuts() -> None:
    stream = Stream(PieceTokenizer("ab", "cd"), stop=["d", "bcd", "cd"])
    stream.feed(0)
    stream.feed(1)
    assert (stream.stop_string, stream.detokenizer.text) == ("bcd", "a")


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abSTOP")])
def test_the_text_is_cut_before_or_after_the_stop_string_by_flag(include: bool, text: str) -> None:
    stream = Stream(PieceTokenizer("ab", "ST", "OPcd"), stop="STOP", include_stop_str_in_output=include)
    for token_id in (0, 1, 2):
        stream.feed(token_id)
    assert "".join(stream.deltas) == text
    assert stream.detokenizer.token_ids == [0, 1, 2], "the token that completed the match stays in the ids"


def test_b33_tokens_behind_a_stop_string_inside_one_step_are_dropped() -> None:
    stream = Stream(PieceTokenizer("a", "ST", "OP", "b"), stop="STOP")
    stream.feed(0)
    stream.feed(1, 2, 3, 0)
    assert "".join(stream.deltas) == stream.detokenizer.text == "a"
    assert stream.detokenizer.token_ids == [0, 1, 2]


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, 4), min_size=1, max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_stop_strings_are_found_as_by_searching_the_whole_text_after_each_token(
    ids: list[int], stops: list[str]
) -> None:
    pieces = PieceTokenizer("a", "b", "ab", "bba", "aabb")
    stream = Stream(pieces, stop=stops)
    text = stream.feed_all(ids)

    expected, used = pieces.decode(ids), len(ids)
    for count in range(1, len(ids) + 1):
        whole = pieces.decode(ids[:count])
        found = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
        if found:
            expected, used = whole[: min(found)[1]], count
            break
    assert text == expected
    assert stream.detokenizer.token_ids == ids[:used]


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_b41_the_end_marker_is_shown_only_when_asked_for_and_trims_no_text(
    skip_special: bool, include: bool
) -> None:
    ids = [*byte_ids("injury."), EOS]
    stream = Stream(byte_tokenizer(), skip_special_tokens=skip_special, include_stop_str_in_output=include)
    text = stream.feed_all(ids, "stop")
    # A special token that is to be skipped is skipped at the end too.
    assert text == "injury." + ("<eos>" if include and not skip_special else "")
    assert stream.detokenizer.token_ids == ids


@pytest.mark.parametrize("include", [True, False])
def test_a_stop_token_that_is_text_is_shown_only_when_asked_for(include: bool) -> None:
    ids = byte_ids("abc")
    assert (
        Stream(byte_tokenizer(), include_stop_str_in_output=include).feed_all(ids, "stop")
        == "abc"[: 2 + include]
    )


@pytest.mark.parametrize("skip_special", [True, False])
def test_b41_a_special_token_given_as_a_stop_string_stops(skip_special: bool) -> None:
    ids = [*byte_ids("injury."), BOS, *byte_ids("more")]
    stream = Stream(byte_tokenizer(), stop=["<bos>"], skip_special_tokens=skip_special)
    assert stream.feed_all(ids) == "injury."
    assert stream.stop_string == "<bos>"
    assert stream.detokenizer.token_ids == ids[:8]


def test_half_a_character_before_a_special_stop_token_is_shown() -> None:
    stream = Stream(byte_tokenizer(), stop=["<bos>"])
    assert stream.feed_all([*byte_ids("ok " + EMOJI)[:-1], BOS]) == "ok " + REPLACEMENT
    assert stream.stop_string == "<bos>"


def test_a_token_is_decoded_a_bounded_number_of_times() -> None:
    pieces = PieceTokenizer("ab ")
    Stream(pieces, stop="abc").feed_all([0] * 500)
    assert pieces.num_ids_decoded <= 4 * 500
