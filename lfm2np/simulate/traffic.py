"""One request of a trace: when it comes, how long it is, what it shares with others."""

from __future__ import annotations

from dataclasses import dataclass

NANOSECONDS = 1_000_000_000  # of a second: all times are whole nanoseconds, so that sums of them are exact


@dataclass(frozen=True, slots=True)
class Arrival:
    """Token ids stand for content: two requests share a prefix as far as their ids are equal.

    at                 nanoseconds since the trace began
    prompt             runs of equal token ids: (token id, how many)
    num_output_tokens  that it will get
    output_token_id    of all of them
    max_tokens         that it asks for, at least num_output_tokens; None: num_output_tokens
    priority           see scheduler.Request
    abort_after        nanoseconds after its arrival at which its user leaves; None: never
    """

    at: int
    prompt: tuple[tuple[int, int], ...]
    num_output_tokens: int
    output_token_id: int
    max_tokens: int | None = None
    priority: int = 0
    abort_after: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(count for _, count in self.prompt)
