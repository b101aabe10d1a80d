"""The reference model against transformers on the same weights, in float32.

The runner is driven without a scheduler: `Driver` writes the records of each step by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from reference.attention import AttentionMetadata
from reference.contracts.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, cdiv
from reference.contracts.noise import gumbel_noise
from reference.contracts.protocols import Checkpoint
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import (
    ModelRunnerOutput,
    NewRequestData,
    RunningRequestData,
    SchedulerOutput,
)
from reference.frontend.checkpoint import load_checkpoint
from reference.frontend.model_store import resolve_model
from reference.frontend.tokenizer import load_tokenizer
from reference.model_runner import ModelRunner
from tests.oracle.passages import PASSAGES
from tests.tiny_models import make_tiny_llama

# Logits of a tiny model are sums of 64 products with a standard deviation of 3, computed in another order than
# transformers': a few hundred roundings of 6e-8 relative each. Measured: 3e-5. A wrong head, block, position or norm
# moves them by 0.1 and more.
TINY_TOLERANCE = 1e-4
# 30 layers and logits of up to 47. Measured: 1.3e-4; the bound leaves room for another BLAS and other processors.
EMBEDDED_TOLERANCE = 2e-3

SEED = 2**63 + 7  # of every request; above the range of signed 64-bit numbers


class Driver:
    """Plays the scheduler for a runner: admits requests, hands out ascending blocks, keeps nothing cached."""

    def __init__(self, runner: ModelRunner, block_size: int) -> None:
        self.runner = runner
        self.block_size = block_size
        self.next_block = 1
        self.steps = 0
        self.tokens: dict[str, list[int]] = {}
        self.num_prompt_tokens: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, int] = {}
        self.unsent: dict[str, list[int]] = {}  # known here, not yet told to the runner
        self.params: dict[str, SamplingParams] = {}
        self.admitted: set[str] = set()

    def add(self, request_id: str, token_ids: Sequence[int], params: SamplingParams | None = None) -> None:
        self.tokens[request_id] = list(token_ids)
        self.num_prompt_tokens[request_id] = len(token_ids)
        self.params[request_id] = params or SamplingParams(temperature=0.0)
        self.computed[request_id] = self.blocks[request_id] = 0
        self.unsent[request_id] = []

    def append(self, request_id: str, token_id: int) -> None:
        """The request's next token, sampled or prescribed by the test."""
        self.tokens[request_id].append(token_id)
        self.unsent[request_id].append(token_id)

    def step(
        self, num_scheduled: dict[str, int], preempted: Sequence[str] = (), finished: Sequence[str] = ()
    ) -> ModelRunnerOutput:
        """Compute `num_scheduled` tokens of each request."""
        new, running = [], []
        self.admitted -= {*preempted, *finished}
        for request_id in preempted:
            self.computed[request_id] = self.blocks[request_id] = 0
        for request_id, count in num_scheduled.items():
            block_ids = self._take_blocks(request_id, self.computed[request_id] + count)
            if request_id in self.admitted:
                running.append(self._running(request_id, block_ids))
            else:
                new.append(self._new(request_id, block_ids))
            self.unsent[request_id] = []
        self.admitted |= num_scheduled.keys()
        self.steps += 1
        output = self.runner.execute(
            SchedulerOutput(
                self.steps, tuple(new), tuple(running), num_scheduled, tuple(preempted), tuple(finished)
            )
        )
        for request_id, count in num_scheduled.items():
            self.computed[request_id] += count
        return output

    def _take_blocks(self, request_id: str, num_tokens: int) -> tuple[int, ...]:
        missing = cdiv(num_tokens, self.block_size) - self.blocks[request_id]
        self.blocks[request_id] += missing
        self.next_block += missing
        return tuple(range(self.next_block - missing, self.next_block))

    def _new(self, request_id: str, block_ids: tuple[int, ...]) -> NewRequestData:
        return NewRequestData(
            request_id,
            tuple(self.tokens[request_id]),
            self.num_prompt_tokens[request_id],
            0,
            block_ids,
            self.params[request_id],
            seed=SEED,
        )

    def _running(self, request_id: str, block_ids: tuple[int, ...]) -> RunningRequestData:
        unsent = tuple(self.unsent[request_id])
        return RunningRequestData(request_id, unsent, block_ids, self.computed[request_id])

    def prefill(self, request_id: str, chunks: Sequence[int]) -> ModelRunnerOutput:
        """Compute the prompt chunk by chunk; every chunk but the last must sample nothing."""
        for count in chunks[:-1]:
            assert self.step({request_id: count}) == ModelRunnerOutput({}, logits={})
        return self.step({request_id: chunks[-1]})

    def generate(self, request_id: str, chunks: Sequence[int], num_tokens: int) -> list[int]:
        """Prefill in chunks, then decode, each token fed back."""
        output = self.prefill(request_id, chunks)
        for _ in range(num_tokens - 1):
            self.append(request_id, output.sampled_token_ids[request_id][0])
            output = self.step({request_id: 1})
        generated = self.tokens[request_id][self.num_prompt_tokens[request_id] :]
        return [*generated, output.sampled_token_ids[request_id][0]]


def make_runner(
    checkpoint: Checkpoint, block_size: int = 4, num_blocks: int = 256, keep_logits: bool = True
) -> ModelRunner:
    config = EngineConfig(
        model=checkpoint.config,
        cache=CacheConfig(block_size, num_blocks),
        scheduler=SchedulerConfig(max_model_len=checkpoint.config.max_position_embeddings),
        keep_logits=keep_logits,
    )
    return ModelRunner(config, checkpoint)


def make_driver(checkpoint: Checkpoint, block_size: int = 4, keep_logits: bool = True) -> Driver:
    return Driver(make_runner(checkpoint, block_size, keep_logits=keep_logits), block_size)


def row(output: ModelRunnerOutput, request_id: str = "a") -> np.ndarray:
    assert output.logits is not None
    (logits,) = output.logits[request_id]
    return logits


def whole_prefill_logits(runner: ModelRunner, token_ids: Sequence[int], block_size: int) -> np.ndarray:
    """Logits at every position of one sequence, computed in one batch: [T, V]."""
    length = len(token_ids)
    positions = np.arange(length)
    block_table = 1 + np.arange(cdiv(length, block_size), dtype=np.int32)
    metadata = AttentionMetadata(
        query_start_loc=np.array([0, length], dtype=np.int32),
        seq_lens=np.array([length], dtype=np.int32),
        block_tables=block_table[None],
        slot_mapping=block_size + positions,  # blocks 1, 2, ... lie side by side
    )
    hidden = runner.model.forward(np.array(token_ids), positions, runner.kv_caches, metadata)
    return runner.model.compute_logits(hidden)


def transformers_logits(model: LlamaForCausalLM, token_ids: Sequence[int]) -> np.ndarray:
    """The same from transformers: [T, V]."""
    with torch.inference_mode():
        logits: np.ndarray = model(torch.tensor([list(token_ids)])).logits[0].numpy()
    return logits


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, 320, count).tolist()


# Tiny random models

SHAPES = [
    pytest.param({}, id="gqa 4/2, tied"),
    pytest.param(
        {"num_heads": 9, "num_kv_heads": 3, "head_dim": 8, "hidden_size": 72, "tie": False},
        id="gqa 9/3, untied",
    ),
    pytest.param({"num_heads": 4, "num_kv_heads": 1, "head_dim": 32}, id="one KV head, wide heads"),
]


@pytest.fixture(params=SHAPES)
def tiny_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path / "tiny", **request.param)


@pytest.fixture
def tiny_oracle(tiny_folder: Path) -> LlamaForCausalLM:
    """transformers reads the folder itself, so config and tensor names are checked too."""
    return LlamaForCausalLM.from_pretrained(
        tiny_folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture
def tiny(tmp_path: Path) -> Checkpoint:
    return load_checkpoint(make_tiny_llama(tmp_path / "tiny"))


def test_logits_at_every_position_equal_those_of_transformers(
    tiny_folder: Path, tiny_oracle: LlamaForCausalLM
) -> None:
    tokens = random_tokens(90)
    expected = transformers_logits(tiny_oracle, tokens)
    assert expected.std() >= 2  # differences of 1e-4 are small only beside logits that are not
    actual = whole_prefill_logits(make_runner(load_checkpoint(tiny_folder)), tokens, block_size=4)
    assert actual.dtype == np.float32
    assert np.abs(actual - expected).max() < TINY_TOLERANCE


def test_the_last_row_of_a_chunked_prefill_equals_transformers(
    tiny_folder: Path, tiny_oracle: LlamaForCausalLM
) -> None:
    tokens = random_tokens(50)
    expected = transformers_logits(tiny_oracle, tokens)[-1]
    for block_size, chunks in ((4, [50]), (4, [20, 20, 10]), (16, [7, 1, 30, 12]), (1, [49, 1])):
        driver = make_driver(load_checkpoint(tiny_folder), block_size)
        driver.add("a", tokens)
        assert np.abs(row(driver.prefill("a", chunks)) - expected).max() < TINY_TOLERANCE


def test_every_decode_step_equals_transformers_on_the_whole_sequence(
    tiny_folder: Path, tiny_oracle: LlamaForCausalLM
) -> None:
    tokens = random_tokens(60)
    expected = transformers_logits(tiny_oracle, tokens)
    driver = make_driver(load_checkpoint(tiny_folder))
    driver.add("a", tokens[:30])
    output = driver.prefill("a", [13, 17])
    for position in range(30, 60):
        assert np.abs(row(output) - expected[position - 1]).max() < TINY_TOLERANCE
        driver.append("a", tokens[position])
        output = driver.step({"a": 1})
    assert np.abs(row(output) - expected[-1]).max() < TINY_TOLERANCE


def test_greedy_tokens_equal_those_of_transformers(tiny_folder: Path, tiny_oracle: LlamaForCausalLM) -> None:
    tokens = random_tokens(20, seed=1)
    with torch.inference_mode():
        generated = tiny_oracle.generate(
            torch.tensor([tokens]), max_new_tokens=32, min_new_tokens=32, do_sample=False, eos_token_id=None
        )
    driver = make_driver(load_checkpoint(tiny_folder))
    driver.add("a", tokens)
    assert driver.generate("a", [8, 12], 32) == generated[0, 20:].tolist()


# The runner on the default tiny model


def test_prefill_chunks_and_decodes_of_several_requests_share_a_batch(tiny: Checkpoint) -> None:
    driver = make_driver(tiny)
    alone = {}
    for request_id, length in (("a", 10), ("b", 23), ("c", 5)):
        single = make_driver(tiny)
        single.add(request_id, random_tokens(length, seed=length))
        alone[request_id] = single.generate(request_id, [length], 3)
        driver.add(request_id, random_tokens(length, seed=length))

    got: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for schedule in (
        {"a": 10},
        {"a": 1, "b": 9},
        {"a": 1, "b": 14, "c": 5},
        {"b": 1, "c": 1},
        {"c": 1, "b": 1},
    ):
        output = driver.step(schedule)
        for request_id, token_ids in output.sampled_token_ids.items():
            got[request_id] += token_ids
            driver.append(request_id, token_ids[0])
    assert got == alone


def test_a_request_that_was_preempted_goes_on_as_if_nothing_had_happened(tiny: Checkpoint) -> None:
    params = SamplingParams(temperature=1.0)  # draws depend on the output position, which must survive
    undisturbed = make_driver(tiny)
    undisturbed.add("a", random_tokens(9), params)
    expected = undisturbed.generate("a", [9], 8)

    driver = make_driver(tiny)
    driver.add("a", random_tokens(9), params)
    driver.add("b", random_tokens(3))
    got = [driver.step({"a": 9}).sampled_token_ids["a"][0]]
    for schedule in ({"a": 1}, {"a": 1}):
        driver.append("a", got[-1])
        got += driver.step(schedule).sampled_token_ids["a"]
    driver.append("a", got[-1])
    driver.step({"b": 3}, preempted=["a"])
    assert driver.runner._states.keys() == {"b"}
    assert driver.step({"a": 7}).sampled_token_ids == {}  # recomputes prompt and output, in new blocks
    got += driver.step({"a": 5}).sampled_token_ids["a"]
    while len(got) < 8:
        driver.append("a", got[-1])
        got += driver.step({"a": 1}).sampled_token_ids["a"]
    assert got == expected


def test_draws_use_the_seed_of_the_request_and_count_its_outputs_from_zero(tiny: Checkpoint) -> None:
    driver = make_driver(tiny)
    driver.add("a", random_tokens(9), SamplingParams(temperature=0.8))
    output = driver.prefill("a", [4, 5])
    for position in range(12):
        logits = row(output).astype(np.float64)
        expected = int(np.argmax(logits / 0.8 + gumbel_noise(SEED, position, len(logits))))
        assert output.sampled_token_ids == {"a": [expected]}
        driver.append("a", expected)
        output = driver.step({"a": 1})


def test_an_id_that_is_used_again_after_its_end_is_a_new_request(tiny: Checkpoint) -> None:
    fresh = make_driver(tiny)
    fresh.add("a", random_tokens(6, seed=1))
    driver = make_driver(tiny)
    driver.add("a", random_tokens(9, seed=2))
    driver.generate("a", [9], 3)
    driver.add("a", random_tokens(6, seed=1))
    output = driver.step({"a": 6}, finished=["a", "never seen"])
    assert np.abs(row(output) - row(fresh.step({"a": 6}))).max() < TINY_TOLERANCE


def test_a_step_without_tokens_only_forgets(tiny: Checkpoint) -> None:
    driver = make_driver(tiny)
    driver.add("a", random_tokens(4))
    driver.step({"a": 4})
    assert driver.step({}, finished=["a"]).sampled_token_ids == {}
    assert not driver.runner._states


def test_logits_leave_the_runner_only_when_asked_for(tiny: Checkpoint) -> None:
    driver = make_driver(tiny, keep_logits=False)
    driver.add("a", random_tokens(4))
    assert driver.step({"a": 4}).logits is None


def test_nan_ends_its_own_request_with_a_reason_and_no_other(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_tiny_llama(tmp_path / "untied", tie=False))
    healthy = make_driver(checkpoint)
    healthy.add("good", [5, 6, 7])
    expected = healthy.step({"good": 3}).sampled_token_ids

    driver = make_driver(checkpoint)
    driver.runner.model.embed_tokens = driver.runner.model.embed_tokens.copy()
    driver.runner.model.embed_tokens[9] = np.nan
    driver.add("bad", [5, 9, 7])
    driver.add("good", [5, 6, 7])
    output = driver.step({"bad": 3, "good": 3})
    assert output.sampled_token_ids == expected
    assert output.errors.keys() == {"bad"}
    assert "NaN" in output.errors["bad"]
    assert output.logits is not None
    assert output.logits.keys() == {"good"}


def test_an_unknown_architecture_is_refused_by_name() -> None:
    from reference.models import get_model_class

    with pytest.raises(ValueError, match=r"'BertModel' is not supported.*LlamaForCausalLM"):
        get_model_class("BertModel")


# The embedded model


@pytest.fixture(scope="module")
def embedded() -> Checkpoint:
    return load_checkpoint(resolve_model("smollm2-135m"))


@pytest.fixture(scope="module")
def embedded_oracle(embedded: Checkpoint) -> LlamaForCausalLM:
    """transformers' model around our own converted weights, which another test compares with its own conversion."""
    c: ModelConfig = embedded.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=c.tie_word_embeddings,
        bos_token_id=c.bos_token_id,
        eos_token_id=c.eos_token_ids[0],
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).float().eval()
    names = {name: name for name in model.state_dict()}
    if c.tie_word_embeddings:
        names["lm_head.weight"] = "model.embed_tokens.weight"
    model.load_state_dict({name: torch.tensor(embedded.tensor(source)) for name, source in names.items()})
    return model


@pytest.fixture(scope="module", params=PASSAGES)
def passage(request: pytest.FixtureRequest) -> list[int]:
    token_ids = load_tokenizer(resolve_model("smollm2-135m")).encode(PASSAGES[request.param])
    assert len(token_ids) >= 200
    return token_ids


@pytest.mark.embedded
def test_embedded_logits_at_every_position_equal_those_of_transformers(
    embedded: Checkpoint, embedded_oracle: LlamaForCausalLM, passage: list[int]
) -> None:
    actual = whole_prefill_logits(make_runner(embedded, block_size=16, num_blocks=32), passage, block_size=16)
    expected = transformers_logits(embedded_oracle, passage)
    assert np.abs(actual - expected).max() < EMBEDDED_TOLERANCE


@pytest.mark.embedded
def test_embedded_greedy_tokens_equal_those_of_transformers(
    embedded: Checkpoint, embedded_oracle: LlamaForCausalLM, passage: list[int]
) -> None:
    prompt, num_tokens = passage[:200], 24
    with torch.inference_mode():
        generated = embedded_oracle.generate(
            torch.tensor([prompt]),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
        )
    driver = make_driver(embedded, block_size=16, keep_logits=False)
    driver.add("a", prompt)
    assert driver.step({"a": 77}).sampled_token_ids == {}
    assert driver.generate("a", [123], num_tokens) == generated[0, 200:].tolist()
