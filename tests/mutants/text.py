"""Bugs in the front end, which is written once for both tiers: text, stop strings, endings."""

from __future__ import annotations

from reference.frontend.detokenizer import IncrementalDetokenizer
from reference.frontend.output_processor import OutputProcessor
from tests.mutants.mutant import SHARED, Plant, mutant

DETOKENIZER = "spec/test_detokenizer.py"


@mutant(
    "What may become a stop string is held back: streamed at once, its beginning cannot be taken back.",
    [f"{DETOKENIZER}::test_b35_the_beginning_of_a_stop_string_is_never_streamed"],
    tiers=SHARED,
)
def stop_strings_not_held_back(plant: Plant) -> None:
    @plant.override(IncrementalDetokenizer)
    def take_delta(original, self, finished):
        self._num_held_back = 0
        return original(self, finished)


@mutant(
    "A token is not a piece of text: decoded alone, half a character is garbage and a word may lose its space.",
    [
        f"{DETOKENIZER}::test_the_concatenated_deltas_are_the_full_decode",
        f"{DETOKENIZER}::test_8627_chinese_text_has_no_replacement_character",
        f"{DETOKENIZER}::test_spaces_between_words_survive_a_decoder_that_strips_the_first",
    ],
    tiers=SHARED,
)
def tokens_decoded_alone(plant: Plant) -> None:
    @plant.override(IncrementalDetokenizer)
    def _decode(original, self, end, final):
        start, self._read_offset = self._read_offset, end
        searched = len(self.text)
        self.text += self.tokenizer.decode(self.token_ids[start:end], self.params.skip_special_tokens)
        self._find_stop_string(searched)


@mutant(
    "Half a character at the end is shown as the full decode shows it: kept back for good, the text loses a character.",
    [
        f"{DETOKENIZER}::test_b37_a_character_cut_at_the_end_is_flushed_as_the_full_decode_shows_it",
        f"{DETOKENIZER}::test_a_request_that_ends_without_a_last_token_shows_what_was_held_back",
    ],
    tiers=SHARED,
)
def half_character_dropped(plant: Plant) -> None:
    @plant.override(IncrementalDetokenizer)
    def _decode(original, self, end, final):
        original(self, end, False)


@mutant(
    "The stop string that is completed first wins: by its place in the list, the text goes on behind another.",
    [f"{DETOKENIZER}::test_the_stop_string_that_is_completed_first_wins_whatever_its_place_in_the_list"],
    tiers=SHARED,
)
def first_stop_string_in_the_list_wins(plant: Plant) -> None:
    @plant.override(IncrementalDetokenizer)
    def _find_stop_string(original, self, searched):
        for stop in self.params.stop_strings:
            start = self.text.find(stop, max(searched - len(stop) + 1, 0))
            if start >= 0:
                self.stop_string = stop
                self.text = self.text[: start + len(stop) * self.params.include_stop_str_in_output]
                return


@mutant(
    "Only the front end sees text: unless it tells the engine, a request goes on behind its stop string unseen.",
    [
        "spec/test_output_processor.py::test_55_a_stop_string_ends_the_request_and_the_engine_is_told_to_abort_it"
    ],
    tiers=SHARED,
)
def engine_not_told_of_stop_strings(plant: Plant) -> None:
    @plant.override(OutputProcessor)
    def process_outputs(original, self, news):
        outputs, _ = original(self, news)
        return outputs, []
