"""Bugs in attention, the model runner and the sampler."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np

from tests.mutants.mutant import Plant, mutant

ATTENTION = "spec/test_attention.py"
SAMPLER = "spec/test_sampler.py"
LOGITS = "spec/test_logits.py"
RUNNERS = "differential/test_model_runner.py"
SEQUENCES = (
    "spec/test_parallel_sampling.py::test_sequence_i_has_the_tokens_of_a_request_of_its_own_with_seed_plus_i"
)


@mutant(
    "Query heads of one group stand side by side: dealt out in turn, all but the first and last read other keys.",
    [f"{ATTENTION}::test_b61_query_head_h_reads_kv_head_h_divided_by_the_group_size"],
)
def heads_dealt_out_in_turn(plant: Plant) -> None:
    @plant.override(plant.module("attention"))
    def paged_attention(original, query, k_cache, v_cache, metadata, *others):
        num_heads, num_kv_heads = query.shape[1], k_cache.shape[2]
        dealt = np.arange(num_heads).reshape(-1, num_kv_heads).T.reshape(-1)  # [H]
        output = original(query[:, dealt], k_cache, v_cache, metadata, *others)  # [T, H, D]
        return output[:, np.argsort(dealt)]


@mutant(
    "The last block is only partly filled: read to its end, a query attends to what an earlier owner left there.",
    [f"{ATTENTION}::test_ragged_chunks_and_decodes_in_one_batch_equal_the_loop_form"],
)
def last_block_read_to_its_end(plant: Plant) -> None:
    @plant.override(plant.module("attention"))
    def paged_attention(original, query, k_cache, v_cache, metadata, *others):
        block_size = k_cache.shape[1]
        whole = (metadata.seq_lens + block_size - 1) // block_size * block_size  # [S]
        return original(query, k_cache, v_cache, replace(metadata, seq_lens=whole), *others)


@mutant(
    "A copied block needs its content: with the table changed and nothing copied, a sibling reads an empty block.",
    [SEQUENCES],
)
def copies_not_made(plant: Plant) -> None:
    @plant.override(plant.module("block_transfer").BlockTransfer)
    def execute(original, self, schedule):
        original(self, replace(schedule, block_copies=()))


@mutant(
    "A draw is a function of seed, position and token: a generator with a state depends on who else is in the batch.",
    [f"{SAMPLER}::test_a_draw_does_not_depend_on_the_batch_around_it"],
)
def draws_from_a_generator_with_state(plant: Plant) -> None:
    sampler, drawn = plant.module("sampler"), count()
    if plant.tier_name == "reference":
        plant.replace(sampler, "gumbel_noise", _generator_with_state())
        return

    @plant.override(sampler.kernels)
    def sample(original, logits, temperature, top_k, top_p, min_p, seeds, output_positions, token_ids):
        for row in range(len(output_positions)):
            output_positions[row] = next(drawn)
        original(logits, temperature, top_k, top_p, min_p, seeds, output_positions, token_ids)


def _generator_with_state():
    generator = np.random.default_rng(0)
    return lambda seed, output_position, vocab_size: generator.gumbel(size=vocab_size)


@mutant(
    "Sequence i draws with seed + i: with one seed for all, n sequences are one sequence n times.",
    [SEQUENCES],
)
def one_seed_for_all_sequences(plant: Plant) -> None:
    runner = plant.module("model_runner")
    if plant.tier_name == "reference":
        plant.replace(runner, "child_seed", lambda seed, index: seed)
        return

    @plant.override(runner.ModelRunner)
    def _sampling_metadata(original, self, draws, schedule):
        return original(self, replace(draws, sequences=np.zeros_like(draws.sequences)), schedule)


@mutant(
    "Output positions are counted from 0 on both tiers: from 1, every draw is another one, and as random as before.",
    [f"{RUNNERS}::test_seeded_sampling_draws_the_same_tokens_for_every_kind_of_parameters"],
)
def positions_counted_from_one(plant: Plant) -> None:
    @plant.override(plant.module("model_runner").ModelRunner)
    def _sampling_metadata(original, self, *arguments):
        metadata = original(self, *arguments)
        return replace(metadata, output_positions=metadata.output_positions + 1)


@mutant(
    "top_p keeps the token that reaches it: without that one the nucleus holds less than it was asked for.",
    [f"{SAMPLER}::test_the_nucleus_is_the_smallest_prefix_that_reaches_top_p"],
    tiers=("reference",),
)
def nucleus_without_its_last_token(plant: Plant) -> None:
    @plant.override(plant.module("sampler"))
    def _nucleus_size(original, z, top_p):
        return max(original(z, top_p) - 1, 1)


@mutant(
    "Presence and frequency look at the output only: counting the prompt too punishes the words of the question.",
    [f"{LOGITS}::test_b27_presence_and_frequency_look_at_the_output_only"],
)
def prompt_penalised(plant: Plant) -> None:
    sampler = plant.module("sampler")
    if plant.tier_name == "reference":

        @plant.override(sampler)
        def process_logits(original, logits, params, prompt, output, *others):
            return original(logits, params, prompt, [*prompt, *output], *others)

        return

    @plant.override(sampler.ProcessedRow)
    def __post_init__(original, self):
        original(self)
        self._seen.add(self.prompt_token_ids, 1)


@mutant(
    "A request that left must leave its row: its rules would be applied to the next one of the same name.",
    [f"{RUNNERS}::test_an_id_that_is_used_again_without_rules_is_not_processed"],
    tiers=("fast",),
)
def rules_outlive_their_request(plant: Plant) -> None:
    @plant.override(plant.module("input_batch").InputBatch)
    def _remove(original, self, request_id):
        rules = self.processed.get(request_id)
        original(self, request_id)
        if rules is not None:
            self.processed[request_id] = rules
