"""Seeded workloads: token ids in, a fixed number of tokens out, so that two engines do the same work.

    uniform   64 in, 64 out
    mixed     prompts and answers of log-normal length, as in chats (ShareGPT): median 100 in, 50 out
    prefix    512 tokens that all requests share, 8 to 31 of their own, 16 out
    long      4,096 in, 64 out
    chat      conversations of four turns; each prompt is all that was said before, the answers included, and a question

The first three draw in an order that is fixed for good: their figures are compared with those of other engines.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

SMALLEST_ID = 100  # below stand the special tokens of the usual vocabularies
SHARED_TOKENS = 512
CHAT_TURNS, CHAT_SYSTEM_TOKENS, CHAT_ANSWER_TOKENS = 4, 64, 48
# How many requests each has unless told otherwise; of chat: conversations.
DEFAULT_SIZES = {"uniform": 1, "mixed": 32, "prefix": 32, "long": 1, "chat": 8}


@dataclass(frozen=True)
class BenchRequest:
    """`token_ids` are the prompt, or its end: what stands before it is the request `follows` with its answer."""

    token_ids: tuple[int, ...]
    max_tokens: int
    follows: int | None = None  # index in the wave before


@dataclass(frozen=True)
class BenchWorkload:
    """Requests in waves: those of one are there at once, and the next one comes when all have their answers."""

    name: str
    waves: tuple[tuple[BenchRequest, ...], ...]

    @property
    def requests(self) -> list[BenchRequest]:
        return [request for wave in self.waves for request in wave]

    @property
    def num_output_tokens(self) -> int:
        return sum(request.max_tokens for request in self.requests)

    def with_other_tokens(self, number: int, vocab_size: int) -> BenchWorkload:
        """The same lengths and the same sharing in other tokens, 0 being these: no cache remembers round `number`."""

        def other(token_id: int) -> int:
            return SMALLEST_ID + (token_id - SMALLEST_ID + number * 7919) % (vocab_size - SMALLEST_ID)

        def changed(request: BenchRequest) -> BenchRequest:
            return BenchRequest(tuple(map(other, request.token_ids)), request.max_tokens, request.follows)

        return BenchWorkload(self.name, tuple(tuple(map(changed, wave)) for wave in self.waves))


def make_workload(
    name: str, size: int | None = None, seed: int = 0, vocab_size: int = 49152
) -> BenchWorkload:
    """The workload of this name.

    Args:
        name: one of `DEFAULT_SIZES`.
        size: how many requests it has (of chat: conversations); that of `DEFAULT_SIZES` unless given.
        seed: draws tokens and lengths.
        vocab_size: ids are drawn from 100 to this.

    Raises:
        ValueError: the name is unknown, or the size or the vocabulary is too small.
    """
    if name not in DEFAULT_SIZES:
        raise ValueError(f"There is no workload {name!r}; known are: {', '.join(DEFAULT_SIZES)}.")
    size = DEFAULT_SIZES[name] if size is None else size
    if size < 1:
        raise ValueError(f"A workload needs at least 1 request, got {size}.")
    if vocab_size <= SMALLEST_ID:
        raise ValueError(f"Workloads need a vocabulary of more than {SMALLEST_ID} tokens, got {vocab_size}.")
    rng = random.Random(seed)
    if name == "chat":
        return BenchWorkload(name, _chat(rng, size, vocab_size))
    shared = _tokens(rng, SHARED_TOKENS, vocab_size)
    requests = []
    for _ in range(size):
        own, max_tokens = _draw(name, rng, vocab_size)
        requests.append(BenchRequest(shared + own if name == "prefix" else own, max_tokens))
    return BenchWorkload(name, (tuple(requests),))


def _draw(name: str, rng: random.Random, vocab_size: int) -> tuple[tuple[int, ...], int]:
    """(a request's own tokens, its max_tokens)."""
    if name == "uniform":
        return _tokens(rng, 64, vocab_size), 64
    if name == "long":
        return _tokens(rng, 4096, vocab_size), 64
    if name == "prefix":
        return _tokens(rng, rng.randrange(8, 32), vocab_size), 16
    num_tokens = max(8, min(1024, int(rng.lognormvariate(4.6, 0.9))))  # e^4.6 = 99.5
    max_tokens = max(4, min(256, int(rng.lognormvariate(3.9, 0.7))))  # e^3.9 = 49.4
    return _tokens(rng, num_tokens, vocab_size), max_tokens


def _chat(rng: random.Random, conversations: int, vocab_size: int) -> tuple[tuple[BenchRequest, ...], ...]:
    system = _tokens(rng, CHAT_SYSTEM_TOKENS, vocab_size)
    waves = []
    for turn in range(CHAT_TURNS):
        wave = []
        for conversation in range(conversations):
            question = _tokens(rng, rng.randrange(16, 64), vocab_size)
            wave.append(
                BenchRequest(question, CHAT_ANSWER_TOKENS, conversation)
                if turn
                else BenchRequest(system + question, CHAT_ANSWER_TOKENS)
            )
        waves.append(tuple(wave))
    return tuple(waves)


def _tokens(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(SMALLEST_ID, vocab_size) for _ in range(count))


def prompts_of(wave: Sequence[BenchRequest], before: Sequence[Sequence[int]]) -> list[list[int]]:
    """The whole prompts of a wave; `before` are the sequences of the wave before, prompt and answer each."""
    return [
        [*(() if request.follows is None else before[request.follows]), *request.token_ids]
        for request in wave
    ]


def draw_tokens(count: int, seed: int, vocab_size: int) -> tuple[int, ...]:
    """`count` seeded token ids."""
    return _tokens(random.Random(seed), count, vocab_size)
