"""What happens to a row of logits before temperature, as a pure function of the row, the request and its tokens.

    grammar and allowed ids -> bad words and min_tokens -> logit bias -> repetition, presence, frequency

A masked logit becomes minus infinity, and no later step changes that. Bias and penalties are computed in float64 on
float64(logit), and each of the two is rounded to float32 once: then every program that follows the order gets the same
bits. What would leave float32 stays at its largest finite number, so no penalty can mask a token, nor make a NaN.

(Meaning and order: vLLM's `v1/sample`.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import PromptLogprobs, TokenLogprob

_LARGEST = float(np.finfo(np.float32).max)
# Rows of a prompt whose logits exist at a time: a long prompt times a large vocabulary would be gigabytes.
PROMPT_ROWS = 64


def masked_token_ids(params: SamplingParams, output_token_ids: Sequence[int]) -> set[int]:
    """Tokens that may not come next: the last one of a bad word whose others end the output, and, before `min_tokens`
    are there, all that would end it. Allowed ids are apart: they are many, or few, by nature.
    """
    masked = set()
    for *head, last in params.bad_words_token_ids:
        if not head or list(output_token_ids[-len(head) :]) == head:
            masked.add(last)
    if len(output_token_ids) < params.min_tokens:
        masked |= params.all_stop_token_ids
    return masked


def unpack_bitmask(bitmask: np.ndarray, vocab_size: int) -> np.ndarray:
    """int32 [cdiv(V, 32)] to bool [V]: bit t % 32 of word t // 32 is token t."""
    bits = np.unpackbits(bitmask.astype("<i4").view(np.uint8), bitorder="little")  # [32 * words]
    unpacked: np.ndarray = bits[:vocab_size].astype(bool)
    return unpacked


def process_logits(
    logits: np.ndarray,
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    bitmask: np.ndarray | None = None,
) -> np.ndarray:
    """The logits that temperature, min_p, top-k, top-p and the draw see.

    Args:
        logits: float32 [V], without NaN.
        params: `resolved`, for bad words and end-of-sequence ids.
        prompt_token_ids: read by the repetition penalty only.
        output_token_ids: the tokens generated so far.
        bitmask: int32 [cdiv(V, 32)], what a grammar allows; see `SchedulerOutput.grammar_bitmasks`.

    Returns:
        float32 [V], a copy; all minus infinity when the masks leave no token.
    """
    processed = logits.copy()  # [V]
    if bitmask is not None:
        processed[~unpack_bitmask(bitmask, len(logits))] = -np.inf
    if params.allowed_token_ids is not None:
        allowed = list(params.allowed_token_ids)
        kept = processed[allowed]  # [K]
        processed[:] = -np.inf
        processed[allowed] = kept
    for token_id in masked_token_ids(params, output_token_ids):
        processed[token_id] = -np.inf
    if params.logit_bias:
        ids = list(params.logit_bias)
        biased = processed[ids].astype(np.float64) + list(params.logit_bias.values())  # [K]
        processed[ids] = _round(biased, processed[ids])
    if params.has_penalties:
        _penalize(processed, params, prompt_token_ids, output_token_ids)
    return processed


def _penalize(
    processed: np.ndarray,
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
) -> None:
    """Repetition looks at prompt and output (Keskar et al., "CTRL", 2019), presence and frequency at the output."""
    repetition = params.repetition_penalty
    prompt = prompt_token_ids if repetition != 1 else ()
    ids = np.array(sorted({*prompt, *output_token_ids}), dtype=np.int64)  # [K]
    counts = np.bincount(np.array(output_token_ids, np.int64), minlength=len(processed))[ids]  # [K]
    z = processed[ids].astype(np.float64)  # [K]
    with np.errstate(over="ignore"):
        # A negative logit is multiplied: divided by 1.5, -3 would become -2 and the token likelier.
        z = np.where(z > 0, z / repetition, z * repetition)
    z = z - params.frequency_penalty * counts
    z = z - params.presence_penalty * (counts > 0)
    processed[ids] = _round(z, processed[ids])


def _round(values: np.ndarray, before: np.ndarray) -> np.ndarray:
    """float64 to float32, never beyond the finite numbers; what was masked before stays masked."""
    rounded = np.clip(values, -_LARGEST, _LARGEST).astype(np.float32)
    return np.where(before == -np.inf, np.float32(-np.inf), rounded)


def top_logprobs(logits: np.ndarray, token_id: int, num_logprobs: int) -> tuple[TokenLogprob, ...]:
    """The sampled token, then the `num_logprobs` most probable ones, by rank and without the sampled one again.

    Args:
        logits: float32 [V], as the model gave them.
        token_id: the sampled token.
        num_logprobs: 0 reports the sampled token alone.

    Of equal logits the lower id ranks first, as everywhere.
    """
    z = logits.astype(np.float64)  # [V]
    highest = z.max()
    log_total = float(highest + np.log(np.exp(z - highest).sum()))
    rank = 1 + int((z > z[token_id]).sum() + (z[:token_id] == z[token_id]).sum())
    ranked = [
        (token_id, rank),
        *((other, r) for r, other in enumerate(_best(z, num_logprobs), start=1) if other != token_id),
    ]
    return tuple(TokenLogprob(chosen, float(z[chosen]) - log_total, r) for chosen, r in ranked)


def _best(z: np.ndarray, k: int) -> list[int]:
    """Ids of the k largest of z [V], the largest first and of equals the lower id, without sorting them all.

    A partition finds the k-th largest value but takes any of those equal to it, so the ids are chosen by that value.
    """
    k = min(k, len(z))
    if k == 0:
        return []
    border = np.partition(z, -k)[-k]
    above = np.flatnonzero(z > border)  # fewer than k
    chosen = np.concatenate([above, np.flatnonzero(z == border)[: k - len(above)]])  # [k]
    best: list[int] = chosen[np.argsort(-z[chosen], kind="stable")].tolist()
    return best


def top_prompt_logprobs(
    logits: Iterable[np.ndarray], start: int, token_ids: Sequence[int], num_logprobs: int
) -> PromptLogprobs | None:
    """`top_logprobs` of neighbouring tokens of a prompt.

    Args:
        logits: float32 [rows, V], part after part (see `PROMPT_ROWS`), together a row a token: the model's answer to
            what stands before it.
        start: position of the first of these tokens, at least 1.
        token_ids: the tokens.
        num_logprobs: as in `top_logprobs`.

    Returns:
        An entry a token, or None when a row holds NaN.
    """
    entries: list[tuple[TokenLogprob, ...]] = []
    for part in logits:
        if np.isnan(part).any():
            return None
        first = len(entries)
        entries += [
            top_logprobs(row, token_id, num_logprobs)
            for row, token_id in zip(part, token_ids[first : first + len(part)], strict=True)
        ]
    return PromptLogprobs(start, tuple(entries))
