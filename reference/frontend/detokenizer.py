"""From token ids to text, one token at a time, without ever having to take a character back.

A token is not a piece of text: a character of several bytes may be spread over several tokens, and a token alone may
decode to something else than in its place. So the tail is decoded twice, with and without the newest tokens, and only
the difference is given out, once it can no longer change:

    output ids   [ ............ given out ............ | prefix_offset .. read_offset | newest ]
    text         decode(ids[prefix_offset : read_offset])    is a prefix of
                 decode(ids[prefix_offset :])                and the rest of it is new

A text that ends in U+FFFD may be half a character: it is held back until more tokens come, and given out as the full
decode shows it when the request ends. The prompt is never decoded. (Idea: Hugging Face text-generation-inference and
vLLM's `detokenizer_utils.py`.)
"""

from __future__ import annotations

from reference.contracts.sampling_params import SamplingParams
from reference.frontend.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Text of one request's output. The concatenated deltas equal the decode of all ids, cut at a stop string."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.tokenizer = tokenizer
        self.params = params
        self.token_ids: list[int] = []
        self.text = ""  # decoded so far; its last characters may still be held back
        self.num_given = 0  # characters of `text` that were given out
        self.stop_string: str | None = None  # the one that was found
        self._prefix_offset = 0
        self._read_offset = 0
        # While no stop string has ended, its beginning may already stand at the end of the text.
        self._num_held_back = max((len(stop) - 1 for stop in params.stop_strings), default=0)

    def update(self, new_token_ids: tuple[int, ...], finish_reason: str | None) -> str | None:
        """Take in new tokens. Returns the stop string that ends the request now, if one does.

        Tokens after the one that completes a stop string are dropped. An ended request (`finish_reason`) has its
        last token left out of the text when that is a stop or end-of-sequence token, unless the caller wants it.
        """
        for position, token_id in enumerate(new_token_ids):
            is_last = finish_reason is not None and position == len(new_token_ids) - 1
            self.token_ids.append(token_id)
            if is_last and finish_reason == "stop" and not self.params.include_stop_str_in_output:
                self._flush(len(self.token_ids) - 1)
            else:
                self._decode(len(self.token_ids), final=is_last)
            if self.stop_string is not None:
                return self.stop_string
        return None

    def take_delta(self, finished: bool) -> str:
        """Text that can no longer change and was not given out yet."""
        end = len(self.text) if finished else max(len(self.text) - self._num_held_back, self.num_given)
        delta = self.text[self.num_given : end]
        self.num_given = end
        return delta

    @property
    def given_text(self) -> str:
        return self.text[: self.num_given]

    def finish(self) -> None:
        """The request ended without a last token (abort, error): show what was held back."""
        self._flush(len(self.token_ids))

    def _flush(self, end: int) -> None:
        self._decode(end, final=True)

    def _decode(self, end: int, final: bool) -> None:
        """Extend `text` by the ids up to `end`, as far as it is settled, and look for stop strings in what is new."""
        skip = self.params.skip_special_tokens
        known = self.tokenizer.decode(self.token_ids[self._prefix_offset : self._read_offset], skip)
        longer = self.tokenizer.decode(self.token_ids[self._prefix_offset : end], skip)
        if not final and (longer.endswith(REPLACEMENT) or len(longer) <= len(known)):
            return
        searched = len(self.text)
        self.text += longer[len(known) :]
        self._prefix_offset, self._read_offset = self._read_offset, end
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
