from reference.frontend.learn import expect


def check_whole_characters_come_at_once(exercise):
    expect("deltas([b'a', b'bc'])", exercise.deltas([b"a", b"bc"]), ["a", "bc"])


def check_half_a_character_waits_for_the_rest(exercise):
    tokens = [b"caf\xc3", b"\xa9", b" \xf0\x9f", b"\x98\x80!"]
    expect("deltas of 'café 😀!' in odd pieces", exercise.deltas(tokens), ["caf", "é", " ", "😀!"])


def check_what_never_becomes_whole_is_marked_at_the_end(exercise):
    expect("deltas([b'ok', b'\\xf0\\x9f'])", exercise.deltas([b"ok", b"\xf0\x9f"]), ["ok", "\ufffd"])


def check_bytes_that_are_no_text_do_not_stop_the_stream(exercise):
    expect("deltas([b'a', b'\\xff', b'b'])", exercise.deltas([b"a", b"\xff", b"b"]), ["a", "\ufffd", "b"])
