"""Stop strings in a stream of text: found across any token border, and no more text held back than could still match.

The rules, on characters, so that how the text is cut into pieces cannot matter:
- the match that ends first wins; of those that end at the same place, the one that starts first (the longest);
- the first `min_tokens` tokens cannot stop: their text is pushed with may_stop=False. A match must end in later text,
  but may begin in theirs, as in vLLM, which only looks for matches that end after it. A match inside is shown;
- `include` shows the stop string, else the text ends before it. What follows it is never shown.

Source: vLLM, vllm/v1/engine/detokenizer.py, BaseIncrementalDetokenizer.update and check_stop_strings. Three things
differ: of matches that end together vLLM takes the one listed first; it holds back as many characters as its longest
stop string has but one (none with `include`), this only text that begins a stop string; and here U+FFFD for a character
that stays unfinished counts as text of the last token.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from lfm2np.errors import RequestError
from lfm2np.values import show


class StopChecker:
    """Watches one sample's text for the stop strings of its request.

    For each stop string it keeps the length of its longest proper prefix in which the text so far ends (Knuth, Morris,
    Pratt); the longest of these is what is held back. A push costs time in its own length and that of the stop strings.
    """

    def __init__(self, stop: Sequence[str], include: bool) -> None:
        """`stop` is SamplingParams.stop, `include` its include_stop_str_in_output; a bare string is one stop string."""
        self._stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(each, str) and each for each in self._stops):
            raise RequestError(f"stop {show(stop)}: expected strings of at least one character")
        self._include = include
        self._borders = [border_lengths(each) for each in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""
        self._may_stop = True
        self._ended = False

    def push(self, piece: str, may_stop: bool = True) -> tuple[str, str | None]:
        """One more token's text, perhaps empty: the text that may be shown now, and the stop string that it completes.

        With may_stop=False no stop string is complete yet, whatever the text. RequestError after a stop or `finish`.
        """
        self._require_open()
        self._may_stop = may_stop
        return self._take(piece)

    def finish(self, piece: str = "") -> tuple[str, str | None]:
        """As `push`, for what TextStream.finish gives: text of the token pushed last. Nothing stays held back."""
        self._require_open()
        shown, stopped = self._take(piece)
        self._ended = True
        if stopped is None:
            shown, self._held = shown + self._held, ""
        return shown, stopped

    def copy(self) -> StopChecker:
        """A second checker that goes on from the same place."""
        twin = copy.copy(self)
        twin._matched = list(self._matched)
        return twin

    def _take(self, piece: str) -> tuple[str, str | None]:
        if not self._stops:
            return piece, None
        text = self._held + piece
        for end, letter in enumerate(piece, start=len(self._held) + 1):
            stop = self._advance(letter)
            if stop is not None and self._may_stop:
                self._ended = True
                self._held = ""
                return text[: end if self._include else end - len(stop)], stop
        border = len(text) - max(self._matched)
        self._held = text[border:]
        return text[:border], None

    def _advance(self, letter: str) -> str | None:
        """Adds one character to all matches; the longest stop string that is complete with it, if any."""
        complete = None
        for index, stop in enumerate(self._stops):
            borders, length = self._borders[index], self._matched[index]
            while length and stop[length] != letter:
                length = borders[length]
            length += stop[length] == letter
            if length == len(stop):
                complete = stop if complete is None or len(stop) > len(complete) else complete
                length = borders[length]
            self._matched[index] = length
        return complete

    def _require_open(self) -> None:
        if self._ended:
            raise RequestError("text after a stop string or finish: the stream has ended")


def border_lengths(stop: str) -> list[int]:
    """For each n up to len(stop): the length of the longest proper prefix of stop[:n] that it also ends in."""
    borders, length = [0, 0], 0
    for letter in stop[1:]:
        while length and stop[length] != letter:
            length = borders[length]
        length += stop[length] == letter
        borders.append(length)
    return borders
