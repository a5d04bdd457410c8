"""The patterns by which a tokenizer.json splits text, in the words of Python's `re`, which has no \\p{L}.

A pattern is branches of items: a character, or a class of them, and how often. What follows is all that LFM2's and
LFM3's patterns have, and those of GPT-2, Llama 3 and their like; anything else is refused, as it may mean another thing
in `tokenizers`, whose engine is Oniguruma:

    a  \\n  \\.  \\s \\S \\d \\D  \\p{L} \\P{Lu}  [^\\s\\p{L}]  [a-z]      one character
    (?i:'s|'t|[sdmt])                                           letters in either case
    ?  *  +  {3}  {1,3}  {2,}   ?+ *+ ++  ?? *? +?              how often
    (?!\\S)  (?=\\s)                                              what must follow, or must not

A match may be looked for at each place of a text, so one must not take endless tries: a branch may repeat twice without
end, behind which nothing may fail any more, and has no more than MAX_TRIES ways through its other parts.
Source: Oniguruma, doc/RE. Its tables are of Unicode 16; these are those of Python's `unicodedata`.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import unicodedata
from collections.abc import Iterable

MAX_TRIES = 256
Ranges = list[tuple[int, int]]  # of code points, ascending, first and last
SPACES = [(0x09, 0x0D), (0x85, 0x85)]  # White_Space that is no separator (Z)
WORD_SYMBOLS = [(0x24B6, 0x24E9), (0x1F130, 0x1F149), (0x1F150, 0x1F169), (0x1F170, 0x1F189)]  # Other_Alphabetic
ESCAPES = {"r": "\r", "n": "\n", "t": "\t"}
ENDLESS = 10**9

_ESCAPED = r"\\[rnt]|\\[!-/:-@\[-`{-~]"
_SET = r"\\[pP]\{\w+\}|\\[sSdD]"
_INSIDE = rf"(?:{_ESCAPED}|[^\\\[\]^&-])"  # a character of a class: without classes in it, && and a bare -
_CLASS = rf"\[\^?(?:{_SET}|{_INSIDE}(?:-{_INSIDE})?)+\]"
_ITEM = rf"{_CLASS}|{_SET}|{_ESCAPED}|[^\\\[\](){{}}.^$|?*+]"
_FOLDED = r"\(\?i:(?:'?[A-Za-z]+|\[[A-Za-z]+\])(?:\|(?:'?[A-Za-z]+|\[[A-Za-z]+\]))*\)"
_PART = re.compile(
    rf"(?P<bar>\|)|\(\?(?P<ahead>[=!])(?P<follows>{_ITEM})\)"
    rf"|(?:(?P<folded>{_FOLDED})|(?P<item>{_ITEM}))(?P<often>[?*+][?+]?|\{{\d{{1,3}}(?:,\d{{0,3}})?\}})?"
)
_MEMBER = re.compile(rf"({_SET})|({_INSIDE}|[&-])(?:-({_INSIDE}))?")  # also what is a class by itself


class PatternError(ValueError):
    """What of a pattern is not taken, and what was expected."""


@functools.lru_cache(64)
def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern of Oniguruma, as it matches there; PatternError for what might match otherwise, or nothing at all."""
    words, place = [], 0
    least, repeats, tries = 0, 0, 1  # of this branch: characters, endless repeats, ways through the rest
    while place < len(pattern):
        part = _PART.match(pattern, place)
        if part is None:
            raise PatternError(f"at {pattern[place : place + 20]!r}: not known here")
        place = part.end()
        if part["bar"]:
            _require_letters(least)
            least, repeats, tries = 0, 0, 1
            words.append("|")
            continue
        fewest, most = (1, 1) if part["ahead"] else _bounds(part["often"] or "{1}")
        if repeats >= 2 and fewest > 0:
            raise PatternError(f"at {part[0]!r}: behind two endless repeats, expected only what may be absent")
        least += 0 if part["ahead"] else fewest
        repeats += most == ENDLESS
        tries *= (1 if most == ENDLESS else most - fewest + 1) * (1 + (part["folded"] or "").count("|"))
        if tries > MAX_TRIES:
            raise PatternError(f"at {part[0]!r}: more than {MAX_TRIES} ways through a branch")
        if part["ahead"]:
            words.append(f"(?{part['ahead']}{_class(part['follows'])})")
        else:
            item = _either_case(part["folded"]) if part["folded"] else _class(part["item"])
            words.append(item + (part["often"] or ""))
    _require_letters(least)
    return re.compile("".join(words))


def _require_letters(least: int) -> None:
    if least < 1:
        raise PatternError("a branch that may match an empty text, expected at least a character")


def _bounds(often: str) -> tuple[int, int]:
    if often[0] in "?*+":
        return (1 if often[0] == "+" else 0), (1 if often[0] == "?" else ENDLESS)
    first, comma, last = often.strip("{}").partition(",")
    fewest, most = int(first), int(last) if last else ENDLESS if comma else int(first)
    if fewest > most:
        raise PatternError(f"at {often!r}: expected the smaller number first")
    return fewest, most


def _either_case(group: str) -> str:
    """A group (?i:...) with both cases written out; two letters that one would match too, as ss, are refused."""
    content = group.removeprefix("(?i:").removesuffix(")")
    for branch in content.lower().split("|"):
        if re.match(r"[^\[]*(ss|st|ff|fi|fl)", branch):
            raise PatternError(f"at {group!r}: {branch!r} may also match a ligature or a sharp s")
    others = {"s": "\u017f", "k": "\u212a"}  # long s, the sign of Kelvin
    words, is_class = [], False
    for letter in content:
        is_class = letter == "[" or (is_class and letter != "]")
        low = letter.lower()
        cases = low + low.upper() + others.get(low, "") if letter.isalpha() else letter
        words.append(cases if is_class or not letter.isalpha() else f"[{cases}]")
    return f"(?:{''.join(words)})"


def _class(item: str) -> str:
    """A character or a class, as ranges of code points."""
    is_class = item[0] == "["
    members: Ranges = []
    for member in _MEMBER.finditer(item[1:-1].removeprefix("^") if is_class else item):
        if member[1]:
            members += _set(member[1])
            continue
        first = _code_point(member[2])
        last = _code_point(member[3]) if member[3] else first
        if last < first:
            raise PatternError(f"at {member[0]!r}: expected the smaller character first")
        members.append((first, last))
    words = "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in members)
    return f"[{'^' if is_class and item[1] == '^' else ''}{words}]"


def _code_point(spelling: str) -> int:
    return ord(ESCAPES.get(spelling[-1], spelling[-1]) if spelling[0] == "\\" else spelling)


def _set(spelling: str) -> Ranges:
    """Of \\s, \\d or a property, or of what is none."""
    kind = spelling[1].lower()
    if kind == "p":
        members = of_category(spelling[3:-1])
        if not members:
            raise PatternError(f"at {spelling!r}: expected a general category, such as L or Lu")
    else:
        members = of_category("Nd") if kind == "d" else sorted([*of_category("Z"), *SPACES])
    return members if spelling[1].islower() else _others(members)


def _others(ranges: Ranges) -> Ranges:
    borders = [-1, *itertools.chain.from_iterable(ranges), sys.maxunicode + 1]
    gaps = zip(borders[::2], borders[1::2], strict=True)
    return [(before + 1, after - 1) for before, after in gaps if before + 1 < after]


@functools.cache
def of_category(name: str) -> Ranges:
    """The code points of a general category (Lu) or of all that begin with a letter (L); none if there is no such."""
    return _joined((first, last) for first, last, category in _categories() if category[: len(name)] == name)


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Neighbours in one."""
    runs: Ranges = []
    for first, last in ranges:
        if runs and runs[-1][1] == first - 1:
            runs[-1] = (runs[-1][0], last)
        else:
            runs.append((first, last))
    return runs


@functools.cache
def _categories() -> list[tuple[int, int, str]]:
    """Runs of one category: some 3,300, for which all code points are looked up once, in a third of a second."""
    runs, first = [], 0
    for category, run in itertools.groupby(map(unicodedata.category, map(chr, range(sys.maxunicode + 1)))):
        length = sum(1 for _ in run)
        runs.append((first, first + length - 1, category))
        first += length
    return runs


def is_space(letter: str) -> bool:
    """White_Space, as \\s is for Rust and for Oniguruma; Python's isspace has four control characters more."""
    return letter in "\t\n\v\f\r\x85" or unicodedata.category(letter)[0] == "Z"


def is_word(letter: str) -> bool:
    """\\w of Rust's regex: Alphabetic, M, Nd, Pc, Join_Control."""
    category = unicodedata.category(letter)
    if category[0] in "LM" or category in ("Nd", "Nl", "Pc") or letter in "\u200c\u200d":
        return True
    return any(first <= ord(letter) <= last for first, last in WORD_SYMBOLS)
