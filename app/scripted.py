"""A model that answers at once: scheduler and cache manager are a real tier's, only the forward pass is a script.

One word is one token, so a block of four holds four words that can be read from the back row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from reference.contracts.config import EngineConfig, ModelConfig
from reference.contracts.protocols import Checkpoint, KVCacheManager, ModelRunner, Scheduler, Tier
from reference.contracts.request import child_request_id
from reference.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from reference.frontend.tokenizer import Tokenizer

VOCAB_SIZE = 65_536

_STORY = (
    "the", "river", "ran", "under", "an", "old", "stone", "bridge", "and", "carried", "leaves", "past", "mills",
    "where", "a", "boy", "sat", "drawing", "ships", "while", "his", "sister", "counted", "swallows", "over", "warm",
    "fields", "until", "evening", "bells", "called", "them", "home", "across", "quiet", "meadows", "with", "bread",
    "salt", "apples",
)  # fmt: skip

SCRIPTED_MODEL = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=VOCAB_SIZE, hidden_size=8, intermediate_size=16,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4, max_position_embeddings=8192,
    rms_norm_eps=1e-5, rope_theta=10_000.0, tie_word_embeddings=True, bos_token_id=None, eos_token_ids=(),
)  # fmt: skip


class WordTokenizer(Tokenizer):
    """Every word is one token, numbered in the order in which words are first met; the story's words come first."""

    def __init__(self) -> None:
        self.vocab_size = VOCAB_SIZE
        self.special_ids = frozenset()
        self.bos_token_id = None
        self.eos_token_ids = ()
        self._pieces: list[str] = []
        self._ids: dict[str, int] = {}
        for word in _STORY:
            self._id(f" {word}")

    def encode(self, text: str) -> list[int]:
        return [self._id(piece) for piece in re.findall(r"\s*\S+", text)]

    def encode_word(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        known = len(self._pieces)
        return "".join(self._pieces[i] if i < known else f" #{i}" for i in token_ids)

    def _id(self, piece: str) -> int:
        if piece not in self._ids:
            if len(self._pieces) == VOCAB_SIZE:
                raise ValueError(f"The scripted model knows no more than {VOCAB_SIZE} different words.")
            self._ids[piece] = len(self._pieces)
            self._pieces.append(piece)
        return self._ids[piece]


def scripted_token(request_id: str, position: int) -> int:
    """Token at an output position: every request tells the story from a place of its own, siblings from others."""
    return (sum(map(ord, request_id)) * 5 + position) % len(_STORY)


def scripted_drafts(request_id: str, position: int, count: int) -> list[int]:
    """Guesses of the tokens from `position` on: every third position of the story is guessed wrong."""
    return [
        scripted_token(request_id, p) if p % 3 else (scripted_token(request_id, p) + 7) % len(_STORY)
        for p in range(position, position + count)
    ]


@dataclass
class _Sequence:
    num_known: int
    num_prompt: int
    num_computed: int
    num_siblings: int


@dataclass
class ScriptedRunner:
    """A `ModelRunner` without a model."""

    num_drafts: int = 0
    _sequences: dict[str, _Sequence] = field(default_factory=dict)

    def execute(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        self._update(schedule)
        output = ModelRunnerOutput(sampled_token_ids={})
        for request_id, count in schedule.num_scheduled_tokens.items():
            sequence = self._sequences[request_id]
            if sequence.num_computed + count < sequence.num_known:
                continue  # a chunk of a prompt: nothing is sampled
            first = sequence.num_known - sequence.num_prompt
            sampled: list[int] = []
            for draft in (*schedule.scheduled_spec_decode_tokens.get(request_id, ()), None):
                sampled.append(scripted_token(request_id, first + len(sampled)))
                if sampled[-1] != draft:
                    break
            output.sampled_token_ids[request_id] = sampled
            if first == 0 and sequence.num_siblings:
                siblings = (child_request_id(request_id, i + 1) for i in range(sequence.num_siblings))
                output.sibling_token_ids[request_id] = [scripted_token(name, 0) for name in siblings]
            if self.num_drafts:
                behind = first + len(sampled)
                output.draft_token_ids[request_id] = scripted_drafts(request_id, behind, self.num_drafts)
        return output

    def _update(self, schedule: SchedulerOutput) -> None:
        for request_id in (*schedule.finished_req_ids, *schedule.preempted_req_ids):
            self._sequences.pop(request_id, None)
        for new in schedule.scheduled_new_reqs:
            self._sequences[new.request_id] = _Sequence(
                len(new.token_ids), new.num_prompt_tokens, new.num_computed_tokens, new.sampling_params.n - 1
            )
        for delta in schedule.scheduled_running_reqs:
            sequence = self._sequences[delta.request_id]
            sequence.num_known += len(delta.new_token_ids)
            sequence.num_computed = delta.num_computed_tokens


class ScriptedTier:
    """Scheduler and cache manager of a tier, with a scripted runner. It needs neither torch nor the extension's model
    kernels, so it is available wherever the tier can be imported."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.name = tier.name

    def why_unavailable(self) -> str | None:
        return None

    def default_device(self) -> str:
        return "cpu"

    def kv_cache_memory(self, config: EngineConfig, checkpoint: Checkpoint, utilization: float) -> None:
        return None

    def make_kv_cache_manager(self, config: EngineConfig) -> KVCacheManager:
        return self._tier.make_kv_cache_manager(config)

    def make_scheduler(self, config: EngineConfig) -> Scheduler:
        return self._tier.make_scheduler(config)

    def make_model_runner(
        self, config: EngineConfig, checkpoint: Checkpoint, draft_checkpoint: Checkpoint | None = None
    ) -> ModelRunner:
        return ScriptedRunner(0 if config.speculative is None else config.speculative.num_speculative_tokens)
