"""Text to ids and back, special tokens, chat templates; tokenizers taken out of GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from reference.frontend.gguf_tokenizer import PRE_TOKENIZERS, write_tokenizer
from reference.frontend.model_store import ModelError, resolve_model
from reference.frontend.tokenizer import Tokenizer, load_tokenizer
from tests.tiny_gguf import CONTROL, NORMAL, write_tiny_gguf
from tests.tiny_models import make_tiny_llama

TEXTS = ["The capital", "", " tent  anon\n\n", "ünïcödé 🦙 漢字", "a\tb\r\nc", "1234 + 5"]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWINFER_HOME", str(tmp_path / "home"))
    return make_tiny_llama(tmp_path / "tiny")


def change(folder: Path, name: str, **changes: Any) -> Path:
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def chat(folder: Path, template: Any, messages: list[dict[str, str]] = QUESTION) -> str:
    return load_tokenizer(
        change(folder, "tokenizer_config.json", chat_template=template)
    ).apply_chat_template(messages)


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_the_ids_of_a_text_gives_the_text(folder: Path, text: str) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_no_bos_is_added_unless_the_model_says_so(folder: Path) -> None:
    plain = load_tokenizer(folder).encode("tent")
    assert 0 not in plain
    change(folder, "tokenizer_config.json", add_bos_token=True)
    assert load_tokenizer(folder).encode("tent") == [0, *plain]
    change(folder, "tokenizer_config.json", add_eos_token=True)
    assert load_tokenizer(folder).encode("tent") == [0, *plain, 1]


def test_a_bos_rule_in_tokenizer_json_holds_unless_the_settings_speak(folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    backend.save(str(folder / "tokenizer.json"))
    plain = load_tokenizer(folder).encode("tent")  # the settings say add_bos_token: false
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["add_bos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(folder).encode("tent") == [0, *plain]


def test_a_bos_token_that_does_not_exist_is_refused(folder: Path) -> None:
    change(folder, "tokenizer_config.json", add_bos_token=True, bos_token="<nope>")
    with pytest.raises(ModelError, match=r"lacks a token.*<nope>"):
        load_tokenizer(folder)


def test_special_tokens_are_left_out_of_the_text_on_request(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ids = [0, *tokenizer.encode("tent"), 1]
    assert tokenizer.decode(ids) == "tent"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>tent<eos>"


def test_special_tokens_and_sizes_are_known(folder: Path) -> None:
    tokenizer = load_tokenizer(change(folder, "generation_config.json", eos_token_id=[1, 7]))
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_ids == (1, 7)
    assert tokenizer.vocab_size == 320


@pytest.mark.parametrize("token_id", [-1, 320, 2**40])
def test_an_id_outside_the_vocabulary_is_a_value_error(folder: Path, token_id: int) -> None:
    with pytest.raises(ValueError, match=rf"Token id {token_id} is outside the vocabulary of 320 tokens"):
        load_tokenizer(folder).decode([5, token_id])


def test_an_id_that_only_pads_the_vocabulary_decodes_to_nothing(folder: Path) -> None:
    change(folder, "config.json", vocab_size=384)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode([*tokenizer.encode("tent"), 383]) == "tent"


@pytest.mark.parametrize(("text", "what"), [("a\ud800b", "a lone surrogate"), (3, "int"), (None, "NoneType")])
def test_a_prompt_that_is_no_text_is_a_value_error(folder: Path, text: Any, what: str) -> None:
    with pytest.raises(ValueError, match=f"valid Unicode, got {what}"):
        load_tokenizer(folder).encode(text)


def test_truncation_and_padding_left_in_tokenizer_json_are_switched_off(folder: Path) -> None:
    text = "tent anon " * 20
    expected = load_tokenizer(folder).encode(text)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(8)
    backend.enable_padding(length=500)
    backend.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).encode(text) == expected


# Chat templates


def test_a_conversation_becomes_the_text_of_the_template(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    messages = [{"role": "user", "content": "tent"}, {"role": "assistant", "content": "anon"}]
    text = "<bos>user\ntent<eos>\n<bos>assistant\nanon<eos>\n"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == text
    assert tokenizer.apply_chat_template(messages) == text + "<bos>assistant\n"


def test_the_ids_of_a_conversation_hold_the_templates_special_tokens_and_no_second_bos(folder: Path) -> None:
    change(folder, "tokenizer_config.json", add_bos_token=True)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode_chat([{"role": "user", "content": "tent"}])
    assert [i for i in ids if i < 2] == [0, 1, 0]
    assert ids[:2] == [0, tokenizer.encode("u")[1]]


def test_a_template_file_comes_before_the_settings(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("from file")
    assert load_tokenizer(folder).apply_chat_template(QUESTION) == "from file"


def test_of_several_templates_the_default_one_is_taken(folder: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert chat(folder, templates) == "plain"


def test_templates_have_the_helpers_that_hugging_face_gives_them(folder: Path) -> None:
    assert chat(folder, "{{ messages[0] | tojson }}") == json.dumps(QUESTION[0])
    assert chat(folder, "{{ '<é>' | tojson }}") == '"<é>"'
    assert (
        chat(folder, "{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 2,\n "b": 1\n}'
    )
    assert chat(folder, "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}") == "<bos>|<eos>|"
    assert (
        chat(folder, "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )
    assert chat(folder, "{% if true %}\n  {% set x = 1 %}\nx{% endif %}") == "x"
    assert len(chat(folder, "{{ strftime_now('%Y') }}")) == 4


def test_a_model_without_a_chat_template_says_so(folder: Path) -> None:
    with pytest.raises(ValueError, match="no chat template; use plain prompts"):
        chat(folder, None)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "refused the messages"),
        ("{{ messages[7]['content'] }}", "refused the messages"),
        ("{{ 1 / 0 }}", "refused the messages"),
        ("{% for %}", "cannot be parsed"),
        ("{{ 'x' * 1000 }}" * 1100, "wrote more than 1048576 characters"),
        (
            # In large pieces: on a busy machine small ones would meet the limit of time first.
            "{% for i in range(99999) %}{% for j in range(99999) %}" + "x" * 4096 + "{% endfor %}{% endfor %}",
            "wrote more than",
        ),
    ],
)
def test_a_template_that_cannot_answer_is_one_sentence(folder: Path, template: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        chat(folder, template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.system('echo') }}",
        "{{ self._TemplateReference__context.environment.globals }}",
        "{% set _ = messages.append({'role': 'system', 'content': 'x'}) %}",
        "{% set _ = messages[0].update({'content': 'x'}) %}",
    ],
)
def test_a_hostile_template_reaches_nothing_and_changes_nothing(folder: Path, template: str) -> None:
    messages = [dict(message) for message in QUESTION]
    with pytest.raises(ValueError, match="refused the messages"):
        chat(folder, template, messages)
    assert messages == QUESTION


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [["user", "x"]],
        None,
        [{"content": "x"}],
    ],
)
def test_malformed_messages_are_a_value_error(folder: Path, messages: Any) -> None:
    with pytest.raises(
        ValueError, match=r"(messages must be a non-empty list|A message needs 'role' and 'content')"
    ):
        load_tokenizer(folder).apply_chat_template(messages)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", b"", "tokenizer.json is damaged"),
        ("tokenizer.json", b'{"model": {}}', "tokenizer.json is damaged"),
        ("tokenizer.json", b"\xff\xfe", "not UTF-8"),
        ("tokenizer_config.json", b"[]", "must hold a JSON object"),
        ("tokenizer_config.json", b"{", "not valid JSON"),
        ("tokenizer_config.json", b"[" * 100_000, "not valid JSON"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template is not text"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
    ],
)
def test_a_damaged_tokenizer_is_one_sentence(
    folder: Path, name: str, content: bytes | None, sentence: str
) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=sentence) as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


# Tokenizers from GGUF files


def test_a_gguf_tokenizer_equals_the_one_it_was_made_from(folder: Path, tmp_path: Path) -> None:
    write_tiny_gguf(folder, tmp_path / "tiny.gguf")
    original, converted = load_tokenizer(folder), load_tokenizer(tmp_path / "tiny.gguf")
    for text in [*TEXTS, "<bos>tent<eos> anon"]:
        assert converted.encode(text) == original.encode(text)
        assert converted.decode(original.encode(text), False) == original.decode(original.encode(text), False)
    assert converted.apply_chat_template(QUESTION) == original.apply_chat_template(QUESTION)
    assert converted.special_ids == original.special_ids
    assert (converted.bos_token_id, converted.eos_token_ids) == (0, (1,))


def test_a_gguf_that_asks_for_bos_gets_it(folder: Path, tmp_path: Path) -> None:
    write_tiny_gguf(folder, tmp_path / "tiny.gguf", ggml__add_bos_token=True)
    assert load_tokenizer(tmp_path / "tiny.gguf").encode("tent")[0] == 0


def test_the_end_of_a_turn_ends_a_text_too(folder: Path, tmp_path: Path) -> None:
    write_tiny_gguf(folder, tmp_path / "tiny.gguf", **{"tokenizer__ggml__eot_token_id": 9})
    assert load_tokenizer(tmp_path / "tiny.gguf").eos_token_ids == (1, 9)


PIECES = [
    ("gpt-2", "    32 it's", ["ĠĠĠ", "Ġ32", "Ġit", "'s"]),
    ("smollm", "    32 it's", ["ĠĠĠĠ", "3", "2", "Ġit", "'s"]),
    ("smollm", "x1 2²", ["x", "1", "Ġ", "2", "Â²"]),
    ("llama-bpe", "    12345 IT'S\n\n x", ["ĠĠĠ", "Ġ", "123", "45", "ĠIT", "'S", "ĊĊ", "Ġx"]),
    ("qwen2", "    12345 IT'S\n\n x", ["ĠĠĠ", "Ġ", "1", "2", "3", "4", "5", "ĠIT", "'S", "ĊĊ", "Ġx"]),
]


@pytest.mark.parametrize(("pre", "text", "pieces"), PIECES)
def test_text_is_cut_as_the_pre_tokenizer_of_the_gguf_demands(pre: str, text: str, pieces: list[str]) -> None:
    assert [piece for piece, _ in PRE_TOKENIZERS[pre]().pre_tokenize_str(text)] == pieces


def gguf_tokenizer(folder: Path, extra_tokens: list[str], **metadata: Any) -> Tokenizer:
    """A tokenizer from GGUF metadata, in the folder of a tiny model."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<bos>", "<eos>", *alphabet, *extra_tokens]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 2 + [NORMAL] * (len(tokens) - 2),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 0,
    }
    write_tokenizer(values | {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}, folder)
    return load_tokenizer(folder)


def test_llama_3_adds_bos_by_default_and_takes_whole_tokens_that_no_merge_reaches(folder: Path) -> None:
    tokenizer = gguf_tokenizer(folder, ["abc"], pre="llama-bpe")
    assert tokenizer.encode("abc") == [0, 258]
    assert len(gguf_tokenizer(folder, ["abc"]).encode("abc")) == 3


def test_qwen_2_composes_characters_first(folder: Path) -> None:
    tokenizer = gguf_tokenizer(folder, [], pre="qwen2")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_tokens_defined_by_the_user_are_found_whole_and_are_text(folder: Path) -> None:
    types = [CONTROL] * 2 + [NORMAL] * 256 + [4]
    tokenizer = gguf_tokenizer(folder, ["<tool>"], token_type=types)
    assert tokenizer.encode("<tool>") == [258]
    assert 258 not in tokenizer.special_ids
    assert tokenizer.decode([258]) == "<tool>"


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"model": "llama"}, "tokenizer 'llama'.* not supported"),
        (
            {"pre": "falcon"},
            "pre-tokenizer 'falcon' is not supported; supported: 'gpt2' with 'gpt-2', 'smollm'",
        ),
        ({"pre": None}, "pre-tokenizer None is not supported"),
        ({"merges": ["q"]}, "tokenizer is damaged"),
        ({"merges": ["not there"]}, "tokenizer is damaged"),
        ({"token_type": [1]}, "tokenizer is damaged"),
        ({"bos_token_id": 10**6}, "tokenizer is damaged"),
        ({"tokens": 5}, "tokenizer is damaged"),
    ],
)
def test_a_gguf_tokenizer_that_cannot_be_rebuilt_is_refused(
    folder: Path, metadata: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        gguf_tokenizer(folder, [], **metadata)


# The embedded model


@pytest.fixture(scope="module")
def embedded() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2-135m"))


@pytest.mark.embedded
def test_the_embedded_tokenizer_splits_digits_before_anything_else(embedded: Tokenizer) -> None:
    # Plain byte-level splitting keeps one space with the number: 333 216 35 34.
    assert embedded.encode("    32") == [289, 35, 34]
    assert embedded.decode([289, 35, 34]) == "    32"


@pytest.mark.embedded
def test_the_embedded_tokenizer_knows_its_special_tokens_and_adds_none(embedded: Tokenizer) -> None:
    assert embedded.bos_token_id == 1
    assert embedded.eos_token_ids == (2,)
    assert embedded.special_ids == set(range(17))
    assert embedded.vocab_size == 49152
    assert embedded.encode("") == []
    assert embedded.encode("<|im_start|>x<|im_end|>")[::2] == [1, 2]
    assert embedded.decode([504, 3575, 282, 4649, 314, 7042, 30, 2]) == "The capital of France is Paris."


@pytest.mark.embedded
def test_a_question_to_the_embedded_model_is_37_tokens_with_the_default_system_message(
    embedded: Tokenizer,
) -> None:
    ids = embedded.encode_chat(QUESTION)
    assert len(ids) == 37
    assert ids[:4] == [1, 9690, 198, 2683]
    assert ids[-17:] == [198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    text = embedded.apply_chat_template(QUESTION)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.embedded
def test_an_own_system_message_replaces_the_default_one(embedded: Tokenizer) -> None:
    text = embedded.apply_chat_template([{"role": "system", "content": "Be brief."}, *QUESTION])
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert "SmolLM" not in text
