"""From token ids to text, one token at a time, without ever having to take a character back.

A token is not a piece of text: a character of several bytes may be spread over several tokens, and a token alone may
decode to something else than in its place. So the tail is decoded twice, with and without the newest tokens, and only
the difference is added to the text, once it can no longer change:

    output ids   [ ............ in the text ........... | prefix_offset .. read_offset | newest ]
    text         decode(ids[prefix_offset : read_offset])    is a prefix of
                 decode(ids[prefix_offset :])                and the rest of it is new

A decode that ends in U+FFFD may end in half a character: it is held back until more tokens come, and added as the full
decode shows it when the request ends. The prompt is never decoded, so the text is exactly `decode(output ids)`: with a
decoder that drops the space before the first word (SentencePiece), it is the output's first word that loses it. One
decoder has no stable prefix: byte fallback turns a whole run of byte tokens into U+FFFD when one of them is wrong.
Characters of such a run that were whole when they were given out stay as they are.

(Idea: Hugging Face text-generation-inference and vLLM's `detokenizer_utils.py`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reference.contracts.sampling_params import SamplingParams

if TYPE_CHECKING:
    from reference.frontend.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Text of one request's output. The concatenated deltas equal the decode of all ids, cut at a stop string.

    Invariants: `text[:num_given]` was handed out and never changes; no part of a stop string is in it, because the last
    `max(len(stop)) - 1` characters are handed out only when the request has ended.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.tokenizer = tokenizer
        self.params = params
        self.token_ids: list[int] = []
        self.text = ""  # decoded so far
        self.num_given = 0  # characters of it that were handed out
        self.stop_string: str | None = None  # the one that was found
        self._prefix_offset = 0
        self._read_offset = 0
        stops = params.stop_strings
        # A stop string that the caller wants to see may be handed out while it is still being written.
        self._num_held_back = (
            0 if params.include_stop_str_in_output else max((len(s) - 1 for s in stops), default=0)
        )
        # The text of a special token that is left out of the text would never be found in it.
        self._stop_specials: dict[int, str] = {}
        if stops and params.skip_special_tokens:
            special = {token_id: tokenizer.decode([token_id], False) for token_id in tokenizer.special_ids}
            self._stop_specials = {token_id: text for token_id, text in special.items() if text in stops}

    def update(self, new_token_ids: Sequence[int], finish_reason: str | None) -> str | None:
        """Take in new tokens, and the engine's reason if it ended the request with them.

        A request that ended with `stop` has a stop or end-of-sequence token at its end, which is left out of the text
        unless the caller wants it.

        Returns:
            The stop string that ends the request now, if one does; tokens after the one that completed it are dropped.
        """
        for position, token_id in enumerate(new_token_ids):
            self.token_ids.append(token_id)
            is_last = finish_reason is not None and position == len(new_token_ids) - 1
            if is_last and finish_reason == "stop":
                self._decode(len(self.token_ids) - (not self.params.include_stop_str_in_output), final=True)
            else:
                self._decode(len(self.token_ids), final=is_last or token_id in self._stop_specials)
                if len(self.token_ids) > self.params.min_tokens:
                    self.stop_string = self.stop_string or self._stop_specials.get(token_id)
            if self.stop_string is not None:
                return self.stop_string
        if finish_reason is not None and not new_token_ids:  # abort, error
            self._decode(len(self.token_ids), final=True)
        return self.stop_string

    def take_delta(self, finished: bool) -> str:
        """Text that can no longer change and was not handed out yet."""
        end = len(self.text) if finished else max(len(self.text) - self._num_held_back, self.num_given)
        delta = self.text[self.num_given : end]
        self.num_given = end
        return delta

    @property
    def given_text(self) -> str:
        """The concatenation of all deltas."""
        return self.text[: self.num_given]

    def _decode(self, end: int, final: bool) -> None:
        """Extend the text by the ids up to `end`, as far as it is settled, and look for stop strings in what is new."""
        skip = self.params.skip_special_tokens
        known = self.tokenizer.decode(self.token_ids[self._prefix_offset : self._read_offset], skip)
        longer = self.tokenizer.decode(self.token_ids[self._prefix_offset : end], skip)
        # An id without text stays among the newest: alone in front of the window it would hide a leading space.
        if not final and (longer.endswith(REPLACEMENT) or len(longer) <= len(known)):
            return
        searched = len(self.text)
        self.text += longer[len(known) :]
        self._prefix_offset, self._read_offset = self._read_offset, end
        # What the first `min_tokens` tokens complete does not count, now or later.
        if len(self.token_ids) > self.params.min_tokens:
            self._find_stop_string(searched)

    def _find_stop_string(self, searched: int) -> None:
        """Cut the text at the stop string whose match is completed first; of equals, at the one that starts first."""
        matches = []
        for stop in self.params.stop_strings:
            start = self.text.find(stop, max(searched - len(stop) + 1, 0))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if matches:
            end, start, self.stop_string = min(matches)
            self.text = self.text[: end if self.params.include_stop_str_in_output else start]
