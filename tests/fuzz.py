"""Random whole runs: reference = fast = cold oracle, and what fails is made small.

The cold oracle is each sequence alone on the reference tier: no cache, no chunks, no company, no drafts, an ample pool.
A workload that fails is written as a JSONL file, which replays with

    twinfer diff FILE              both tiers in lockstep: where do they part
    python -m tests.fuzz FILE      the whole check, cold oracle included
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from reference.contracts.config import EngineConfig, cdiv
from reference.contracts.protocols import Tier
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from reference.frontend.diff import compare_tiers
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.outputs import CompletionOutput
from reference.frontend.tiers import load_tier
from reference.frontend.workload import Workload, WorkloadRequest, read_workload, run_workload, write_workload

MAX_MODEL_LEN = 128
# For failures to be replayed; git ignores it.
FUZZ_DIR = Path(os.environ.get("TWINFER_FUZZ_DIR") or Path(__file__).parent.parent / ".fuzz")


@dataclass(frozen=True)
class Space:
    """What workloads are drawn from. Few prompts over few tokens, so that prefixes are shared."""

    vocab_size: int = 320
    block_sizes: tuple[int, ...] = (1, 4, 16)
    budgets: tuple[int, ...] = (8, 24, 64)  # tokens a step, with chunked prefill
    num_requests: tuple[int, int] = (3, 8)
    shared: tuple[int, int] = (0, 20)  # tokens of a prompt that others may begin with too
    max_own: int = 16  # tokens behind them
    max_tokens: tuple[int, int] = (1, 24)
    pools: tuple[float, ...] = (1, 1.25, 3)  # times what the longest request needs
    num_allowed: int = 150  # of allowed_token_ids
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
    max_tokens=(6, 12),
    pools=(1, 1, 1.5),
    num_allowed=2_000,
    bytes_per_token=46_080,
)


def make_workload(seed: int, space: Space = TINY) -> Workload:
    """The workload of a seed. Each part has a generator of its own: what is drawn anew changes nothing else."""
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
    if config["preemption_mode"] == "swap" and rng.random() < 0.4:
        config["swap_space"] = rng.choice([0, 4, 8]) * block_size * space.bytes_per_token
    return config


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
    }
    chosen = rng.sample(sorted(rules), rng.choice([0, 0, 0, 1, 2, 5]))
    return {name: rules[name] for name in chosen}


class DisagreementError(AssertionError):
    """Two of the three, reference, fast and cold oracle, do not agree."""


# Path -> the share of workloads that must take it: a run that does not proves nothing.
FLOORS = {"preempted": 0.3, "cached": 0.3, "swapped": 0.1, "copied": 0.1, "aborted": 0.1}


@dataclass
class Paths:
    """What happened in a run."""

    taken: set[str] = field(default_factory=set)  # names of FLOORS
    num_tokens: int = 0
    num_excused: int = 0

    def watch(self, schedule: SchedulerOutput, output: ModelRunnerOutput) -> None:
        sampled = output.sampled_token_ids
        happened = {
            "preempted": schedule.preempted_req_ids,
            "swapped": schedule.swap_outs,
            "copied": schedule.block_copies,
            "cached": any(new.num_cached_tokens for new in schedule.scheduled_new_reqs),
            "accepted drafts": any(
                len(sampled.get(request_id, ())) > 1 for request_id in schedule.scheduled_spec_decode_tokens
            ),
        }
        self.taken |= {name for name, it in happened.items() if it}


class _WatchedRunner:
    def __init__(self, runner: Any, tier: WatchedTier) -> None:
        self._runner = runner
        self._tier = tier

    def execute(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        self._tier.scheduler.check_integrity()
        output: ModelRunnerOutput = self._runner.execute(schedule)
        self._tier.paths.watch(schedule, output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class WatchedTier:
    """A tier whose runner notes which paths the scheduler took, and checks its invariants in every step."""

    def __init__(self, tier: Tier, paths: Paths) -> None:
        self._tier = tier
        self.paths = paths
        self.scheduler: Any = None

    def make_scheduler(self, config: EngineConfig) -> Any:
        self.scheduler = self._tier.make_scheduler(config)
        return self.scheduler

    def make_model_runner(self, *args: Any) -> Any:
        return _WatchedRunner(self._tier.make_model_runner(*args), self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)


def check_workload(model: str, workload: Workload) -> Paths:
    """Compare both tiers step by step, and each sequence with its cold oracle.

    Raises:
        DisagreementError: with a sentence that says where.
        ValueError: the workload is not acceptable.
    """
    paths = Paths()
    tiers = (WatchedTier(load_tier("reference"), Paths()), WatchedTier(load_tier("fast"), paths))
    report = compare_tiers(tiers, model, workload)  # type: ignore[arg-type]
    if report.divergence is not None:
        raise DisagreementError(f"the tiers part: {report.divergence}")
    for tier in tiers:
        if tier.scheduler.snapshot().cache.ref_counts:
            raise DisagreementError(f"the {tier.name} tier holds blocks for nobody")
    paths.num_tokens, paths.num_excused = report.num_tokens, len(report.excused)
    excused = {each.request_id for each in report.excused}
    for request in workload.requests:
        for output in report.finished[request.request_id].outputs:
            if output.finish_reason == "abort":
                paths.taken.add("aborted")
            if not excused:
                _compare_with_cold(model, request, output)
    return paths


def _compare_with_cold(model: str, request: WorkloadRequest, output: CompletionOutput) -> None:
    cold = cold_output(model, request, output.index)
    names: tuple[str, ...] = ("token_ids", "text", "finish_reason", "stop_reason")
    if output.finish_reason == "abort":  # it came so far and no further
        cold = replace(cold, token_ids=cold.token_ids[: len(output.token_ids)])
        names = ("token_ids",)
    for name in names:
        if getattr(cold, name) != getattr(output, name):
            raise DisagreementError(
                f"{name} of {request.request_id}, sequence {output.index}: {getattr(cold, name)!r} alone, but both "
                f"tiers say {getattr(output, name)!r}"
            )


def cold_output(model: str, request: WorkloadRequest, index: int) -> CompletionOutput:
    """One of the n sequences, generated as a request of its own."""
    assert request.params.seed is not None
    params = replace(request.params, n=1, seed=request.params.seed + index)
    alone = Workload((WorkloadRequest("alone", prompt_token_ids=request.prompt_token_ids, params=params),))
    return run_workload(_cold_engine(model), alone)["alone"].outputs[0]


@cache
def _cold_engine(model: str) -> LLMEngine:
    """One for all requests of a model: without a cache, and empty between them, it remembers nothing."""
    args = EngineArgs(model=model, enable_prefix_caching=False, max_num_seqs=1, max_model_len=MAX_MODEL_LEN)
    engine = LLMEngine.from_engine_args(args, load_tier("reference"))
    engine.log_stats = False
    return engine


def check_seeds(model_of: Callable[[int], str], seeds: Iterable[int], space: Space = TINY) -> list[Paths]:
    """Check the workloads of some seeds; a failure is made small, written down, and reported with its replay."""
    paths = []
    for seed in seeds:
        workload, model = make_workload(seed, space), model_of(seed)
        try:
            paths.append(check_workload(model, workload))
        except Exception as error:
            path = write_failure(f"workload-{seed}", model, shrink(workload, lambda w: fails(model, w)))  # noqa: B023
            raise AssertionError(
                f"Workload {seed}: {error}\nMade small, it is {path}; replay it with\n  twinfer diff {path}\n"
                f"or, with the cold oracle, python -m tests.fuzz {path}"
            ) from error
    return paths


def assert_paths_were_taken(paths: list[Paths], floors: dict[str, float] = FLOORS) -> None:
    """Each path in its share of the workloads, and no more excused tokens than one in 100,000."""
    shares = {name: sum(name in each.taken for each in paths) / len(paths) for name in floors}
    missed = {
        name: f"{shares[name]:.0%} of {least:.0%}" for name, least in floors.items() if shares[name] < least
    }
    assert not missed, f"the workloads do not go where they should: {missed}"
    num_tokens, num_excused = sum(each.num_tokens for each in paths), sum(each.num_excused for each in paths)
    print(f"{len(paths)} workloads, {num_tokens} tokens, {num_excused} excused")
    assert num_excused <= num_tokens / 100_000


def fails(model: str, workload: Workload) -> bool:
    """Whether the check of a workload fails. One that cannot even be run has not failed."""
    try:
        check_workload(model, workload)
    except ValueError:
        return False
    except Exception:
        return True
    return False


def shrink(workload: Workload, fails: Callable[[Workload], bool], max_checks: int = 400) -> Workload:
    """A small workload that still fails: fewer requests first, then simpler ones, then default options.

    Greedy, as in Zeller and Hildebrandt's "Simplifying and isolating failure-inducing input" (2002): the first smaller
    workload that fails takes the place of the failing one, until none does.
    """
    candidates = smaller_workloads(workload)
    for _ in range(max_checks):
        smaller = next(candidates, None)
        if smaller is None:
            break
        if fails(smaller):
            workload, candidates = smaller, smaller_workloads(smaller)
    return workload


def smaller_workloads(workload: Workload) -> Iterator[Workload]:
    """Workloads that differ from this one in one step towards nothing, largest steps first."""
    requests = workload.requests
    size = len(requests) // 2
    while size:
        for start in range(0, len(requests), size):
            yield replace(workload, requests=requests[:start] + requests[start + size :])
        size //= 2
    for index, request in enumerate(requests):
        for simpler in simpler_requests(request):
            yield replace(workload, requests=(*requests[:index], simpler, *requests[index + 1 :]))
    for name in workload.config:
        yield replace(workload, config={k: v for k, v in workload.config.items() if k != name})


def simpler_requests(request: WorkloadRequest) -> Iterator[WorkloadRequest]:
    prompt = request.prompt_token_ids or ()
    half = len(prompt) // 2
    if half:
        yield replace(request, prompt_token_ids=prompt[:half])
        yield replace(request, prompt_token_ids=prompt[half:])
        yield replace(request, prompt_token_ids=prompt[:-1])
    plain = WorkloadRequest(request.request_id)
    for name in ("abort_step", "arrival_step", "priority", "cache_salt"):
        if getattr(request, name) != getattr(plain, name):
            yield replace(request, **{name: getattr(plain, name)})
    params, defaults = request.params, SamplingParams()
    if params.max_tokens is not None and params.max_tokens > 1:
        for fewer in (params.max_tokens // 2, params.max_tokens - 1):
            yield replace(
                request, params=replace(params, max_tokens=fewer, min_tokens=min(params.min_tokens, fewer))
            )
    for each in fields(SamplingParams):
        if each.init and each.name not in ("max_tokens", "seed"):
            default = getattr(defaults, each.name)
            if getattr(params, each.name) != default:
                yield replace(request, params=replace(params, **{each.name: default}))


def write_failure(name: str, model: str, workload: Workload) -> Path:
    """Write a workload, and the model too if it is a folder that will soon be gone."""
    FUZZ_DIR.mkdir(parents=True, exist_ok=True)
    if Path(model).is_dir():
        kept = FUZZ_DIR / f"{name}-model"
        shutil.copytree(model, kept, dirs_exist_ok=True)
        model = str(kept.resolve())
    path = (FUZZ_DIR / f"{name}.jsonl").resolve()
    write_workload(replace(workload, config={**workload.config, "model": model}), path)
    return path


def main(arguments: list[str]) -> int:
    """Check the workload files that are named, cold oracle included."""
    for path in map(Path, arguments):
        workload = read_workload(path)
        config = dict(workload.config)
        paths = check_workload(config.pop("model"), replace(workload, config=config))
        print(f"{path}: equal; {', '.join(sorted(paths.taken)) or 'nothing special'} on the way")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
