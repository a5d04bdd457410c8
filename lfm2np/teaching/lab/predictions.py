"""Predictions: a lesson asks what a changed run would do, and the engine runs it to judge the guess.

A guess is a part of the link (`guess-1`), beside the settings, and changes no run. Without one the run that the
question is about is not computed, so the page can't give the answer away.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from lfm2np.teaching.lab.compute import Outcome
from lfm2np.teaching.lab.settings import NAMES, Problems, Settings
from lfm2np.values import show

Again = Callable[[Settings], Outcome]  # runs the engine once more; Problems for what can't be
MOST_DIGITS = 6  # of a guess


@dataclass(frozen=True)
class Verdict:
    right: bool
    sentence: str


class Wrong(Exception):
    """The sentence of a run, or of a guess, that is not what was asked for."""


class Unreadable(Exception):
    """The sentence of a guess that is neither right nor wrong: there is none, or not of the kind that is asked for."""


@dataclass(frozen=True)
class Number:
    """The answer to "how many": `mistakes` are guesses with what each would be the answer to, the likeliest first."""

    right: int
    because: str
    mistakes: Sequence[tuple[int, str]]
    hint: str  # for any other guess

    def judge(self, guess: int) -> str:
        if guess == self.right:
            return self.because
        for mistake, sentence in self.mistakes:
            if guess == mistake:
                raise Wrong(sentence)
        raise Wrong(f"It is {'more' if guess < self.right else 'less'}. {self.hint}")


@dataclass(frozen=True)
class Which:
    """The answer to "which requests": `reasons` say of a request why it does not belong to the answer."""

    right: Collection[str]
    because: str
    reasons: Mapping[str, str]
    hint: str

    def judge(self, guess: Collection[str]) -> str:
        """A wrong guess is explained by one request that it should not have, or by the hint: never by the answer."""
        for name in sorted(guess):
            if name not in self.right:
                raise Wrong(f"Request {name} does not belong to the answer: {self.reasons[name]}.")
        if len(guess) < len(self.right):
            raise Wrong(f"At least one request is missing. {self.hint}")
        return self.because


@dataclass(frozen=True)
class Prediction:
    """`change` gives the run that the question is about, of a learner's settings; changed twice it is the same run.

    `answer` reads the answer off that run, and its mistakes off both: the run now, and the changed one.
    """

    question: str
    change: Callable[[Settings], Settings]
    answer: Callable[[Outcome, Outcome], Number | Which]
    of_requests: bool = False  # the answer is letters, else a number

    def judge(self, text: str, now: Outcome, again: Again) -> Verdict:
        """Unreadable for what is no guess."""
        changed = self.change(now.settings)
        guess = read_requests(text, NAMES[: len(changed.requests)]) if self.of_requests else read_number(text)
        try:
            then = again(changed)
            if then.stopped or then.run is None:
                raise Wrong(f"{then.stopped} So it can't be judged.")
            before = then if now.run is None else now  # a fault may leave no run to compare with
            return Verdict(True, self.answer(before, then).judge(guess))  # type: ignore[arg-type]
        except Wrong as wrong:
            return Verdict(False, str(wrong))
        except Problems as problems:
            return Verdict(False, f"With your settings it can't be run. {' '.join(problems.fields.values())}")


def read_number(text: str) -> int:
    """Unreadable for all but a whole number in ASCII digits."""
    text = text.strip()
    if not text:
        raise Unreadable("There is no guess yet: expected a whole number, such as 3.")
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
        raise Unreadable(f"{show(text)}: expected a whole number, such as 3.")
    return int(text)


def read_requests(text: str, names: str) -> frozenset[str]:
    """The letters of "a b", "A, B" or "a and b", none of "none"; Unreadable for any other text."""
    expected = f"expected letters of requests, {names[0]} to {names[-1]}, or none"
    words = [word for word in re.split(r"[\s,;]+", text.strip().lower()) if word not in ("", "and")]
    if not words:
        raise Unreadable(f"There is no guess yet: {expected}.")
    if words == ["none"]:
        return frozenset()
    letters = "".join(words)
    if not set(letters) <= set(names):
        raise Unreadable(f"{show(text.strip())}: {expected}.")
    return frozenset(letters)
