"""Both model runners on the same hand-made schedules: equal tokens, logits and KV caches after every step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fast.model_runner import ModelRunner as FastModelRunner
from reference.contracts.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, cdiv
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import (
    ModelRunnerOutput,
    NewRequestData,
    RunningRequestData,
    SchedulerOutput,
)
from reference.model_runner import ModelRunner as ReferenceModelRunner
from tests.tiny_models import make_tiny_llama, random_llama_weights

BLOCK_SIZE = 4
NUM_BLOCKS = 64
MAX_NUM_SEQS = 6
MAX_MODEL_LEN = 80

# float32 keeps 6e-8; sums of up to 128 products and 2 layers at logits of about 10 leave a few 1e-5.
TOLERANCE = 1e-4

GREEDY = SamplingParams(temperature=0.0)
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_ids=(),
)


class RandomCheckpoint:
    """A checkpoint in memory, read-only as a mapped file is."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.config = config
        self.weights = random_llama_weights(vars(config), seed)
        for weight in self.weights.values():
            weight.setflags(write=False)

    def tensor(self, name: str) -> np.ndarray:
        return self.weights[name]

    def packed_tensor(self, name: str) -> None:
        """Asks for the float32 numbers."""

    def check_all_used(self) -> None:
        pass


Scheduled = tuple[NewRequestData | RunningRequestData, int]  # what the runner is told, tokens to compute


def make_schedule(
    *work: Scheduled, preempted: Sequence[str] = (), finished: Sequence[str] = ()
) -> SchedulerOutput:
    return SchedulerOutput(
        step=0,
        scheduled_new_reqs=tuple(data for data, _ in work if isinstance(data, NewRequestData)),
        scheduled_running_reqs=tuple(data for data, _ in work if isinstance(data, RunningRequestData)),
        num_scheduled_tokens={data.request_id: num_tokens for data, num_tokens in work},
        preempted_req_ids=tuple(preempted),
        finished_req_ids=tuple(finished),
    )


def new_request(
    request_id: str,
    token_ids: Sequence[int],
    block_ids: Sequence[int],
    *,
    num_tokens: int | None = None,
    num_computed_tokens: int = 0,
    num_prompt_tokens: int | None = None,
    params: SamplingParams = GREEDY,
    seed: int = 0,
) -> Scheduled:
    """Computes all of `token_ids` unless `num_tokens` says how many."""
    data = NewRequestData(
        request_id=request_id,
        token_ids=tuple(token_ids),
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        block_ids=tuple(block_ids),
        sampling_params=params,
        seed=seed,
    )
    return data, len(token_ids) - num_computed_tokens if num_tokens is None else num_tokens


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(2, MODEL.vocab_size, length)]


def ids_of(output: ModelRunnerOutput) -> dict[str, list[list[int]]]:
    """The tokens whose probabilities are told, most probable first."""
    return {name: [[each.token_id for each in at] for at in told] for name, told in output.logprobs.items()}


class Twins:
    """Both runners, fed alike and compared after every step.

    It remembers what the next delta of a request must say.
    """

    def __init__(
        self, model: ModelConfig = MODEL, checkpoint: RandomCheckpoint | None = None, **options: Any
    ) -> None:
        checkpoint, config = checkpoint or RandomCheckpoint(model), make_config(model, **options)
        self.reference = ReferenceModelRunner(config, checkpoint)
        self.fast = FastModelRunner(config, checkpoint)
        self.num_computed: dict[str, int] = {}
        self.unsent: dict[str, list[int]] = {}  # sampled, not yet part of a delta
        self.outputs: dict[str, list[int]] = {}
        self.broken_blocks: set[int] = set()  # not compared

    def next(self, request_id: str, *, blocks: Sequence[int] = (), num_tokens: int = 1) -> Scheduled:
        """The request goes on where it stood: one decode, or the next chunk of its prompt."""
        tokens = tuple(self.unsent.pop(request_id, ()))
        delta = RunningRequestData(request_id, tokens, tuple(blocks), self.num_computed[request_id])
        return delta, num_tokens

    def step(
        self, *work: Scheduled, preempted: Sequence[str] = (), finished: Sequence[str] = ()
    ) -> ModelRunnerOutput:
        schedule = make_schedule(*work, preempted=preempted, finished=finished)
        expected, actual = self.reference.execute(schedule), self.fast.execute(schedule)
        assert actual.sampled_token_ids == expected.sampled_token_ids
        assert actual.sibling_token_ids == expected.sibling_token_ids
        assert actual.errors == expected.errors
        assert ids_of(actual) == ids_of(expected)
        self._assert_logits_agree(actual.logits or {}, expected.logits or {})
        self._assert_caches_agree()
        for data, num_tokens in work:
            self.num_computed[data.request_id] = data.num_computed_tokens + num_tokens
        for request_id, token_ids in actual.sampled_token_ids.items():
            self.unsent[request_id] = token_ids
            self.outputs.setdefault(request_id, []).extend(token_ids)
        return actual

    def _assert_caches_agree(self) -> None:
        compared = [block for block in range(NUM_BLOCKS) if block not in self.broken_blocks]
        for expected_pair, actual_pair in zip(self.reference.kv_caches, self.fast.kv_caches, strict=True):
            for expected_cache, actual_cache in zip(expected_pair, actual_pair, strict=True):
                assert_close(actual_cache.numpy()[compared], expected_cache[compared])

    def _assert_logits_agree(self, actual: dict[str, Any], expected: dict[str, Any]) -> None:
        assert actual.keys() == expected.keys()
        for request_id, row in expected.items():
            assert row.std() > 1.5, "logits this flat would make any two runners agree"
            assert_close(actual[request_id], row)


def make_config(model: ModelConfig = MODEL, **options: Any) -> EngineConfig:
    return EngineConfig(
        model=model,
        cache=CacheConfig(BLOCK_SIZE, NUM_BLOCKS),
        scheduler=SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS),
        **{"keep_logits": True, **options},
    )


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.fixture
def twins() -> Twins:
    return Twins()


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"tie_word_embeddings": False},
        {"num_key_value_heads": 4},
        {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 24},
        {"num_hidden_layers": 3, "intermediate_size": 96, "vocab_size": 259},
    ],
    ids=["grouped", "untied", "one_kv_head_each", "multi_query_wide_heads", "odd_vocab"],
)
def test_a_greedy_request_decodes_alike_on_models_of_several_shapes(shape: dict[str, Any]) -> None:
    twins = Twins(replace(MODEL, **shape))
    token_ids = [token % 259 for token in prompt(9)]
    twins.step(new_request("a", token_ids, [7, 2, 5]))
    for position in range(9, 29):
        grown = [63 - position] if position >= 12 and position % BLOCK_SIZE == 0 else []
        twins.step(twins.next("a", blocks=grown))
    assert len(twins.outputs["a"]) == 21


def test_seeded_sampling_draws_the_same_tokens_for_every_kind_of_parameters(twins: Twins) -> None:
    kinds = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=2.0, top_k=40, top_p=0.9),
        SamplingParams(temperature=1e-6, top_p=0.5),
        SamplingParams(temperature=5.0, top_k=10_000),
    ]
    seeds = [0, 1, 2**63, 2**64 - 1, 4, -5]
    names = [f"r{i}" for i in range(len(kinds))]
    twins.step(
        *(
            new_request(name, prompt(5), [3 * i + 1, 3 * i + 2, 3 * i + 3], params=kinds[i], seed=seeds[i])
            for i, name in enumerate(names)
        )
    )
    for _ in range(7):
        twins.step(*map(twins.next, names))
    assert len({tuple(output) for output in twins.outputs.values()}) == len(kinds)


def test_rows_with_and_without_sampling_rules_draw_the_same_tokens_and_hand_out_the_models_logits(
    twins: Twins,
) -> None:
    kinds = [
        SamplingParams(temperature=1.5, min_p=0.05, repetition_penalty=1.4, presence_penalty=0.5),
        GREEDY,
        SamplingParams(
            temperature=0, frequency_penalty=0.7, logit_bias={7: 9.0}, min_tokens=6, stop_token_ids=[7]
        ),
        SamplingParams(allowed_token_ids=list(range(0, 320, 2))).resolved((), [[4], [6, 8]]),
        SamplingParams(temperature=0, repetition_penalty=1.4, logit_bias={9: 100}),
    ]
    names = [f"r{i}" for i in range(len(kinds))]
    twins.step(
        *(
            new_request(name, prompt(5), [4 * i + j for j in range(1, 5)], params=kinds[i], seed=i)
            for i, name in enumerate(names)
        )
    )
    for _ in range(4):
        twins.step(*map(twins.next, names))
    # One leaves, and the last row moves into the hole; another resumes with prompt and output in one list.
    output = twins.outputs["r2"][:4]
    twins.unsent.pop("r2")
    twins.step(twins.next("r4"), twins.next("r3"), preempted=["r2"], finished=["r0"])
    twins.step(new_request("r2", prompt(5) + output, [40, 41, 42], num_prompt_tokens=5, params=kinds[2]))
    for _ in range(3):
        twins.step(twins.next("r2"), twins.next("r3"), twins.next("r4"))
    assert 7 not in output
    assert all(token % 2 == 0 and token != 4 for token in twins.outputs["r3"])


def test_an_id_that_is_used_again_without_rules_is_not_processed(twins: Twins) -> None:
    rules = SamplingParams(temperature=0, allowed_token_ids=[9])
    assert twins.step(new_request("a", prompt(5), [1, 2], params=rules)).sampled_token_ids == {"a": [9]}
    output = twins.step(new_request("a", prompt(5), [3, 4]), finished=["a"])
    assert output.sampled_token_ids != {"a": [9]}


def test_masks_that_leave_no_token_are_an_error_of_their_request_on_both_tiers(twins: Twins) -> None:
    rules = SamplingParams(allowed_token_ids=[9]).resolved((), [[9]])
    output = twins.step(
        new_request("a", prompt(5), [1, 2], params=rules), new_request("b", prompt(6), [3, 4])
    )
    assert output.sampled_token_ids.keys() == {"b"}
    assert "left no token" in output.errors["a"]


def test_a_prefill_chunk_and_decodes_share_a_step_and_the_chunk_samples_nothing(twins: Twins) -> None:
    twins.step(new_request("a", prompt(6), [9, 4]))
    output = twins.step(
        twins.next("a"),
        new_request("b", prompt(23, seed=1), [30, 11, 12], num_tokens=10),
        new_request("c", prompt(3, seed=2), [5]),
    )
    assert output.sampled_token_ids.keys() == {"a", "c"}
    output = twins.step(twins.next("a"), twins.next("b", blocks=[2, 50, 6], num_tokens=13), twins.next("c"))
    assert output.sampled_token_ids.keys() == {"a", "b", "c"}


def test_a_lone_prefill_chunk_produces_no_token_and_no_logits(twins: Twins) -> None:
    output = twins.step(new_request("a", prompt(20), [3, 1], num_tokens=7))
    assert output == ModelRunnerOutput(sampled_token_ids={}, logits={})


def test_a_step_without_work_produces_nothing(twins: Twins) -> None:
    twins.step(new_request("a", prompt(5), [3, 1]))
    assert twins.step(finished=("a",)).sampled_token_ids == {}


def test_requests_that_leave_from_the_middle_do_not_disturb_the_others(twins: Twins) -> None:
    sampled = SamplingParams(temperature=1.0)
    twins.step(
        *(
            new_request(name, prompt(2 + 3 * i, seed=i), range(8 * i + 1, 8 * i + 9), seed=i, params=params)
            for i, (name, params) in enumerate(zip("abcdef", [GREEDY, sampled] * 3, strict=True))
        )
    )
    twins.step(*map(twins.next, "acdef"), finished=("b",))
    twins.step(*map(twins.next, "cef"), finished=("d", "a"))
    twins.step(*map(twins.next, "cef"))
    twins.step(*map(twins.next, "ce"), finished=("f",))
    late = new_request("g", prompt(7, seed=7), [63, 62], params=sampled)
    twins.step(*map(twins.next, "ec"), late)
    output = twins.step(*map(twins.next, "gce"))
    assert output.sampled_token_ids.keys() == {"c", "e", "g"}


def test_an_id_that_is_used_again_starts_from_nothing(twins: Twins) -> None:
    twins.step(new_request("a", prompt(11), [3, 1, 8]), new_request("b", prompt(4), [4, 5]))
    output = twins.step(new_request("a", prompt(3, seed=5), [2]), twins.next("b"), finished=("a",))
    assert output.sampled_token_ids.keys() == {"a", "b"}


def test_a_request_that_ended_before_it_was_ever_scheduled_is_ignored(twins: Twins) -> None:
    twins.step(new_request("a", prompt(5), [3, 1]), finished=("never seen",))
    assert len(twins.step(twins.next("a"), finished=("also not seen",)).sampled_token_ids["a"]) == 1


def test_a_running_request_that_a_step_leaves_out_goes_on_later(twins: Twins) -> None:
    work = (
        new_request("a", prompt(5), [3, 1, 20]),
        new_request("b", prompt(13, seed=1), [4, 5, 6, 7]),
        new_request("c", prompt(2, seed=2), [8, 9]),
    )
    twins.step(*work)
    twins.step(*map(twins.next, "ac"))
    twins.step(twins.next("c"))
    twins.step(*map(twins.next, "bca"))
    assert [len(twins.outputs[name]) for name in "abc"] == [3, 2, 4]

    undisturbed = Twins()
    undisturbed.step(*work)
    for _ in range(3):
        undisturbed.step(*map(undisturbed.next, "abc"))
    for name in "abc":
        assert undisturbed.outputs[name][: len(twins.outputs[name])] == twins.outputs[name]


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=1.0, top_p=0.95)], ids=["greedy", "sampled"]
)
def test_a_preempted_request_that_comes_back_in_other_blocks_draws_the_same_tokens(
    params: SamplingParams,
) -> None:
    token_ids = prompt(10)

    def start(twins: Twins) -> None:
        twins.step(
            new_request("other", prompt(3, seed=1), [1, 2, 3, 4]),
            new_request("a", token_ids, [5, 6, 7, 8], params=params, seed=3),
        )
        for _ in range(3):
            twins.step(*map(twins.next, ["other", "a"]))

    undisturbed, twins = Twins(), Twins()
    for each in (undisturbed, twins):
        start(each)
    for _ in range(3):
        undisturbed.step(*map(undisturbed.next, ["other", "a"]))

    twins.step(twins.next("other"), preempted=("a",))
    known = token_ids + twins.outputs["a"]
    resumed = new_request("a", known, [40, 30, 20, 10], num_prompt_tokens=10, params=params, seed=3)
    twins.step(twins.next("other"), resumed)
    twins.step(*map(twins.next, ["other", "a"]))
    twins.step(twins.next("a"))
    assert twins.outputs == undisturbed.outputs


def test_a_request_may_hit_blocks_that_another_fills_in_the_same_step(twins: Twins) -> None:
    shared, rest = prompt(8), prompt(5, seed=1)
    twins.step(
        new_request("a", shared + rest, [10, 3, 7, 2]),
        new_request("b", shared + rest[:3], [10, 3, 30], num_computed_tokens=8),
    )
    twins.step(*map(twins.next, "ab"))
    alone = Twins()
    alone.step(new_request("b", shared + rest[:3], [1, 2, 3]))
    alone.step(alone.next("b"))
    assert twins.outputs["b"] == alone.outputs["b"]


def test_chunking_a_prompt_does_not_change_the_tokens(twins: Twins) -> None:
    token_ids = prompt(17)
    twins.step(new_request("whole", token_ids, [1, 2, 3, 4, 5]))
    twins.step(new_request("chunks", token_ids, [21], num_tokens=3))
    twins.step(twins.next("chunks", blocks=[19, 25, 13], num_tokens=13), twins.next("whole"))
    twins.step(twins.next("chunks", blocks=[60]))
    twins.step(twins.next("chunks"))
    assert twins.outputs["chunks"] == twins.outputs["whole"]


@pytest.mark.parametrize("order", ["abcd", "dcba", "bdac"])
def test_results_do_not_depend_on_the_order_of_the_rows(order: str) -> None:
    params = {"a": GREEDY, "b": SamplingParams(temperature=1.0), "c": SamplingParams(top_k=3), "d": GREEDY}
    work = {
        name: new_request(name, prompt(4 + 2 * i, seed=i), range(5 * i + 1, 5 * i + 6), params=params[name])
        for i, name in enumerate("abcd")
    }

    def run(runner_order: str) -> tuple[Twins, ModelRunnerOutput]:
        twins = Twins()
        for name in runner_order:  # admitted one by one: this is the order of the rows
            twins.step(work[name])
        for _ in range(4):
            output = twins.step(*map(twins.next, "abcd"))
        return twins, output

    (expected, expected_last), (actual, actual_last) = run("abcd"), run(order)
    assert actual.outputs == expected.outputs
    assert actual_last.logits is not None
    assert expected_last.logits is not None
    for name in "abcd":
        assert_close(actual_last.logits[name], expected_last.logits[name])


def test_nan_logits_end_their_own_request_and_no_other() -> None:
    model = replace(MODEL, tie_word_embeddings=False)
    checkpoint = RandomCheckpoint(model)
    embedding = checkpoint.weights["model.embed_tokens.weight"].copy()
    embedding[300] = np.nan
    checkpoint.weights["model.embed_tokens.weight"] = embedding
    twins = Twins(model, checkpoint)
    # The reference multiplies masked values by 0, so a NaN reaches the earlier tokens of its own request too.
    twins.broken_blocks = {3}
    healthy = [token for token in prompt(6) if token != 300]
    output = twins.step(
        new_request("a", healthy, [1, 2]),
        new_request("broken", [5, 300, 7], [3], params=SamplingParams(temperature=1.0)),
        new_request("b", healthy[:2], [4]),
    )
    assert output.errors.keys() == {"broken"}
    assert "NaN" in output.errors["broken"]
    assert output.sampled_token_ids.keys() == {"a", "b"}
    output = twins.step(*map(twins.next, "ba"), finished=("broken",))
    assert output.sampled_token_ids.keys() == {"a", "b"}


def test_logits_are_handed_out_only_when_asked_for() -> None:
    schedule = make_schedule(new_request("a", prompt(5), [1, 2]))
    checkpoint = RandomCheckpoint(MODEL)
    silent = FastModelRunner(make_config(keep_logits=False), checkpoint).execute(schedule)
    assert silent.logits is None
    spoken = FastModelRunner(make_config(), checkpoint).execute(schedule)
    assert spoken.logits is not None
    assert spoken.logits["a"].shape == (1, MODEL.vocab_size)
    assert [int(spoken.logits["a"].argmax())] == silent.sampled_token_ids["a"]


def test_logits_are_written_only_of_rows_that_somebody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {
        "greedy": GREEDY,
        "drawn": SamplingParams(temperature=1.0),
        "pressed": SamplingParams(temperature=0, repetition_penalty=1.4),
        "told": SamplingParams(temperature=0, logprobs=3),
        "three": SamplingParams(temperature=0, n=3),
        "two": SamplingParams(temperature=1.0, n=2),
    }
    twins, written = Twins(keep_logits=False), []
    logits_of = twins.fast._logits

    def noting(hidden: torch.Tensor) -> torch.Tensor:
        written.append(len(hidden))
        return logits_of(hidden)

    monkeypatch.setattr(twins.fast, "_logits", noting)
    born = twins.step(
        *(
            new_request(name, prompt(5), [4 * i + j for j in range(1, 5)], params=params, seed=i)
            for i, (name, params) in enumerate(kinds.items())
        )
    )
    assert len(born.sibling_token_ids["three"]) == 2
    assert born.logprobs.keys() == {"told"}
    for _ in range(3):
        twins.step(*map(twins.next, kinds))
    assert written == [4] * 4  # of six rows: drawn, pressed, told, two
    twins.step(*map(twins.next, ("greedy", "three")))
    assert written == [4] * 4


def test_an_unknown_device_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="device: expected 'cuda', or 'simt'.*got 'tpu'"):
        FastModelRunner(make_config(device="tpu"), RandomCheckpoint(MODEL))


def test_an_unknown_architecture_is_refused_by_both_runners_in_the_same_sentence() -> None:
    model = replace(MODEL, architecture="MambaForCausalLM")
    sentences = set()
    for runner in (ReferenceModelRunner, FastModelRunner):
        with pytest.raises(ValueError, match="'MambaForCausalLM' is not supported") as error:
            runner(make_config(model), RandomCheckpoint(MODEL))
        sentences.add(str(error.value))
    assert len(sentences) == 1


def test_a_run_imports_no_compiler_and_no_transformers(tmp_path: Path) -> None:
    # Each takes about a second, which every start of the program would pay.
    folder = make_tiny_llama(tmp_path)
    code = f"""
import sys
from fast import LLM, SamplingParams
LLM(model={str(folder)!r}).generate("a b", SamplingParams(temperature=0.5, max_tokens=3), use_tqdm=False)
print(sorted({{"torch._dynamo", "torch._inductor", "sympy", "transformers"}} & sys.modules.keys()))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


class RandomSchedules:
    """A careless scheduler: legal schedules in which everything happens often, blocks in random order."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.twins = Twins()
        self.free_blocks = list(range(1, NUM_BLOCKS))
        self.tokens: dict[str, list[int]] = {}  # prompt and output of every living request
        self.params: dict[str, SamplingParams] = {}
        self.num_prompt: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.running: list[str] = []
        self.waiting: list[str] = []

    def take_blocks(self, name: str, num_tokens: int) -> list[int]:
        missing = max(0, cdiv(num_tokens, BLOCK_SIZE) - len(self.tables.get(name, [])))
        taken = [self.free_blocks.pop(self.rng.integers(len(self.free_blocks))) for _ in range(missing)]
        self.tables.setdefault(name, []).extend(taken)
        return taken

    def drop(self, probability: float) -> list[str]:
        """Running requests, at random, that lose their blocks now."""
        names = [name for name in self.running if self.rng.random() < probability]
        for name in names:
            self.running.remove(name)
            self.free_blocks += self.tables.pop(name)
        return names

    def arrive(self, name: str) -> None:
        self.tokens[name] = prompt(int(self.rng.integers(1, 20)), seed=int(self.rng.integers(1000)))
        self.num_prompt[name] = len(self.tokens[name])
        kinds = [
            GREEDY,
            SamplingParams(temperature=0.9),
            SamplingParams(temperature=1.5, top_k=20, top_p=0.9),
        ]
        self.params[name] = kinds[self.rng.integers(len(kinds))]
        self.waiting.append(name)

    def admit(self, name: str) -> Scheduled:
        tokens = self.tokens[name]
        num_tokens = int(self.rng.integers(1, len(tokens) + 1))
        table = self.take_blocks(name, num_tokens)
        self.running.append(name)
        return new_request(
            name,
            tokens,
            table,
            num_tokens=num_tokens,
            num_prompt_tokens=self.num_prompt[name],
            params=self.params[name],
            seed=self.num_prompt[name],
        )

    def go_on(self, name: str) -> Scheduled:
        computed = self.twins.num_computed[name]
        num_tokens = int(self.rng.integers(1, len(self.tokens[name]) - computed + 1))
        blocks = self.take_blocks(name, computed + num_tokens)
        return self.twins.next(name, blocks=blocks, num_tokens=num_tokens)

    def step(self) -> None:
        finished, preempted = self.drop(0.04), self.drop(0.05)
        finished += [name for name in self.running if len(self.tokens[name]) > 36]
        for name in set(finished) & set(self.running):
            self.running.remove(name)
            self.free_blocks += self.tables.pop(name)
        self.waiting += preempted
        for name in preempted:
            self.twins.unsent.pop(name, None)
        work = [self.go_on(name) for name in self.rng.permutation(self.running) if self.rng.random() < 0.8]
        while self.waiting and len(self.running) < MAX_NUM_SEQS and self.rng.random() < 0.6:
            work.append(self.admit(self.waiting.pop()))
        output = self.twins.step(*work, preempted=preempted, finished=finished)
        for name, sampled in output.sampled_token_ids.items():
            self.tokens[name] += sampled


@pytest.mark.parametrize("seed", range(4))
def test_random_schedules_of_chunks_decodes_preemptions_and_departures_agree(seed: int) -> None:
    schedules = RandomSchedules(seed)
    for step in range(60):
        if step % 4 == 0:
            schedules.arrive(f"r{step}")
        schedules.step()
    assert sum(map(len, schedules.twins.outputs.values())) > 60
