"""One slot of llama.cpp's server: requests one after another, and the state that the last of them found.

The server's decisions are written down here, as in update_slots and create_checkpoint of llama.cpp 0c1e570
(tools/server/server-context.cpp), with the names of the originals: how much of the last prompt is kept, which
checkpoint is taken and restored, what is removed, where a prompt is cut. Their effects are llama.cpp's own functions,
which the server calls, too: llama_decode, llama_memory_seq_rm, llama_state_seq_get_data_ext and
llama_state_seq_set_data_ext. Its log shows that the decisions are the same (llama-server -np 1 -lv 4).

For its default settings (-ub 512 -b 2048 --ctx-checkpoints 32) and token ids on /completion. Left out: prompts that the
server keeps outside of its slots (--cache-ram), a 33rd checkpoint that replaces an old one, and context shifts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lfm2np.checkpoint.files import read_config
from lfm2np.engine.ragged import common_prefix
from lfm2np.errors import RequestError
from lfm2np.oracle.recorders.engine_versions import require_model_type, require_request
from lfm2np.oracle.recorders.llama_cpp_batches import Row
from lfm2np.oracle.recorders.llama_cpp_recorder import Session
from lfm2np.oracle.recorders.recorder import Recorder

BATCH, UBATCH, CHECKPOINTS = 2048, 512, 32
BEFORE_END = (4 + UBATCH, 4)  # `checkpoint_offsets`: so many tokens before a prompt's end it is cut
SLOT = 0  # its sequence


def record_restored(
    model: Path, prompts: Sequence[Sequence[int]], max_tokens: int, format: str, gguf: Path
) -> tuple[Recorder, list[list[int]]]:
    """The last of the prompts, which a slot serves one after another, each with `max_tokens` greedy tokens.

    The tokens that the slot takes as cached are the recorder's prefix. Also returns the new tokens of every request.
    """
    config = read_config(model)
    require_model_type(config, "llama.cpp")
    require_request(prompts, len(prompts) - 1, max_tokens, config)
    tokens = max(map(len, prompts)) + max_tokens
    if tokens > BATCH:
        raise RequestError(f"{tokens} tokens of a prompt and its answer, expected at most {BATCH}")
    with closing(Session(model, gguf, format, 1, tokens, tokens, UBATCH)) as session:
        slot = Slot(session)
        answers = [slot.answer(prompt, max_tokens, None) for prompt in prompts[:-1]]
        recorder = Recorder(format=format, prefix=prompts[-1][: slot.take(prompts[-1])])
        return recorder, [*answers, slot.answer(prompts[-1], max_tokens, recorder)]


@dataclass(frozen=True)
class Checkpoint:
    """State of a sequence's recurrent memory after `num_tokens` tokens, as llama.cpp wrote it."""

    num_tokens: int
    pos_min: int
    pos_max: int
    content: bytes


class Slot:
    """The tokens whose keys and values are in the cache, and checkpoints of the recurrent memory."""

    def __init__(self, session: Session) -> None:
        self._session, self._api = session, session.api
        self.tokens: list[int] = []
        self.checkpoints: list[Checkpoint] = []
        self._taken: list[int] | None = None

    def take(self, prompt: Sequence[int]) -> int:
        """SLOT_STATE_STARTED: a request enters the slot. Returns how many of its tokens count as cached."""
        past = common_prefix(self.tokens, prompt)  # get_common_prefix
        next_position = past
        threshold = max(0, next_position - (0 if past < len(prompt) else 1))
        if past > 0 and self._pos_min() >= threshold:
            restored = chosen_checkpoint(self.checkpoints, next_position, threshold)
            if restored is None:
                past = next_position = 0
            else:
                self._restore(restored)
                next_position = min(next_position, max(restored.pos_min + 1, restored.pos_max))
                past = min(next_position, restored.num_tokens)
        self.checkpoints = [checkpoint for checkpoint in self.checkpoints if checkpoint.pos_max <= next_position]
        past -= past == len(prompt)
        self.tokens, self._taken = list(prompt[:past]), list(prompt)
        return past

    def answer(self, prompt: Sequence[int], max_tokens: int, recorder: Recorder | None) -> list[int]:
        """The request's new tokens, recorded if a recorder is given; calls `take` unless it was called."""
        if self._taken != list(prompt):
            self.take(prompt)
        total, token_ids = len(prompt) + max_tokens - 1, []
        while len(self.tokens) < len(prompt):
            self._api.llama_memory_seq_rm(self._session.memory, SLOT, len(self.tokens), -1)
            stop = cut(len(self.tokens), len(prompt))
            if stop == len(prompt) or len(prompt) < stop + UBATCH:  # `near_prompt_end`
                self._save()
            best = self._step(prompt[len(self.tokens) : stop], recorder, total)
        for _ in range(max_tokens - 1):
            token_ids.append(best)
            best = self._step([best], recorder, total)
        self._taken = None
        return [*token_ids, best]

    def _step(self, tokens: Sequence[int], recorder: Recorder | None, total: int) -> int:
        """Decodes these after the slot's tokens. Returns the best next token."""
        start = len(self.tokens)
        logits = self._session.decode([Row(SLOT, start + index, token) for index, token in enumerate(tokens)])
        self.tokens += tokens
        if recorder is not None:
            self._session.keep(recorder, SLOT, total)
        return int(np.argmax(logits[-1]))

    def _pos_min(self) -> int:
        return int(self._api.llama_memory_seq_pos_min(self._session.memory, SLOT))

    def _save(self) -> None:
        """create_checkpoint, with LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: the recurrent memory alone."""
        pos_min, pos_max = self._pos_min(), int(self._api.llama_memory_seq_pos_max(self._session.memory, SLOT))
        if pos_min < 0:  # nothing to save yet
            return
        if len(self.checkpoints) >= CHECKPOINTS - 1:
            raise RequestError(f"{CHECKPOINTS} checkpoints: expected fewer, as they push none out here")
        flags, context = self._api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY, self._session.context
        size = self._api.llama_state_seq_get_size_ext(context, SLOT, flags)
        content = (ctypes.c_uint8 * size)()
        self._api.llama_state_seq_get_data_ext(context, content, size, SLOT, flags)
        saved = Checkpoint(len(self.tokens), pos_min, pos_max, bytes(content))
        self.checkpoints = [
            checkpoint for checkpoint in self.checkpoints if checkpoint.num_tokens != saved.num_tokens
        ] + [saved]

    def _restore(self, checkpoint: Checkpoint) -> None:
        flags, context = self._api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY, self._session.context
        size = len(checkpoint.content)
        content = (ctypes.c_uint8 * size).from_buffer_copy(checkpoint.content)
        self._api.llama_state_seq_set_data_ext(context, content, size, SLOT, flags)


def chosen_checkpoint(checkpoints: Sequence[Checkpoint], next_position: int, threshold: int) -> Checkpoint | None:
    """The last that fits by its positions. The server does not know whose tokens it was taken after."""
    for checkpoint in reversed(checkpoints):
        if checkpoint.pos_max <= next_position and (checkpoint.pos_min < threshold or checkpoint.pos_min == 0):
            return checkpoint
    return None


def cut(start: int, prompt: int) -> int:
    """Where the batch ends that begins at `start` of a prompt of so many tokens."""
    ends = [prompt - min(BATCH, before) for before in BEFORE_END]
    return min([end for end in ends if end > start] + [prompt, start + BATCH])
