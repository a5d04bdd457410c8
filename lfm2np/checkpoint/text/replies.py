"""What a model wrote, as a client gets it: content, reasoning and tool calls; at once, or as it comes.

From token ids a marker is a token. From text it is its spelling, so a string or a sentence that spells one is misread:
`Message.guessed` says that something did not fit. docs/engine/19-chats.md has the rules, and who differs.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lfm2np.checkpoint.text.tokenizer import Tokenizer, require_ids
from lfm2np.checkpoint.text.tool_calls import ToolCall, read_calls, write_calls
from lfm2np.errors import RequestError
from lfm2np.values import show

CALLS, END_CALLS = "<|tool_call_start|>", "<|tool_call_end|>"
THINK, END_THINK = "<think>", "</think>"
START_TURN, ENDS = "<|im_start|>", ("<|im_end|>", "<|endoftext|>")
OTHERS = tuple(f"<|{name}_{side}|>" for name in ("tool_list", "tool_response") for side in ("start", "end"))
CONTROL = (CALLS, END_CALLS, *ENDS, *OTHERS, "<|startoftext|>", START_TURN, "<|pad|>")  # never shown
LONGEST = max(map(len, CONTROL))


@dataclass(frozen=True)
class Message:
    """One reply of an assistant, or what a piece of its stream adds.

    reasoning   None where the reply has none
    tool_calls  in their order, complete ones only
    unfinished  the reply ended within its reasoning or within a list of calls
    unparsed    texts after a marker that are no list of calls; they are in no other field
    guessed     it was read from text, and a marker in it counted for nothing or enclosed no calls
    """

    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    unfinished: bool = False
    unparsed: tuple[str, ...] = ()
    guessed: bool = False


def join(pieces: Iterable[Message]) -> Message:
    """The message that a stream's pieces make."""
    pieces = list(pieces)
    reasoning = [piece.reasoning for piece in pieces if piece.reasoning is not None]
    return Message(
        "".join(piece.content for piece in pieces),
        "".join(reasoning) if reasoning else None,
        tuple(call for piece in pieces for call in piece.tool_calls),
        any(piece.unfinished for piece in pieces),
        tuple(text for piece in pieces for text in piece.unparsed),
        any(piece.guessed for piece in pieces),
    )


def parse_reply(
    reply: str | Sequence[int], tokenizer: Tokenizer | None = None, *, in_reasoning: bool = False
) -> Message:
    """A whole reply, as text or as token ids with their tokenizer; see `ReplyStream`."""
    stream = ReplyStream(tokenizer, in_reasoning)
    return join([stream.feed(reply), stream.finish()])


def render_reply(message: Message) -> str:
    """The message as LFM2.5's templates write it into the history, without header and <|im_end|>.

    RequestError for what is no Message, or has calls that could not be read again.
    """
    if not isinstance(message, Message) or not isinstance(message.content, str):
        raise RequestError(f"message: {type(message).__name__}, expected a Message with text, as of parse_reply")
    reasoning = "" if message.reasoning is None else f"{THINK}{message.reasoning}{END_THINK}"
    calls = f"{CALLS}{write_calls(message.tool_calls)}{END_CALLS}" if message.tool_calls else ""
    return reasoning + message.content + calls


def opens_reasoning(prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether the prompt's last turn begins with a <think> that does not end: the reply then goes on in it."""
    turn = tokenizer.decode(prompt, skip_special_tokens=False).rpartition(START_TURN)[2].partition("\n")[2]
    return turn.startswith(THINK) and END_THINK not in turn


class ReplyStream:
    """Reads one reply piece by piece; what the pieces add, joined, is what the whole gives, wherever it is cut.

    tokenizer     for token ids; text needs none
    in_reasoning  the prompt ended with <think>, as the template of LFM2.5-2.6B does; see `opens_reasoning`
    calls         False: there is no tool to call, so a list of calls is content
    """

    def __init__(self, tokenizer: Tokenizer | None = None, in_reasoning: bool = False, calls: bool = True) -> None:
        if not isinstance(tokenizer, Tokenizer | None):
            raise RequestError(f"tokenizer: {show(tokenizer)}, expected a model's tokenizer, or None")
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        spelled = tokenizer is None or len(tokenizer.encode_more(END_THINK)) > 1  # no token of its own
        self._thinking = (THINK, END_THINK) if spelled else ()
        self._opening = CALLS if calls else None
        self._state = "reasoning" if in_reasoning else "start"  # then content, calls; ended, finished
        self._held = ""  # the beginning of a marker, or not
        self._calls: list[str] = []
        self._added = [Message(reasoning="")] if in_reasoning else []
        self._from_text = False

    def feed(self, piece: str | Sequence[int]) -> Message:
        """What this piece adds. RequestError for anything but text, or token ids where there is a tokenizer."""
        if self._state == "finished":
            raise RequestError("feed after finish: the reply has ended")
        if isinstance(piece, str):
            self._from_text = True
            self._decoder.reset()  # text after token ids has the character that they left unfinished
            self._take(piece, (*CONTROL, THINK, END_THINK))
        elif self._tokenizer is None or isinstance(piece, bytes) or not hasattr(piece, "__len__"):
            raise RequestError(f"a reply: {show(piece)}, expected text, or token ids and their tokenizer")
        else:
            for token_id in require_ids(piece, self._tokenizer.vocab_size) if len(piece) else ():
                self._take_token(token_id, self._tokenizer)
        return self._emitted()

    def finish(self) -> Message:
        """What the end adds: what was held back, and what is unfinished."""
        self._flush()
        self._close(ended=True)
        self._state = "finished"
        return self._emitted()

    def _emitted(self) -> Message:
        added, self._added = self._added, []
        return join(added)

    def _take_token(self, token_id: int, tokenizer: Tokenizer) -> None:
        entry, letters = str(tokenizer.token(token_id)), tokenizer.token_bytes(token_id)
        if (entry in CONTROL and not letters) or (entry in (THINK, END_THINK) and not self._thinking):
            self._flush()
            self._marker(entry)
        else:
            self._take(self._decoder.decode(letters), self._thinking)

    def _flush(self) -> None:
        self._take(self._decoder.decode(b"", final=True), self._thinking)
        self._plain(self._held)
        self._held = ""

    def _take(self, text: str, markers: tuple[str, ...]) -> None:
        """Finds the markers that are spelled; the end of the text that may become one waits for the next piece."""
        text, start, at = self._held + text, 0, 0
        while (at := text.find("<", at)) >= 0:
            if text.startswith(markers, at):
                marker = next(marker for marker in markers if text.startswith(marker, at))
                self._plain(text[start:at])
                self._marker(marker)
                start = at = at + len(marker)
            elif len(text) - at < LONGEST and any(marker.startswith(text[at:]) for marker in markers):
                break  # the text ends within it
            else:
                at += 1
        at = len(text) if at < 0 else at
        self._plain(text[start:at])
        self._held = text[at:]

    def _plain(self, text: str) -> None:
        if self._state == "start" and text:
            self._state = "content"
        if self._state == "calls":
            self._calls.append(text)
        elif self._state in ("content", "reasoning") and text:
            self._added.append(Message(text) if self._state == "content" else Message(reasoning=text))

    def _marker(self, marker: str) -> None:
        state = self._state
        if marker == THINK and state == "start":
            self._state = "reasoning"
            self._added.append(Message(reasoning=""))
        elif marker == END_THINK and state == "reasoning":
            self._state = "content"
        elif marker in (THINK, END_THINK):
            self._plain(marker)  # anywhere else it is a word
        elif marker == self._opening and state in ("start", "content", "calls"):
            self._close()
            self._state = "calls"
        elif (marker == END_CALLS and state == "calls") or (marker in ENDS and state != "ended"):
            self._close(ended=marker in ENDS)
            self._state = "ended" if marker in ENDS else "content"
        else:  # it counts for nothing
            self._added.append(Message(guessed=self._from_text and state != "ended"))

    def _close(self, ended: bool = False) -> None:
        """What is open is closed: by a marker, or by the end of the reply."""
        if self._state == "calls":
            text, self._calls = "".join(self._calls), []
            try:
                self._added.append(Message(tool_calls=read_calls(text)))
            except ValueError:
                self._added.append(Message(unfinished=ended, unparsed=(text,), guessed=self._from_text))
        elif ended:
            self._added.append(Message(unfinished=self._state == "reasoning"))
