"""Speculative decoding: somebody cheap guesses the next tokens, and one step of the model checks all of them.

The draws are coupled. A guess is accepted when it is the token that the model itself draws at that position, with the
request's own noise; so the tokens of a request are those it would get without any guess, at any temperature, and a
proposer that guesses with the same noise is right more often. (Rejection sampling, Leviathan et al., "Fast Inference
from Transformers via Speculative Decoding", 2023, keeps the distribution only.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from reference.contracts.config import EngineConfig
from reference.contracts.request import num_useful_drafts
from reference.contracts.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class DraftRequest:
    """A request that just sampled, and for whose next step guesses are wanted."""

    request_id: str
    token_ids: (
        Sequence[int] | np.ndarray
    )  # prompt and output, with what this step sampled; grows from step to step
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    max_num_drafts: int  # at least 1: more would be of no use


class Speculator(Protocol):
    """Who guesses."""

    def propose(self, requests: Sequence[DraftRequest]) -> dict[str, list[int]]:
        """Guesses of the tokens that follow, for those of the requests that it has any for, in their order."""
        ...

    def forget(self, request_ids: Iterable[str]) -> None:
        """These ended or lost their blocks; an id may come back as another request. Unknown ids are ignored."""
        ...


def num_wanted_drafts(
    config: EngineConfig,
    params: SamplingParams,
    num_tokens: int,
    num_output_tokens: int,
    newest: Iterable[int],
) -> int:
    """Drafts to ask for once a request has this length, `newest` being the tokens it just got.

    None when one of these ends it.
    """
    if config.speculative is None or any(params.ends_output(token_id) for token_id in newest):
        return 0
    useful = num_useful_drafts(params, num_tokens, num_output_tokens, config.max_total_tokens)
    return min(config.speculative.num_speculative_tokens, useful)
