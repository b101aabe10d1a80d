"""Write the test that catches a planted bug.

Somebody has changed the engine: copy-on-write puts the copy at the *end* of the block table instead of in the place of
the shared block (the article's version). Write a test of `KVCacheManager` that passes with the right engine and fails
(an `assert`) with the wrong one. `manager` has blocks of 4 tokens; `make_request(name, num_tokens)` gives a request
whose tokens no other has. Useful: manager.allocate_slots(request, num_new_tokens), manager.fork(parent, sibling),
request.fork(1), request.num_computed_tokens, manager.get_block_ids(name).
"""

HINTS = (
    "Allocate 6 tokens for a parent, mark them computed, fork a sibling: equal tables, half full at the end.",
    "Append a token to the parent (request.all_token_ids.append) and allocate one slot: now it must copy.",
    "How long are the two tables, and in which entry do they differ?",
)


def test(manager, make_request) -> None:
    raise NotImplementedError
