from reference.frontend.learn import expect


def check_without_a_stop_everything_is_sent_as_it_comes(exercise):
    expect("stream(['Hel', 'lo'], [])", exercise.stream(["Hel", "lo"], []), ["Hel", "lo"])


def check_what_may_become_a_stop_string_is_held_back(exercise):
    expect("stream(['ab', 'cE', 'ND'], ['END'])", exercise.stream(["ab", "cE", "ND"], ["END"]), ["ab", "c"])


def check_what_did_not_become_one_is_sent(exercise):
    expect("stream(['aE', 'Nx'], ['END'])", exercise.stream(["aE", "Nx"], ["END"]), ["a", "ENx"])


def check_the_rest_is_sent_at_the_end(exercise):
    expect("stream(['aEN'], ['END'])", exercise.stream(["aEN"], ["END"]), ["a", "EN"])


def check_the_earliest_stop_string_in_the_text_wins(exercise):
    got = exercise.stream(["one two three"], ["three", "two"])
    expect("stream(['one two three'], ['three', 'two'])", got, ["one "])


def check_a_stop_string_over_three_pieces(exercise):
    expect("stream(['x<', '/', 's>y'], ['</s>'])", exercise.stream(["x<", "/", "s>y"], ["</s>"]), ["x"])
