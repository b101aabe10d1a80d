import itertools

from reference.contracts.config import CacheConfig
from reference.contracts.request import EngineCoreRequest, Request
from reference.contracts.sampling_params import SamplingParams
from reference.kv_cache_manager import KVCacheManager
from tests.mutants import MUTANTS


def fresh_manager():
    numbers = itertools.count(100)

    def make_request(name, num_tokens):
        tokens = tuple(next(numbers) for _ in range(num_tokens))
        request = EngineCoreRequest(name, tokens, SamplingParams(n=2), 0, (0, 0))
        return Request.from_engine_core_request(request)

    return KVCacheManager(CacheConfig(block_size=4, num_blocks=20)), make_request


def check_it_passes_with_the_right_engine(exercise):
    exercise.test(*fresh_manager())


def check_it_fails_when_the_copy_is_appended(exercise):
    with MUTANTS["cow_appends"].planted("reference"):
        try:
            exercise.test(*fresh_manager())
        except AssertionError:
            return
    raise AssertionError("The copy was appended to the table, and your test did not notice.")


def check_it_fails_when_the_shared_block_is_written_in_place(exercise):
    with MUTANTS["shared_block_written_in_place"].planted("reference"):
        try:
            exercise.test(*fresh_manager())
        except AssertionError:
            return
    raise AssertionError("Nothing was copied at all, and your test did not notice.")
