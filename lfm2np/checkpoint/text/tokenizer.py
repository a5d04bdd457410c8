"""Text to ids and back through a tokenizer.json; streaming that never cuts a character.

LFM2's tokenizer is byte-level BPE, and only that is accepted: then an id stands for bytes, decoding is joining bytes,
and a stream needs no more memory than one unfinished character. Special-token text inside a prompt or a message is
tokenised as what it spells, as transformers does: whoever passes on foreign text must look for it first.
What tokenizer_config.json says about token lists or clean-up is not read; transformers' added_tokens_decoder repeats
what tokenizer.json holds.

The package `tokenizers` does what a tokenizer.json says, however much that is: three normalizers of a kilobyte each
make 10**9 letters of one, and it ends the process where memory ends. tokenizer_file.py refuses such a file before.
"""

from __future__ import annotations

import codecs
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lfm2np.checkpoint.strict_json import parse_object, read_bytes
from lfm2np.checkpoint.text.chat import Chat, load_chat, render_chat
from lfm2np.checkpoint.text.messages import Objects
from lfm2np.checkpoint.text.tokenizer_file import require_accepted
from lfm2np.errors import RequestError, TokenizerError
from lfm2np.truth.config import ModelConfig
from lfm2np.values import show

TOKENIZER = "tokenizer.json"
MAX_TOKENIZER_BYTES = 32 * 2**20  # of 128,000 ids and their merges: some 15
LARGE_TEXT = 4096  # characters: some 20 ms
T = TypeVar("T")


def _byte_alphabet() -> dict[str, int]:
    """Letter -> byte of byte-level BPE: printable Latin-1 stands for itself, the rest follows from U+0100 on.

    Source: GPT-2's bytes_to_unicode.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF_LETTER: Mapping[str, int] = _byte_alphabet()


def entry_bytes(entry: str) -> bytes:
    """What an entry of the vocabulary stands for; one with a letter outside the alphabet stands for itself."""
    try:
        return bytes(BYTE_OF_LETTER[letter] for letter in entry)
    except KeyError:
        return entry.encode("utf-8")


class Tokenizer:
    """The tokenizer of one checkpoint: the package `tokenizers` under what a tokenizer.json says, with rows of the
    embedding as ids. TokenizerError that names `source` is what it raises, whatever the package does.

    vocab_size    rows of the embedding: ids below it without an entry ("dead rows") decode to nothing
    bos_token_id  the config's, prepended to prompts; None prepends nothing
    chat          how conversations are laid out
    """

    def __init__(self, content: bytes, config: ModelConfig, source: str) -> None:
        require_accepted(parse_object(content, source, TokenizerError), source)
        try:
            import tokenizers  # here, as a checkpoint without texts needs none
        except ImportError as problem:
            raise TokenizerError(f"{source}: needs the package tokenizers: {problem}") from None
        self._source = source
        self._rust = self._run(lambda: tokenizers.Tokenizer.from_buffer(content))
        self._run(self._rust.no_truncation)  # transformers ignores both settings as well
        self._run(self._rust.no_padding)
        self.vocab_size = config.vocab_size
        self.bos_token_id = config.bos_token_id
        self._max_tokens = config.max_position_embeddings
        entries: dict[str, int] = self._run(lambda: self._rust.get_vocab(with_added_tokens=True))
        added = self._run(self._rust.get_added_tokens_decoder)
        self._special_texts = {token.content for token in added.values() if token.special}
        self._longest_token = max(map(len, entries), default=0)
        for token_id in (max(entries.values(), default=0), *self._ids("", add_special_tokens=True)):
            if token_id >= self.vocab_size:
                expected = f"ids below vocab_size={self.vocab_size} (config.json)"
                raise TokenizerError(f"{source}: id {token_id}, expected {expected}")
        bos = None if self.bos_token_id is None else self.token(self.bos_token_id)
        self.chat = Chat(None, {"bos_token": bos or ""}, "built-in chat layout")

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt with one BOS: the post-processor's, else the config's, else the one the text begins with.

        Raises RequestError for text with a lone surrogate, which has no UTF-8.
        """
        ids = self._ids_of(text, "text", add_special_tokens=True)
        bos = self.bos_token_id
        if bos is None:
            return ids
        if ids[:1] != [bos]:
            return [bos, *ids]
        return ids[1:] if ids[:2] == [bos, bos] else ids

    def encode_chat(self, messages: Objects, tools: Objects | None = None, **options: Any) -> list[int]:
        """Ids of a conversation, with one BOS at the start; what is rendered, and the options: see `chat.render_chat`.

        The template writes the BOS, so the post-processor must not: a doubled BOS is a classic bug (vLLM issue 16081,
        SGLang issue 888). Raises RequestError for a bad message, TokenizerError for a template that fails.
        """
        ids = self._ids_of(self.render_chat(messages, tools, **options), "messages", add_special_tokens=False)
        bos = self.bos_token_id
        if bos is None:
            return ids
        if ids[:2] == [bos, bos]:
            raise TokenizerError(f"{self.chat.source}: the rendered chat begins with two BOS tokens, expected one")
        return ids if ids[:1] == [bos] else [bos, *ids]

    def encode_more(self, text: str) -> list[int]:
        """Ids of text that goes on after a prompt: no BOS. Raises RequestError as `encode` does."""
        return self._ids_of(text, "text", add_special_tokens=False)

    def render_chat(self, messages: Objects, tools: Objects | None = None, **options: Any) -> str:
        """The text that `encode_chat` tokenises."""
        text = render_chat(self.chat, messages, tools, **options)
        require_text(text, "messages")
        return text

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text, in general without special tokens; bytes that are not UTF-8 become U+FFFD, dead rows nothing."""
        checked = _require_each(ids, self.vocab_size)
        text: str = self._run(lambda: self._rust.decode(checked, skip_special_tokens=skip_special_tokens))
        return text

    def token(self, token_id: int) -> str | None:
        """The entry of an id as tokenizer.json spells it (byte-level letters); None for a dead row."""
        (checked,) = require_ids([token_id], self.vocab_size)
        entry: str | None = self._run(lambda: self._rust.id_to_token(checked))
        return entry

    def token_bytes(self, token_id: int) -> bytes:
        """What an id adds to the decoded text: nothing for a special token or a dead row.

        Source: tokenizers, decoder ByteLevel: an entry with a letter outside the byte alphabet stands for itself.
        """
        entry = self.token(token_id)
        return b"" if entry is None or entry in self._special_texts else entry_bytes(entry)

    def stream(self) -> TextStream:
        return TextStream(self)

    @property
    def most_characters(self) -> int:
        """Of a text that is tokenised at once: no choice of tokens fits more into the context."""
        return self._longest_token * self._max_tokens

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """With what the post-processor adds, or without.

        `encode` would keep the interpreter's lock: no other thread ran for seconds. Of a small text a batch is no gain,
        and starts threads, after which a fork of the process warns.
        """
        if len(text) < LARGE_TEXT:
            return list(self._run(lambda: self._rust.encode(text, add_special_tokens=add_special_tokens)).ids)
        (large,) = self._run(lambda: self._rust.encode_batch([text], add_special_tokens=add_special_tokens))
        return list(large.ids)

    def _run(self, call: Callable[[], T]) -> T:
        return guarded(call, self._source)

    def _ids_of(self, text: str, name: str, add_special_tokens: bool) -> list[int]:
        """RequestError for text that no choice of tokens fits into the context: tokenising it would take minutes."""
        require_text(text, name)
        most = self.most_characters
        if len(text) > most:
            raise RequestError(
                f"{name}: {len(text)} characters, expected at most {most}: max_position_embeddings={self._max_tokens} "
                f"tokens of at most {self._longest_token}"
            )
        return self._ids(text, add_special_tokens)


class TextStream:
    """Decodes one request token by token; the pieces together equal `Tokenizer.decode` of all ids.

    The state is the at most three bytes of an unfinished character, so a push costs the same at any length.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._finished = False

    def push(self, token_id: int) -> str:
        """The characters that this token completes, possibly none."""
        if self._finished:
            raise RequestError("push after finish: the stream has ended")
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def copy(self) -> TextStream:
        """A second stream that goes on from the same place."""
        twin = TextStream(self._tokenizer)
        twin._decoder.setstate(self._decoder.getstate())
        twin._finished = self._finished
        return twin

    def finish(self) -> str:
        """U+FFFD for a character that stays incomplete, as `decode` gives; else nothing."""
        self._finished = True
        return self._decoder.decode(b"", final=True)


def load_tokenizer(directory: Path, config: ModelConfig) -> Tokenizer:
    """The tokenizer and chat template of a checkpoint; raises TokenizerError naming the file."""
    path = directory / TOKENIZER
    tokenizer = Tokenizer(read_bytes(path, MAX_TOKENIZER_BYTES, TokenizerError), config, str(path))
    tokenizer.chat = load_chat(directory, tokenizer.chat.special_tokens["bos_token"])
    return tokenizer


def require_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """The ids as ints; RequestError for none at all, a bool, a non-integer or an id outside [0, vocab_size)."""
    checked = _require_each(ids, vocab_size)
    if not checked:
        raise RequestError("ids: none, expected at least one")
    return checked


def require_text(text: object, name: str) -> None:
    if not isinstance(text, str):
        raise RequestError(f"{name}: {show(text)}, expected a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as problem:
        raise RequestError(f"{name}: lone surrogate at position {problem.start}, expected valid Unicode") from None


def guarded(call: Callable[[], T], source: str) -> T:
    """Calls the Rust library, whose errors are bare Exceptions and whose panics derive from BaseException."""
    try:
        return call()
    except BaseException as problem:
        if not isinstance(problem, Exception) and type(problem).__name__ != "PanicException":
            raise  # KeyboardInterrupt and its like
        raise TokenizerError(
            f"{source}: the tokenizer failed: {str(problem)[:300] or type(problem).__name__}"
        ) from None


def _require_each(ids: Iterable[int], vocab_size: int) -> list[int]:
    if isinstance(ids, str | bytes | Mapping | set | frozenset) or not isinstance(ids, Iterable):
        raise RequestError(f"ids: {show(ids)}, expected a sequence of integers")
    checked = []
    for position, value in enumerate(ids):
        if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
            raise RequestError(f"ids[{position}]: {show(value)}, expected an integer, not a truth value")
        try:
            token_id = operator.index(value)  # also NumPy's integers
        except TypeError:
            raise RequestError(f"ids[{position}]: {show(value)}, expected an integer") from None
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"ids[{position}]: {show(token_id)}, expected 0 to vocab_size-1={vocab_size - 1}")
        checked.append(token_id)
    return checked


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str | None:
    """A text that encodes to exactly these ids, if there is one; never an empty one, which servers take differently."""
    return exact_text(tokenizer, ids) or None


def exact_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str | None:
    bos = tokenizer.bos_token_id
    text = tokenizer.decode(list(ids[1:] if bos is not None and ids[0] == bos else ids))
    return text if tokenizer.encode(text) == list(ids) else None
