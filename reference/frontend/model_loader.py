"""From options to what an engine is built of: names resolved, checkpoints opened, the configuration completed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reference.contracts.config import EngineConfig
from reference.contracts.protocols import Checkpoint, Tier
from reference.frontend.checkpoint import load_checkpoint
from reference.frontend.engine_args import EngineArgs
from reference.frontend.model_store import resolve_model


@dataclass(frozen=True)
class LoadedModel:
    """A model that a tier can run. Weights are opened, and read when the tier asks for them."""

    path: Path
    checkpoint: Checkpoint
    draft: Checkpoint | None  # of the model that guesses tokens
    config: EngineConfig


def load_model(args: EngineArgs, tier: Tier) -> LoadedModel:
    """Find the model, and fit the options to it and to the machine.

    Raises:
        ValueError: the tier cannot run here, the model cannot be found or read, or the options contradict each other.
    """
    reason = tier.why_unavailable()
    if reason is not None:
        raise ValueError(reason)
    path = resolve_model(args.model)
    checkpoint = load_checkpoint(path)
    draft = None if args.draft_model is None else load_checkpoint(resolve_model(args.draft_model))
    config = args.create_engine_config(
        checkpoint.config, tier.default_device(), None if draft is None else draft.config
    )
    return LoadedModel(path, checkpoint, draft, args.fit_to_device(config, tier, checkpoint))
