"""Random workloads by seed: few prompts over few tokens, tight pools, every option and every sampling parameter."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from reference.contracts.config import cdiv
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.structured_outputs import StructuredOutputsParams
from reference.frontend.workload import Workload, WorkloadRequest

MAX_MODEL_LEN = 128


@dataclass(frozen=True)
class Space:
    """What workloads are drawn from. Few prompts over few tokens, so that prefixes are shared."""

    vocab_size: int = 320
    block_sizes: tuple[int, ...] = (1, 4, 16)
    budgets: tuple[int, ...] = (8, 24, 64)  # tokens a step, with chunked prefill
    num_requests: tuple[int, int] = (3, 8)
    shared: tuple[int, int] = (0, 20)  # tokens of a prompt that others may begin with too
    max_own: int = 16  # tokens behind them
    # Shared tokens more for some workloads: contexts then pass the 64 keys that attention kernels take at a time.
    stretches: tuple[int, ...] = (0, 0, 40)
    max_tokens: tuple[int, int] = (1, 24)
    pools: tuple[float, ...] = (1, 1.25, 3)  # times what the longest request needs
    num_allowed: int = 150  # of allowed_token_ids
    speculators: tuple[str, ...] = (
        "",
        "",
        "ngram",
        "draft",
        "target",
    )  # "target": the model as its own draft model
    bytes_per_token: int = 512  # of K and V, about: for host pools too small for every victim

    @property
    def longest(self) -> int:
        return self.shared[1] + self.max_own + self.max_tokens[1]


TINY = Space()
# A tenth of a second a step on the reference tier, and a second a prompt: few and short requests.
EMBEDDED = Space(
    vocab_size=49_152,
    block_sizes=(16,),
    budgets=(16, 48),
    num_requests=(3, 4),
    shared=(12, 34),
    max_own=14,
    stretches=(0,),
    max_tokens=(6, 12),
    pools=(1, 1, 1.5),
    num_allowed=2_000,
    speculators=("", "ngram"),
    bytes_per_token=46_080,
)


def make_workload(seed: int, space: Space = TINY) -> Workload:
    """The workload of a seed. Each part has a generator of its own: what is drawn anew changes nothing else."""
    stretch = random.Random(f"stretch of {seed}").choice(space.stretches)
    space = replace(space, shared=(space.shared[0], space.shared[1] + stretch))
    config = draw_config(seed, space)
    prompts = random.Random(f"prompts of {seed}")
    shared = [prompts.randrange(2, space.vocab_size - 20) for _ in range(space.shared[1])]
    requests = []
    for i in range(prompts.randint(*space.num_requests)):
        own = [prompts.randrange(2, space.vocab_size - 20) for _ in range(prompts.randint(1, space.max_own))]
        when = random.Random(f"arrival {i} of {seed}")
        requests.append(
            WorkloadRequest(
                f"r{i}",
                prompt_token_ids=(*shared[: prompts.randint(*space.shared)], *own),
                arrival_step=when.randint(0, 8),
                abort_step=when.randint(9, 20) if when.random() < 0.15 else None,
                priority=when.randint(0, 2),
                cache_salt=when.choice([None, None, "s"]),
                params=draw_params(seed, i, space),
            )
        )
    return Workload(tuple(requests), config)


def draw_config(seed: int, space: Space) -> dict[str, Any]:
    """Engine options; the pool is anything from "just fits one" to ample."""
    rng = random.Random(f"pool of {seed}")
    block_size = rng.choice(space.block_sizes)
    least = cdiv(space.longest, block_size)
    chunked = rng.random() < 0.8
    config: dict[str, Any] = {
        "block_size": block_size,
        "num_blocks": 1 + int(least * rng.choice(space.pools)),
        "max_num_seqs": rng.randint(2, 6),
        "max_num_batched_tokens": rng.choice(space.budgets) if chunked else MAX_MODEL_LEN,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": rng.random() < 0.7,
        "long_prefill_token_threshold": rng.choice([0, 0, 6]),
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "max_model_len": MAX_MODEL_LEN,
        "seed": seed,
    }
    for name, options in (
        ("max_num_partial_prefills", [0, 0, 1, 2]),
        ("preemption_mode", ["recompute", "swap"]),
    ):
        config[name] = random.Random(f"{name} of {seed}").choice(options)
    speculative = draw_speculative(random.Random(f"speculative of {seed}"), space)
    if speculative is not None:
        config["speculative"] = speculative
    if config["preemption_mode"] == "swap" and rng.random() < 0.4:
        config["swap_space"] = rng.choice([0, 4, 8]) * block_size * space.bytes_per_token
    return config


def draw_speculative(rng: random.Random, space: Space) -> dict[str, Any] | None:
    """Who guesses; a draft model is named "draft" or "target", see `with_models`."""
    speculator, num_tokens = rng.choice(space.speculators), rng.choice([1, 3, 5])
    if speculator == "ngram":
        return {"method": "ngram", "num_speculative_tokens": num_tokens, "prompt_lookup_min": 1}
    if speculator:
        num_blocks = rng.choice([60, 400])  # of one token or more: short now and then
        return {
            "method": "draft_model",
            "model": speculator,
            "num_speculative_tokens": num_tokens,
            "num_blocks": num_blocks,
        }
    return None


def with_models(workload: Workload, target: str, draft: str | None) -> Workload:
    """Put real draft models in place of their names; without a smaller model "draft" is the model itself too."""
    speculative = workload.config.get("speculative", {})
    names = {"target": target, "draft": draft or target}
    if speculative.get("model") not in names:
        return workload
    speculative = {**speculative, "model": names[speculative["model"]]}
    return replace(workload, config={**workload.config, "speculative": speculative})


def draw_params(seed: int, index: int, space: Space) -> SamplingParams:
    rng = random.Random(f"params {index} of {seed}")
    max_tokens = rng.randint(*space.max_tokens)
    return SamplingParams(
        temperature=0.0 if rng.random() < 0.4 else rng.choice([0.5, 1.0, 1.5]),
        top_k=rng.choice([0, 0, 1, 20]),
        top_p=rng.choice([1.0, 1.0, 0.7]),
        seed=100 * index,
        n=rng.choice([1, 1, 1, 2, 4]),
        max_tokens=max_tokens,
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, None, None, 0, 3]),
        prompt_logprobs=2 if random.Random(f"scored {index} of {seed}").random() < 0.15 else None,
        **draw_rules(random.Random(f"rules {index} of {seed}"), max_tokens, space),
    )


def draw_rules(rng: random.Random, max_tokens: int, space: Space) -> dict[str, Any]:
    """What changes logits before temperature, and what ends a request early: nothing for half of the requests."""
    token_ids = range(2, space.vocab_size)
    rules: dict[str, Any] = {
        "min_p": rng.choice([0.02, 0.2]),
        "repetition_penalty": rng.choice([1.3, 0.8]),
        "presence_penalty": rng.choice([0.9, -0.5]),
        "frequency_penalty": rng.choice([0.6, -0.3]),
        "logit_bias": {rng.choice(token_ids): rng.uniform(-8, 8) for _ in range(4)},
        "allowed_token_ids": rng.sample(token_ids, space.num_allowed),
        "bad_words": rng.choice([["e", "to"], ["\u00ff"], ["an er"]]),
        "min_tokens": rng.randint(1, max_tokens),
        "stop": rng.choice([["e"], ["a", "\u00e9t"], ["0", "or"]]),
        "stop_token_ids": rng.sample(token_ids, 20),
        "structured_outputs": StructuredOutputsParams(
            **rng.choice([{"regex": "[a-f]{3,9}"}, {"choice": ["abc", "abd", "xyz"]}])
        ),
    }
    chosen = rng.sample(sorted(rules), rng.choice([0, 0, 0, 1, 2, 5]))
    if "structured_outputs" in chosen:  # a grammar and these together may leave no token, which is refused
        chosen = [name for name in chosen if name not in ("allowed_token_ids", "bad_words", "min_tokens")]
    return {name: rules[name] for name in chosen}
