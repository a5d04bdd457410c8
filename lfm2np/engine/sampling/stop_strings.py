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

from collections.abc import Sequence

from lfm2np.errors import RequestError
from lfm2np.values import show


class StopChecker:
    """Watches one sample's text for the stop strings of its request.

    It keeps what is held back, less than the longest stop string, and not what was shown: a push costs time in its own
    length and the number of stop strings, and at worst in the square of what is held. A copy (copy.copy) goes on from
    the same place.
    """

    def __init__(self, stop: Sequence[str], include: bool) -> None:
        """`stop` is SamplingParams.stop, `include` its include_stop_str_in_output; a bare string is one stop string."""
        self._stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(each, str) and each for each in self._stops):
            raise RequestError(f"stop {show(stop)}: expected strings of at least one character")
        self._include = include
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

    def _take(self, piece: str) -> tuple[str, str | None]:
        if not self._stops:
            return piece, None
        old, text = len(self._held), self._held + piece
        matches = []  # (end, start, stop string) of those that end in the new text
        for stop in self._stops if self._may_stop else ():
            start = text.find(stop, max(0, old + 1 - len(stop)))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if matches:
            end, start, stop = min(matches)
            self._ended, self._held = True, ""
            return text[: end if self._include else start], stop
        border = len(text) - self._longest_beginning(text)
        self._held = text[border:]
        return text[:border], None

    def _longest_beginning(self, text: str) -> int:
        """How many characters at the end of the text a stop string begins with, that is longer than they."""
        most = min(len(text), max(map(len, self._stops)) - 1)
        for count in range(most, 0, -1):
            if any(len(stop) > count and stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0

    def _require_open(self) -> None:
        if self._ended:
            raise RequestError("text after a stop string or finish: the stream has ended")
