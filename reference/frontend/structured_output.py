"""From `structured_outputs` to masks: what the text of an answer may go on with, by the library `llguidance`.

The library walks an Earley parser over the tree of all tokens' bytes and gives a bit a token. The rules here:

- A token is allowed if the text can still become one that the grammar accepts. Special tokens are no text.
- All end-of-sequence ids of the model are allowed where the text may end, and nothing else where it must end. An output
  that goes on past the end (`ignore_eos`) goes on with end-of-sequence tokens, so its text stays what was asked for.
- A stop token id is a token like any other: it ends the output where the grammar allows it.
- A grammar that becomes too complex in the middle of an answer allows nothing, which ends the request with an error.

(vLLM: `vllm/v1/structured_output/backend_guidance.py`.)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from reference.contracts.config import ModelConfig, cdiv
from reference.contracts.structured_outputs import KINDS, StructuredOutputsParams
from reference.frontend.logger import logger

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from reference.frontend.tokenizer import Tokenizer

MAX_CACHED_GRAMMARS = 64
MAX_GRAMMAR_CHARACTERS = 256 * 1024
# Who submits a grammar may not stop everybody else. The work for a step stays below about 0.1 s and the automaton below
# about 40 MB a request; realistic schemas need a thousandth of it.
_LIMITS: dict[str, Any] = {
    "max_grammar_size": 100_000,  # symbols
    "initial_lexer_fuel": 200_000,  # parts of regular expressions
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,  # Earley items
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,
}


class GrammarCompiler:
    """Compiles `structured_outputs` for one model, and remembers the last ones.

    Args:
        model: for its vocabulary and its end-of-sequence ids.
        tokenizer: for the bytes of each token.
    """

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._compiled = lru_cache(MAX_CACHED_GRAMMARS)(self._compile)  # safe between threads

    def compile(self, params: StructuredOutputsParams) -> StructuredOutputGrammar:
        """A grammar at the beginning of its text.

        Raises:
            ValueError: the grammar cannot be compiled, is too large or accepts nothing; or the model has no
                end-of-sequence token, or llguidance is missing or does not know this kind of tokenizer.
        """
        return self._compiled(params).fork()

    def _compile(self, params: StructuredOutputsParams) -> StructuredOutputGrammar:
        if not self.model.eos_token_ids:
            raise ValueError(
                "structured_outputs needs a model with an end-of-sequence token, and this one has none."
            )
        tokenizer = self._ll_tokenizer  # first: it says so if the library is missing
        from llguidance import LLMatcher, LLParserLimits

        kind = next(name for name in KINDS if getattr(params, name))
        size = len("".join(params.choice) if params.choice else str(getattr(params, kind)))
        if size > MAX_GRAMMAR_CHARACTERS:
            raise ValueError(
                f"structured_outputs.{kind} has {size} characters; {MAX_GRAMMAR_CHARACTERS} are the limit."
            )
        limits = LLParserLimits(verbose_errors=False, **_LIMITS)
        try:
            matcher = LLMatcher(tokenizer, _grammar_text(params), log_level=0, limits=limits)
            matcher.compute_bitmask()  # what is hopeless, or too complex from the start, shows here
            error = matcher.get_error()
        except ValueError as invalid:  # only of the translation of GBNF
            error = str(invalid)
        if error.startswith("NoExtension"):
            raise ValueError(f"structured_outputs.{kind} accepts no text at all; allow at least one.")
        if error:
            raise ValueError(f"structured_outputs.{kind} cannot be compiled: {_in_one_line(error)}.")
        return StructuredOutputGrammar(matcher, self.model.vocab_size, self.model.eos_token_ids)

    @cached_property
    def _ll_tokenizer(self) -> LLTokenizer:
        """Half a second for a vocabulary of 49,152, so only for those who use it."""
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise ValueError(
                "structured_outputs needs the package llguidance; install it with `pip install 'twinfer[guided]'`."
            ) from error
        # The model's vocabulary may be padded, and the tokenizer may know tokens that the model does not.
        num_ids = max(self.model.vocab_size, self.tokenizer.vocab_size)
        try:
            return LLTokenizer(
                self.tokenizer.to_json(), n_vocab=num_ids, eos_token=list(self.model.eos_token_ids)
            )
        except ValueError as error:
            raise ValueError(
                f"structured_outputs cannot be used with this model's tokenizer ({_in_one_line(str(error))})."
            ) from error


class StructuredOutputGrammar:
    """The `Grammar` of one sequence: a matcher that has read the output so far.

    Args:
        matcher: llguidance's.
        vocab_size: V, of the model.
        eos_token_ids: what may end a text.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)

    def accept(self, token_id: int) -> None:
        self._read(token_id)

    def count_valid(self, token_ids: Sequence[int]) -> int:
        """See `Grammar`; what follows a draft that ends the text is not counted."""
        if not self._matcher.is_stopped():
            return int(self._matcher.validate_tokens(list(token_ids)))
        ends = [token_id in self._eos_token_ids for token_id in token_ids]
        return 0 if self._matcher.is_error() else [*ends, False].index(False)

    def bitmask(self, draft_token_ids: Sequence[int]) -> np.ndarray:
        rows, num_read = [self._allowed()], 0
        for token_id in draft_token_ids:
            num_read += self._read(token_id)
            rows.append(self._allowed())
        if num_read:
            self._matcher.rollback(num_read)
        return np.stack(rows)  # int32 [1 + drafts, cdiv(V, 32)]

    def fork(self) -> StructuredOutputGrammar:
        return StructuredOutputGrammar(self._matcher.deep_copy(), self._vocab_size, self._eos_token_ids)

    def _read(self, token_id: int) -> bool:
        """Let the matcher go on by a token, unless the text is at its end: there it would not be able to go back."""
        if self._matcher.is_stopped():
            return False
        self._matcher.consume_token(token_id)
        return True

    def _allowed(self) -> np.ndarray:
        """One row of `bitmask`. At the end of the text the matcher allows end-of-sequence alone, for ever."""
        mask = self._matcher.compute_bitmask()
        num_words = cdiv(self._vocab_size, 32)
        if self._matcher.is_error():
            logger.warning("A grammar failed: %s.", _in_one_line(self._matcher.get_error()))
        # In these states the library allows end-of-sequence, but the text would not be what was asked for.
        if self._matcher.is_error() or (self._matcher.is_stopped() and not self._matcher.is_accepting()):
            return np.zeros(num_words, dtype=np.int32)
        return np.frombuffer(mask, dtype="<i4")[:num_words]


def _grammar_text(params: StructuredOutputsParams) -> str:
    """What is asked for, in llguidance's own notation.

    Raises:
        ValueError: a grammar in GBNF cannot be translated into Lark's notation.
    """
    from llguidance import LLMatcher, grammar_from

    if params.regex is not None:
        text = LLMatcher.grammar_from_regex(params.regex)
    elif params.choice is not None:
        text = LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, params.choice)))
    elif params.grammar is not None:
        text = grammar_from("grammar", params.grammar)
    else:
        # The library tries to be exact: a keyword that it does not know is an error, and no reference leads elsewhere.
        text = LLMatcher.grammar_from_json_schema(
            '{"type": "object"}' if params.json is None else str(params.json),
            overrides={"whitespace_flexible": not params.disable_any_whitespace},
        )
    return str(text)


def _in_one_line(error: str) -> str:
    """The first line of an error, which names the place, and those that name the reason; the drawings are left out."""
    first, *others = error.strip().splitlines() or [""]
    reasons = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    return f"{' '.join([first, *reasons]):.400}".rstrip(".: ")
