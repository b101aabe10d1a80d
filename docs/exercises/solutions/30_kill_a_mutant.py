"""The rule in three assertions: as long as before, another block in the last place, the first one still shared."""


def test(manager, make_request) -> None:
    parent = make_request("parent", 6)
    manager.allocate_slots(parent, 6)
    parent.num_computed_tokens = 6
    sibling = parent.fork(1)
    manager.fork(parent, sibling)
    before = manager.get_block_ids("parent")

    parent.all_token_ids.append(7)
    manager.allocate_slots(parent, 1)
    after = manager.get_block_ids("parent")
    assert len(after) == len(before)
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert manager.get_block_ids(sibling.request_id) == before
