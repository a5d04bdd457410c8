"""An engine's recorded answers compared with a vector set, without NumPy and without the model.

    python vectors_plain.py vectors.json answers.jsonl --format bfloat16

One file that needs the standard library only, for copying into an engine's CI beside a vector set. One answer a line:
{"id": a vector's id, "token_ids": [...], "logprobs": [...]}, with log-probabilities if the engine reports them, or
{"id": ..., "error": why there is none}. A vector that was run in several ways may have several lines. An answer that a
script's steps gave has the script's id, too: {"id": ..., "script": ..., "token_ids": [...]}.

With b a bound of the format (a standard deviation, stored in the set), and u one unit in the last place of the largest
logit in that format and `float32_units` in float32, a difference x is more than the format explains if
x > u + limit * b; the set contains limit and float32_units.

EXACT         the expected token; its log-probability, if reported, is off by no more than that
TIE           another token, whose logit is behind by no more than that
DRIFT         a log-probability that is further off
BUG           a token that is further behind, more tokens than expected, or a log-probability above 0.01 (rounding may
              lift a certain token's above 0), infinite or no number (Python writes NaN and Infinity); also -Infinity
              where at least -16 is expected, a probability that every format holds
INCONCLUSIVE  no answer, fewer tokens than expected, not one log-probability for each token (null is none), one of
              -Infinity, which is left of a probability that a format can't hold, or a token that the set can't judge

After a token that is not the expected one the context differs, so the rest is not judged; a script feeds the expected
tokens, so all of its are. Scripts without any answer are named as not run. Exit code: 0 right, 1 wrong, 2 inconclusive,
3 could not run, or the output can't be written.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

EXACT, TIE, DRIFT, BUG, INCONCLUSIVE = "EXACT", "TIE", "DRIFT", "BUG", "INCONCLUSIVE"
TOKENS_ONLY = "tokens only: no log-probabilities were reported, and errors that change no token can't be seen"
FORMAT_VERSION = 4
ROUNDING = 0.01  # may lift a log-probability above 0
HELD = -16.0  # from here on every format holds a probability: float16's least is exp(-16.6)
FIELDS = {  # of an answer: types of its items if it is a list, and what is expected
    "id": (None, "text"),
    "script": (None, "text"),
    "token_ids": ((int,), "a list of whole numbers"),
    "logprobs": ((int, float, type(None)), "a list of numbers"),
    "error": (None, "text"),
}


class PlainError(Exception):
    """A file that can't be read, is no vector set, or has no answers to it."""


class Judged(NamedTuple):
    """One position of one answer; `position` is None where a whole answer is missing."""

    id: str  # of the vector, behind the script's if there is one: script/vector
    position: int | None
    verdict: str
    detail: str

    @property
    def where(self) -> str:
        return self.id if self.position is None else f"{self.id} position {self.position}"


def judge(document: dict[str, Any], answers: list[dict[str, Any]], format_name: str) -> list[Judged]:
    """All positions that can be judged, in the order of the answers, then the vectors without any.

    PlainError for an unknown format or id, and for a document that is no vector set.
    """
    try:
        if format_name not in document["formats"]:
            raise PlainError(f"format {format_name!r}: expected one of {', '.join(document['formats'])}")
        vectors, scripts = {vector["id"]: vector for vector in document["vectors"]}, vectors_by_script(document)
        if len(vectors) < len(document["vectors"]):
            raise PlainError("not a sound vector set: two vectors have one id")
        judged: list[Judged] = []
        for number, answer in enumerate(answers, 1):
            script = answer.get("script")
            if answer["id"] not in vectors:
                raise PlainError(f"answer {number}: id {answer['id']!r} is not in the vector set")
            if script is not None and answer["id"] not in scripts.get(script, ()):
                raise PlainError(f"answer {number}: the set has no script {script!r} with {answer['id']!r}")
            judged += judge_answer(vectors[answer["id"]], answer, format_name, document)
        skipped = not_run(document, answers)
        expected = [
            *vectors,
            *(f"{script}/{id}" for script in scripts if script not in skipped for id in scripts[script]),
        ]
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as problem:
        raise PlainError(f"not a sound vector set: {type(problem).__name__}: {problem}") from None
    answered = set(map(name_of, answers))
    return judged + [Judged(name, None, INCONCLUSIVE, "not answered") for name in expected if name not in answered]


def vectors_by_script(document: Mapping[str, Any]) -> dict[str, list[str]]:
    """The ids of the vectors in each script."""
    return {
        script["id"]: list(dict.fromkeys(row["id"] for step in script["steps"] for row in step["rows"]))
        for script in document["scripts"]
    }


def not_run(document: Mapping[str, Any], answers: list[dict[str, Any]]) -> list[str]:
    """Scripts without any answer."""
    begun = {answer.get("script") for answer in answers}
    return [script["id"] for script in document["scripts"] if script["id"] not in begun]


def name_of(answer: Mapping[str, Any]) -> str:
    script = answer.get("script")
    return str(answer["id"]) if script is None else f"{script}/{answer['id']}"


def judge_answer(
    vector: dict[str, Any], answer: dict[str, Any], format_name: str, rules: Mapping[str, Any]
) -> list[Judged]:
    """Up to the first token that is not the expected one; of a script all."""
    name, expected, tokens = name_of(answer), vector["token_ids"], answer.get("token_ids") or []
    if answer.get("error") is not None or not tokens:
        return [Judged(name, None, INCONCLUSIVE, one_line(answer.get("error") or "no token_ids"))]
    logprobs = answer.get("logprobs")
    if logprobs is not None and len(logprobs) != len(tokens):
        words = f"logprobs: {len(logprobs)} for {len(tokens)} token_ids, expected one each"
        return [Judged(name, None, INCONCLUSIVE, words)]
    if logprobs is not None and None in logprobs:
        words = f"logprobs[{logprobs.index(None)}]: null, expected a finite number"
        return [Judged(name, None, INCONCLUSIVE, words)]
    if len(tokens) > len(expected):
        return [Judged(name, None, BUG, f"{len(tokens)} tokens, {len(expected)} were asked for")]
    judged = []
    for index, token in enumerate(tokens):
        logprob = None if logprobs is None else logprobs[index]
        verdict, detail = judge_token(vector["positions"][index], token, logprob, format_name, rules)
        judged.append(Judged(name, index, verdict, detail))
        if token != expected[index] and answer.get("script") is None:
            return judged
    if len(tokens) < len(expected):
        judged.append(Judged(name, len(tokens), INCONCLUSIVE, f"{len(tokens)} tokens, expected {len(expected)}"))
    return judged


def judge_token(
    position: dict[str, Any], token: int, logprob: float | None, format_name: str, rules: Mapping[str, Any]
) -> tuple[str, str]:
    """Verdict and detail. A likely token's error is that of the expected one minus that of their difference, so its
    standard deviation is at most the sum of the two."""
    if logprob is not None and (math.isnan(logprob) or logprob == math.inf):
        return BUG, f"log-probability {logprob} of token {token}: expected a finite number"
    if logprob is not None and logprob > ROUNDING:
        return BUG, f"log-probability {logprob:.9g} of token {token}: expected at most 0"
    top = position["top"]  # [id, log-probability, logit], best first
    behind, allowed = [top[0][2] - logit for _, _, logit in top], allowances(position, format_name, rules)
    rank = next((rank for rank, entry in enumerate(top) if entry[0] == token), None)
    if rank is None:
        if behind[-1] <= allowed[-1]:
            return INCONCLUSIVE, f"token {token} is none of the {len(top)} likeliest, and the last of them may tie"
        return BUG, f"token {token}, expected {top[0][0]}: it is none of the {len(top)} likeliest"
    if rank and behind[rank] > allowed[rank]:
        explanation = f"its logit is {behind[rank]:.6g} behind, {format_name} explains {allowed[rank]:.2g}"
        return BUG, f"token {token}, expected {top[0][0]}: {explanation}"
    if logprob == -math.inf and top[rank][1] >= HELD:
        return BUG, f"log-probability {logprob} of token {token}: expected {top[rank][1]:.9g}"
    if logprob == -math.inf:
        return INCONCLUSIVE, f"log-probability {logprob} of token {token}: the engine's format could not hold it"
    if logprob is not None:
        error = abs(logprob - top[rank][1])
        explained = allowed[rank] + rules["limit"] * position["noise"][format_name]["logprob"]
        explained += math.ldexp(rules["model"]["vocab_size"], -25)  # a float32 sum loses terms below 2**-25 of it
        if error > explained:
            explanation = f"off by {error:.3g}, {format_name} explains {explained:.2g}"
            return DRIFT, f"log-probability {logprob:.9g} of token {token}, expected {top[rank][1]:.9g}: {explanation}"
    return (TIE, f"token {token} for {top[0][0]}, {behind[rank]:.3g} behind") if rank else (EXACT, "")


def allowances(position: Mapping[str, Any], format_name: str, rules: Mapping[str, Any]) -> list[float]:
    """How far the logit of each token of `top` may be behind the first's by rounding alone; for the first, u.

    `rules` are the set's formats, limit and float32_units.
    """
    exponent, bits = math.frexp(position["largest_logit"])[1], rules["formats"][format_name]["bits"]
    unit = math.ldexp(1.0, exponent - bits) + rules["float32_units"] * math.ldexp(1.0, exponent - 24)
    return [unit + rules["limit"] * gap for gap in (0.0, *position["noise"][format_name]["gaps"])]


def result(judged: list[Judged]) -> int:
    """The exit code."""
    verdicts = {position.verdict for position in judged}
    return 1 if verdicts & {BUG, DRIFT} else 2 if INCONCLUSIVE in verdicts or not verdicts else 0


def summary(judged: list[Judged], answers: list[dict[str, Any]]) -> str:
    verdicts = [position.verdict for position in judged]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in (EXACT, TIE, DRIFT, BUG) if verdict in verdicts]
    counts += [f"{verdicts.count(INCONCLUSIVE)} not judged"] * (INCONCLUSIVE in verdicts)
    vectors = len(set(map(name_of, answers)))
    several = "" if vectors == len(answers) else f" to {vectors} vectors"  # run in several ways, or repeated
    return f"{len(answers)} answers{several}: {', '.join(counts) or 'nothing judged'}"


def not_tested(document: Mapping[str, Any], answers: list[dict[str, Any]]) -> list[str]:
    lines = []
    if not any(answer.get("logprobs") for answer in answers):
        lines.append(TOKENS_ONLY)
    if scripts := not_run(document, answers):
        lines.append(f"scripts not run: {', '.join(scripts)}")
    return lines


def report(document: Mapping[str, Any], judged: list[Judged], answers: list[dict[str, Any]]) -> list[str]:
    """A line for each position that is not exact, the sum, and what was not tested."""
    lines = [f"{each.verdict:<12}  {each.where}: {each.detail}" for each in judged if each.verdict != EXACT]
    return [*lines, summary(judged, answers), *not_tested(document, answers)]


def read_document(path: str) -> dict[str, Any]:
    """vectors.json with a valid checksum; its form is checked when it is used."""
    document = parse(read_text(path), path)
    if not isinstance(document, dict) or document.get("format_version") != FORMAT_VERSION:
        raise PlainError(f"{path}: not a vector set of format_version {FORMAT_VERSION}")
    stated = document.pop("sha256", None)
    expected = hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    if stated != expected:
        words = f"sha256 {repr(stated)[:66]}, expected {expected} of its other fields"
        raise PlainError(f"{path}: {words}: changed since it was written")
    return document


def read_answers(path: str) -> list[dict[str, Any]]:
    """PlainError that names the line and the field."""
    lines = {f"{path} line {number}": line for number, line in enumerate(read_text(path).split("\n"), 1)}
    answers = [require_answer(parse(line, where, False), where) for where, line in lines.items() if line.strip()]
    if not answers:
        raise PlainError(f"{path}: no answers, expected one on each line")
    return answers


def require_answer(answer: Any, where: str) -> dict[str, Any]:
    if not isinstance(answer, dict) or not isinstance(answer.get("id"), str):
        raise PlainError(f"{where}: expected an object with a vector's id")
    for name, value in answer.items():
        if name not in FIELDS:
            raise PlainError(f"{where}: field {name!r}, expected one of {', '.join(FIELDS)}")
        kinds, words = FIELDS[name]
        is_right = isinstance(value, str if kinds is None else list)
        if value is not None and not (is_right and (kinds is None or all(type(each) in kinds for each in value))):
            raise PlainError(f"{where}: {name}: expected {words}")
    try:
        for logprob in answer.get("logprobs") or ():
            float(logprob or 0)
    except OverflowError:
        raise PlainError(f"{where}: logprobs: a whole number that is too large for float64") from None
    return answer


def read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - no further import
            text = file.read()
    except (OSError, ValueError) as problem:
        raise PlainError(f"{path}: can't be read: {problem}") from None
    if text.startswith("\ufeff"):
        raise PlainError(f"{path}: begins with a byte order mark (BOM), expected UTF-8 without one")
    return text


def parse(text: str, where: str, is_finite: bool = True) -> Any:
    """JSON in which no name stands twice; strict, without NaN, infinity and numbers that overflow, if `is_finite`."""

    def finite(digits: str) -> float:
        if is_finite and not math.isfinite(float(digits)):
            raise ValueError(f"{digits} is no JSON number")
        return float(digits)

    def fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError(f"a name stands twice among {', '.join(name for name, _ in pairs)}")
        return dict(pairs)

    try:
        return json.loads(text, parse_constant=finite, parse_float=finite, object_pairs_hook=fields)
    except (ValueError, RecursionError) as problem:
        raise PlainError(f"{where}: not JSON: {problem}") from None


def main(arguments: list[str]) -> int:
    """Exit code; see the module's docstring."""
    if len(arguments) != 4 or arguments[2] != "--format":
        print("usage: vectors_plain.py vectors.json answers.jsonl --format NAME", file=sys.stderr)
        return 3
    try:
        answers, document = read_answers(arguments[1]), read_document(arguments[0])
        judged = judge(document, answers, arguments[3])
    except PlainError as problem:
        print(one_line(str(problem)), file=sys.stderr)
        return 3
    try:
        if sys.stdout is None:
            raise OSError("standard output is closed")
        print("\n".join(report(document, judged, answers)), flush=True)
    except BrokenPipeError:
        discard_output()  # the reader has gone, as `head` does; the exit code still tells the verdict
    except OSError as problem:
        discard_output()
        print(f"the output can't be written: {problem}", file=sys.stderr)
        return 3
    return result(judged)


def discard_output() -> None:
    """Nothing more can be written, nor flushed when the process ends."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_line(text: str) -> str:
    """Line ends and control characters of an engine's text escaped, as they could look like a verdict's line."""
    return ascii(text)[1:-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
