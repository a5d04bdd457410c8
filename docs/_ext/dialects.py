"""Requests and responses of each HTTP dialect; docs/engine/2-targets.md shows the first.

python docs/_ext/dialects.py            # prints all
python docs/_ext/dialects.py --write    # puts the first into the page
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lfm2np.oracle.engines.dialects import DIALECTS
from lfm2np.oracle.engines.dialects.dialect import Dialect
from lfm2np.oracle.engines.records import changed, greedy

PAGE = Path(__file__).parents[1] / "engine" / "2-targets.md"
BEGIN = "<!-- made by docs/_ext/dialects.py --write -->"
END = "<!-- end of what is made -->"
MOST_COLUMNS = 110
WORDS = {
    "token_ids": "token ids",
    "logprobs": "log-probabilities",
    "top_logprobs": "top log-probabilities",
    "prompt_logprobs": "prompt log-probabilities",
    "text": "text",
    "finish_reason": "finish reason",
    "routes": "expert routing",
    "prompt": "prompt (compared)",
    "prompt_tokens": "prompt length (compared)",
    "new_tokens": "new tokens (compared)",
}
REQUEST = greedy("", (1, 17, 42), 16, prompt_text="The cat", prompt_logprobs=0)


def made() -> str:
    return "\n".join([BEGIN, "", *described(DIALECTS[0]), END])


def described(dialect: Dialect) -> Iterator[str]:
    yield f"**{dialect.name}**: `POST {dialect.path}`"
    yield from ("", "```json", *packed(dialect.request(REQUEST, dialect.extras[0])), "```", "")
    if more := added(dialect):
        kinds = "a stop string or a seed" if dialect.takes_seeds else "a stop string"
        yield from (f"With {kinds}: `{json.dumps(more)}`.", "")
    yield from ("| response | in | as |", "|---|---|---|")
    for field in dialect.fields:
        yield f"| {WORDS[field.says]} | `{field.path}` | {field.form} |"
    if dialect.cached:
        yield f"| tokens from the cache | `{'.'.join(map(str, dialect.cached))}` | number |"
    asked = [f"`{place.path[0]}` of `GET {place.url}`" for place in (dialect.version, dialect.slots) if place]
    yield from ("", f"Also requested: {' and '.join(asked)}.", "") if asked else ("",)


def packed(fields: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """JSON, as many fields on a line as fit."""
    line = indent + "{"
    for name, value in fields.items():
        end = "}" if name == list(fields)[-1] else ","
        if isinstance(value, dict):
            nested = list(packed(value, indent + " "))
            yield from (f'{line} "{name}":', *nested[:-1])
            line = nested[-1] + end
            continue
        word = f'"{name}": {json.dumps(value)}{end}'
        if len(line) + len(word) > MOST_COLUMNS:
            yield line
            line = indent
        line += ("" if line.endswith("{") else " ") + word
    yield line


def added(dialect: Dialect) -> dict[str, object]:
    """Fields of a request with a stop string and a seed that others have not, or have otherwise."""
    params: dict[str, object] = {"stop": " sat"} if dialect.takes_stops else {}
    params |= {"seed": 1, "temperature": 1.0} if dialect.takes_seeds else {}
    plain, drawn = (dialect.request(each, dialect.extras[0]) for each in (REQUEST, changed(REQUEST, **params)))
    for name, value in plain.items():
        if isinstance(value, dict):
            plain, drawn = value, drawn[name]
    return {name: value for name, value in drawn.items() if plain.get(name) != value}


def main() -> None:
    if sys.argv[1:] != ["--write"]:
        sys.stdout.write("\n".join(line for dialect in DIALECTS for line in described(dialect)) + "\n")
        return
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + made() + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
