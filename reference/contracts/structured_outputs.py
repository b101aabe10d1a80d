"""What shape an answer must have. Names are vLLM's (`vllm/sampling_params.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Exactly one of the first five; the whole text of the answer obeys it.

    Args:
        json: a JSON schema, as a table or as text; kept as text, so that the parameters can be compared and hashed.
        regex: a regular expression that the text matches from its beginning to its end.
        choice: the text is one of these.
        grammar: a context-free grammar in Lark's notation, or in llama.cpp's (GBNF).
        json_object: the text is any JSON object.
        disable_any_whitespace: JSON without spaces and line breaks between its parts, which small models may repeat
            until `max_tokens` is reached; only with `json` or `json_object`.

    Raises:
        ValueError: none or several are given, or a value is of the wrong type. Whether a schema, an expression or a
            grammar can be compiled is found out when a request is submitted.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, "must be true or false", getattr(self, name))
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs needs exactly one of {', '.join(KINDS)}; got {' and '.join(given) or 'none'}."
            )
        if self.disable_any_whitespace and given[0] not in ("json", "json_object"):
            raise ValueError(
                f"structured_outputs.disable_any_whitespace is about JSON; leave it out beside {given[0]}."
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        if self.choice is not None:
            if not isinstance(self.choice, list | tuple) or not self.choice:
                raise _invalid("choice", "must be a list of at least one text", self.choice)
            for text in self.choice:
                _check_text("choice", text)
            object.__setattr__(self, "choice", tuple(self.choice))

    def to_json(self) -> dict[str, Any]:
        """The table that `from_json` reads, defaults left out."""
        table = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return table | ({"json": json.loads(table["json"])} if "json" in table else {})

    @classmethod
    def from_json(cls, table: object) -> StructuredOutputsParams:
        """From a JSON table, in which null means absent.

        Raises:
            ValueError: it is no table, has an unknown name, or its content is not acceptable.
        """
        if not isinstance(table, Mapping):
            raise ValueError(
                f"structured_outputs must be a table such as {{'regex': '...'}}, got {table!r:.100}."
            )
        known = {f.name for f in fields(cls)}
        for name in table:
            if name not in known:
                raise ValueError(
                    f"Unknown name {name!r:.100} in structured_outputs; known are {', '.join(KINDS)}."
                )
        return cls(**{name: value for name, value in table.items() if value is not None})


def _invalid(name: str, rule: str, value: object) -> ValueError:
    return ValueError(f"structured_outputs.{name} {rule}, got {value!r:.100}.")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise _invalid(name, "must be a text that is not empty", value)
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair has no UTF-8
        raise _invalid(name, "must be valid Unicode", value) from None


def _schema_text(schema: object) -> str:
    """A schema in one spelling. The order of its properties stays: it is that of the answer's."""
    try:
        table = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(table, Mapping):
            return json.dumps(table, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"structured_outputs.json is no valid JSON ({error}).") from error
    raise _invalid("json", "must be a JSON schema, which is a table", schema)
