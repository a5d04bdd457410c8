"""What is known of each request from the calls alone: its tokens, what of them is computed, when it must end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from lfm2np.suite.schedulers.named_memory import ZEROS, Names
from scheduler.protocol import Entry, Request

VOCAB_SIZE = 4


@dataclass(eq=False)
class Account:
    request: Request
    arrival: int
    tokens: list[int]  # prompt and outputs
    names: Names
    prefixes: list[int] = field(default_factory=list)  # of tokens[: n + 1], as far as they were needed
    computed: int = 0  # positions in its memory, while it runs
    is_running: bool = False  # scheduled since it came, or since it was last preempted
    was_preempted: bool = False  # and has not run since
    splits: bool = False  # its children part from it when its prompt is computed
    is_child_to_be: bool = False  # one of these, until then
    is_aborted: bool = False  # and runs on, until the scheduler says that it ended
    first_scheduled: int = -1  # the step
    min_tokens: int = 0  # stop tokens do not stop before

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def most_positions(self) -> int:
        """Positions that are ever computed: the last token is not."""
        return len(self.request.prompt_token_ids) + self.request.max_tokens - 1

    @property
    def has_ended(self) -> bool:
        """By its tokens."""
        return self.num_outputs > 0 and self.ends_with(self.tokens[-1], self.num_outputs)

    def ends_with(self, token: int, num_outputs: int) -> bool:
        """Whether `token`, as output number `num_outputs` counted from 1, is the last."""
        stops = token in self.request.stop_token_ids and num_outputs >= self.min_tokens
        return stops or num_outputs >= self.request.max_tokens

    def prefix(self, position: int) -> int:
        """The name of tokens 0 to `position`."""
        while len(self.prefixes) <= position:
            last = self.prefixes[-1] if self.prefixes else self.names.root(self.request.cache_salt)
            self.prefixes.append(self.names.after(last, self.tokens[len(self.prefixes)]))
        return self.prefixes[position]

    def prefixes_of(self, entry: Entry) -> list[int]:
        """The names of all positions up to the entry's last, drafts included."""
        drafts = list(entry.token_ids)[len(entry.token_ids) - entry.num_drafts :]
        return self.prefixes_with(drafts, entry.start + len(entry.token_ids))

    def prefixes_with(self, drafts: Sequence[int], stop: int) -> list[int]:
        """The names of positions 0 to stop - 1, the last len(drafts) of them drafts."""
        known = stop - len(drafts)
        if known:
            self.prefix(known - 1)
        prefixes = self.prefixes[:known]
        for token in drafts:
            prefixes.append(self.names.after(prefixes[-1], token))
        return prefixes

    def state(self, num_tokens: int) -> int:
        return self.prefix(num_tokens - 1) if num_tokens else ZEROS

    def next_token(self) -> int:
        """What the model says after its tokens: a hash of them and of its number, so that two samples differ."""
        return next_token(self.tokens, self.arrival)


def next_token(tokens: Sequence[int], seed: int) -> int:
    digest = blake2b(repr((list(tokens), seed)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE
