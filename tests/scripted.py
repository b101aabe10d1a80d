"""An engine whose model is a script: real scheduler, real front end, and a runner that knows what comes next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from reference.contracts.config import EngineConfig, SpeculativeConfig
from reference.contracts.protocols import Checkpoint, KVCacheManager, ModelRunner, Scheduler, Tier
from reference.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from reference.frontend.engine_core import OnStep
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.tokenizer import Tokenizer, load_tokenizer
from tests.factories import MODEL, make_config
from tests.kv_ledger import KVLedger
from tests.tiny_models import make_tiny_llama

VOCAB_SIZE = 1500
BOS, EOS = 0, 1


def scripted_token(request_id: str, position: int) -> int:
    """Token of an output position, where no script says otherwise: 1000 to 1399, different for most requests."""
    return 1000 + (31 * sum(map(ord, request_id)) + 7 * position) % 400


@dataclass
class ScriptedRunner:
    """A `ModelRunner` without a model; its ledger finds out whoever reads what was never computed."""

    block_size: int
    script: Mapping[str, Sequence[int]] = field(
        default_factory=dict
    )  # output of a request; `scripted_token` behind it
    num_drafts: int = 0  # proposed for each next step, all of them right
    raise_at: dict[int, BaseException] = field(
        default_factory=dict
    )  # step -> what it raises, before it writes K and V
    nan_at: dict[str, int] = field(default_factory=dict)  # request -> output position whose logits are broken
    schedules: list[SchedulerOutput] = field(default_factory=list)
    ledger: KVLedger = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = KVLedger(self.block_size)

    def token(self, request_id: str, position: int) -> int:
        script = self.script.get(request_id, ())
        return script[position] if position < len(script) else scripted_token(request_id, position)

    def tokens(self, request_id: str, count: int) -> list[int]:
        return [self.token(request_id, position) for position in range(count)]

    def execute(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        self.schedules.append(schedule)
        self.ledger.update_states(schedule)
        if schedule.step in self.raise_at:
            raise self.raise_at[schedule.step]
        self.ledger.move_blocks(schedule)
        self.ledger.compute(schedule)
        sampled, errors, proposed = {}, {}, {}
        for request_id, count in schedule.num_scheduled_tokens.items():
            state = self.ledger.states[request_id]
            if state.num_computed_tokens + count < len(state.token_ids):
                continue
            first = state.num_output_tokens
            if self.nan_at.get(request_id) == first:
                errors[request_id] = "logits are not a number"
                continue
            new = []
            for draft in (*schedule.scheduled_spec_decode_tokens.get(request_id, ()), None):
                new.append(self.token(request_id, first + len(new)))
                if new[-1] != draft:
                    break
            sampled[request_id] = new
            behind = first + len(new)
            if self.num_drafts:
                proposed[request_id] = [self.token(request_id, behind + i) for i in range(self.num_drafts)]
        self.ledger.newest = sampled
        return ModelRunnerOutput(sampled, errors, draft_token_ids=proposed)


class ScriptedTier:
    """Scheduler and cache of a real tier, with a scripted runner."""

    def __init__(self, tier: Tier, **runner_options: Any) -> None:
        self.tier = tier
        self.name = tier.name
        self.runner_options = runner_options
        self.runner: ScriptedRunner | None = None

    def why_unavailable(self) -> str | None:
        return None  # a script needs neither torch nor an extension

    def default_device(self) -> str:
        return self.tier.default_device()

    def kv_cache_memory(self, config: EngineConfig, checkpoint: Checkpoint, utilization: float) -> None:
        return None

    def make_kv_cache_manager(self, config: EngineConfig) -> KVCacheManager:
        return self.tier.make_kv_cache_manager(config)

    def make_scheduler(self, config: EngineConfig) -> Scheduler:
        return self.tier.make_scheduler(config)

    def make_model_runner(
        self, config: EngineConfig, checkpoint: Checkpoint, draft_checkpoint: Checkpoint | None = None
    ) -> ModelRunner:
        self.runner = ScriptedRunner(config.cache.block_size, **self.runner_options)
        return self.runner


@cache
def byte_tokenizer() -> Tokenizer:
    """The tokenizer of the tiny models: `<bos>` 0, `<eos>` 1, bytes from 2, and fillers up to `VOCAB_SIZE`."""
    with TemporaryDirectory() as folder:
        make_tiny_llama(
            folder, vocab_size=VOCAB_SIZE, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1
        )
        return load_tokenizer(Path(folder))


class PieceTokenizer:
    """A tokenizer made of pieces: id i is the i-th of them. Text is the pieces side by side."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces
        self.vocab_size = len(pieces)
        self.special_ids: frozenset[int] = frozenset()
        self.num_ids_decoded = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_ids_decoded += len(token_ids)
        return "".join(self.pieces[token_id] for token_id in token_ids)


def make_scripted_config(**options: Any) -> EngineConfig:
    """As `make_config`, with the vocabulary and the end-of-sequence token of `byte_tokenizer`."""
    trace, seed = options.pop("trace", False), options.pop("seed", 0)
    config = make_config(**options)
    model = replace(MODEL, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    return replace(config, model=model, trace=trace, seed=seed)


NO_WEIGHTS = cast(Checkpoint, None)


def make_engine(
    tier: Tier, config: EngineConfig | None = None, on_step: OnStep | None = None, **runner_options: Any
) -> tuple[LLMEngine, ScriptedRunner]:
    """An engine on the tier's scheduler, and its runner."""
    scripted = ScriptedTier(tier, **runner_options)
    config = config or make_scripted_config()
    if num_drafts := runner_options.get("num_drafts"):
        config = replace(config, speculative=SpeculativeConfig("ngram", num_drafts))
    engine = LLMEngine(config, scripted, NO_WEIGHTS, byte_tokenizer(), on_step)
    assert scripted.runner is not None
    return engine, scripted.runner
