import numpy as np

from reference.attention import AttentionMetadata
from reference.attention import paged_attention as of_the_engine


def make(seq_len, block_size, seed):
    rng = np.random.default_rng(seed)
    num_blocks, head_dim = 12, 8
    caches = [rng.normal(size=(num_blocks, block_size, head_dim)).astype(np.float32) for _ in range(2)]
    table = rng.permutation(np.arange(1, num_blocks))[: -(-seq_len // block_size)].tolist()
    return rng.normal(size=head_dim).astype(np.float32), *caches, table


def answer_of_the_engine(query, k_cache, v_cache, table, seq_len, scale):
    metadata = AttentionMetadata(
        query_start_loc=np.array([0, 1], np.int32),
        seq_lens=np.array([seq_len], np.int32),
        block_tables=np.array([table], np.int32),
        slot_mapping=np.array([0], np.int64),
    )
    return of_the_engine(query[None, None], k_cache[:, :, None], v_cache[:, :, None], metadata, scale)[0, 0]


def check_a_sequence_of_one_token_gives_its_value(exercise):
    query, k_cache, v_cache, table = make(1, 4, 0)
    got = exercise.paged_attention(query, k_cache, v_cache, table, 1, 0.35)
    assert np.allclose(got, v_cache[table[0], 0], atol=1e-6), "softmax of one score is 1"


def check_it_agrees_with_the_engine(exercise):
    for seq_len in (2, 4, 5, 17, 32):
        query, k_cache, v_cache, table = make(seq_len, 4, seq_len)
        wanted = answer_of_the_engine(query, k_cache, v_cache, table, seq_len, 8**-0.5)
        got = exercise.paged_attention(query, k_cache, v_cache, table, seq_len, 8**-0.5)
        error = np.abs(got - wanted).max()
        assert error < 1e-5, f"With {seq_len} tokens the result is off by {error}."


def check_what_lies_behind_the_last_token_is_not_read(exercise):
    query, k_cache, v_cache, table = make(6, 4, 9)
    wanted = exercise.paged_attention(query, k_cache, v_cache, table, 6, 0.35)
    k_cache[table[-1], 2:], v_cache[table[-1], 2:] = 100.0, 100.0
    got = exercise.paged_attention(query, k_cache, v_cache, table, 6, 0.35)
    assert np.array_equal(got, wanted), "The slots behind token 5 have changed the result."
