"""Text to ids and back through a tokenizer.json; streaming that never cuts a character.

LFM2's tokenizer is byte-level BPE, and only that is accepted: then an id stands for bytes, decoding is joining bytes,
and a stream needs no more memory than one unfinished character. Special-token text inside a prompt or a message is
tokenised as what it spells, as transformers does: whoever passes on foreign text must look for it first.
What tokenizer_config.json says about token lists or clean-up is not read; transformers' added_tokens_decoder repeats
what tokenizer.json holds.

The library does what a tokenizer.json says, however much that is: three normalizers of a kilobyte each make 10**9
letters of one, and it ends the process where memory ends. So a file may have what LFM2's tokenizers have, and what
makes a text longer by no more than a few tokens; the rest is refused before the library sees it.
"""

from __future__ import annotations

import codecs
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from lfm2np.checkpoint.chat import Chat, load_chat, render_chat
from lfm2np.checkpoint.strict_json import parse_object, read_bytes
from lfm2np.errors import RequestError, TokenizerError
from lfm2np.model.config import ModelConfig
from lfm2np.values import show

TOKENIZER = "tokenizer.json"
MAX_TOKENIZER_BYTES = 32 * 2**20  # of 128,000 ids and their merges: some 15
MAX_PARTS, MAX_PATTERN, MAX_ENTRY, MAX_ADDED = 8, 2048, 1024, 2**20  # all but the first in characters
PARTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}  # of a Sequence
LARGE_TEXT = 4096  # characters: some 20 ms
T = TypeVar("T")


class Tokenizer:
    """The tokenizer of one checkpoint; made by `load_tokenizer`.

    vocab_size    rows of the embedding: ids below it without an entry ("dead rows") decode to nothing
    bos_token_id  the config's, prepended to prompts; None prepends nothing
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: ModelConfig, chat: Chat, source: str) -> None:
        self.vocab_size = config.vocab_size
        self.bos_token_id = config.bos_token_id
        self.chat = chat
        self._backend = backend
        self._source = source
        self._max_tokens = config.max_position_embeddings
        self._longest_token = max(map(len, backend.get_vocab()), default=0)
        self._special_texts = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt with one BOS: the post-processor's, else the config's, else the one the text begins with.

        Raises RequestError for text with a lone surrogate, which has no UTF-8.
        """
        require_text(text, "text")
        self._require_room(text, "text")
        ids = self._ids(text, add_special_tokens=True)
        bos = self.bos_token_id
        if bos is None:
            return ids
        if ids[:1] != [bos]:
            return [bos, *ids]
        return ids[1:] if ids[:2] == [bos, bos] else ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation, up to and with the header of the assistant's next turn, with one BOS at the start.

        The template writes the BOS, so the post-processor must not: a doubled BOS is a classic bug (vLLM issue 16081,
        SGLang issue 888). Raises RequestError for a bad message, TokenizerError for a template that fails.
        """
        text = self.render_chat(messages)
        self._require_room(text, "messages")
        ids = self._ids(text)
        bos = self.bos_token_id
        if bos is None:
            return ids
        if ids[:2] == [bos, bos]:
            raise TokenizerError(f"{self.chat.source}: the rendered chat begins with two BOS tokens, expected one")
        return ids if ids[:1] == [bos] else [bos, *ids]

    def encode_more(self, text: str) -> list[int]:
        """Ids of text that goes on after a prompt: no BOS. Raises RequestError as `encode` does."""
        require_text(text, "text")
        self._require_room(text, "text")
        return self._ids(text)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text that `encode_chat` tokenises."""
        text = render_chat(self.chat, messages)
        require_text(text, "messages")
        return text

    def decode(self, ids: Iterable[int]) -> str:
        """Text without special tokens; bytes that are not UTF-8 become U+FFFD, dead rows become nothing."""
        checked = _require_each(ids, self.vocab_size)
        text: str = self._run(lambda: self._backend.decode(checked, skip_special_tokens=True))
        return text

    def token(self, token_id: int) -> str | None:
        """The entry of an id as tokenizer.json spells it (byte-level letters); None for a dead row."""
        (checked,) = require_ids([token_id], self.vocab_size)
        entry: str | None = self._run(lambda: self._backend.id_to_token(checked))
        return entry

    def token_bytes(self, token_id: int) -> bytes:
        """What an id adds to the decoded text: nothing for a special token or a dead row.

        Source: tokenizers, decoder ByteLevel: an entry with a letter outside the byte alphabet stands for itself.
        """
        entry = self.token(token_id)
        if entry is None or entry in self._special_texts:
            return b""
        try:
            return bytes(BYTE_OF_LETTER[letter] for letter in entry)
        except KeyError:
            return entry.encode("utf-8")

    def stream(self) -> TextStream:
        return TextStream(self)

    @property
    def most_characters(self) -> int:
        """Of a text that is tokenised at once: no choice of tokens fits more into the context."""
        return self._longest_token * self._max_tokens

    def _require_room(self, text: str, name: str) -> None:
        """RequestError for text that no choice of tokens fits into the context: tokenising it would take minutes."""
        most = self.most_characters
        if len(text) > most:
            raise RequestError(
                f"{name}: {len(text)} characters, expected at most {most}: max_position_embeddings={self._max_tokens} "
                f"tokens of at most {self._longest_token}"
            )

    def _ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """`encode` would keep the interpreter's lock: no other thread ran for seconds. Of a small text a batch is no
        gain, and starts threads, after which a fork of the process warns.
        """
        if len(text) < LARGE_TEXT:
            ids: list[int] = self._run(lambda: self._backend.encode(text, add_special_tokens=add_special_tokens)).ids
            return ids
        (large,) = self._run(lambda: self._backend.encode_batch([text], add_special_tokens=add_special_tokens))
        return list(large.ids)

    def _run(self, call: Callable[[], T]) -> T:
        return guarded(call, self._source)


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


def load_tokenizer(
    directory: Path, config: ModelConfig, other: Callable[[], tuple[str, str] | None] | None = None
) -> Tokenizer:
    """The tokenizer and chat template of a checkpoint; raises TokenizerError naming the file.

    other   a chat template and where it stands, or None; asked for where the directory has none
    """
    path = directory / TOKENIZER
    content = read_bytes(path, MAX_TOKENIZER_BYTES, TokenizerError)
    backend = backend_of(content, config, str(path))
    bos = None if config.bos_token_id is None else backend.id_to_token(config.bos_token_id)
    chat = load_chat(directory, bos or "")
    found = other() if chat.template is None and other is not None else None
    if found is not None:
        chat = replace(chat, template=found[0], source=found[1])
    return Tokenizer(backend, config, chat, str(path))


def backend_of(content: bytes, config: ModelConfig, source: str) -> tokenizers.Tokenizer:
    """What the library makes of a tokenizer.json, whose ids all are rows of the embedding."""
    raw = parse_object(content, source, TokenizerError)
    _require_byte_level(raw, source)
    _require_bounded(raw, source)
    backend = guarded(lambda: tokenizers.Tokenizer.from_buffer(content), source)
    guarded(backend.no_truncation, source)  # transformers ignores both settings as well
    guarded(backend.no_padding, source)
    largest = max(guarded(lambda: backend.get_vocab(with_added_tokens=True), source).values(), default=0)
    if largest >= config.vocab_size:
        raise TokenizerError(f"{source}: id {largest}, expected ids below vocab_size={config.vocab_size} (config.json)")
    for token_id in guarded(lambda: backend.encode("").ids, source):
        if token_id >= config.vocab_size:
            raise TokenizerError(f"{source}: post_processor: id {token_id}, expected ids below {config.vocab_size}")
    return backend


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


def _require_byte_level(raw: Mapping[str, Any], source: str) -> None:
    """Byte-level BPE without dropout, which would make ids random."""
    model, decoder = raw.get("model"), raw.get("decoder")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else model
        raise TokenizerError(f"{source}: model: {show(kind)}, expected BPE")
    if model.get("dropout"):
        raise TokenizerError(
            f"{source}: model.dropout: {show(model['dropout'])}, expected null (ids must not be random)"
        )
    kind = decoder.get("type") if isinstance(decoder, dict) else decoder
    if kind != "ByteLevel":
        raise TokenizerError(f"{source}: decoder: {show(kind)}, expected ByteLevel")
    kinds = [step.get("type") for step in _steps(raw, "pre_tokenizer")]
    # A second ByteLevel would write the bytes of the first one's letters: each doubles the text.
    if not kinds or kinds != ["Split"] * (len(kinds) - 1) + ["ByteLevel"]:
        shown, expected = show(raw.get("pre_tokenizer")), "ByteLevel, alone or in a Sequence, last and after Splits"
        raise TokenizerError(f"{source}: pre_tokenizer: {shown}, expected {expected}")


def _require_bounded(raw: Mapping[str, Any], source: str) -> None:
    """Nothing that makes a text longer than by BOS and a few tokens like it, and no table of endless entries.

    A pattern that backtracks without end needs no rule: the library ends a match after 10**7 tries, with an error.
    """

    def require(fits: bool, key: str, value: str, expected: str) -> None:
        if not fits:
            raise TokenizerError(f"{source}: {key}: {value}, expected {expected}")

    for key in PARTS:
        require(len(_steps(raw, key)) <= MAX_PARTS, key, f"{len(_steps(raw, key))} parts", f"at most {MAX_PARTS}")
    for step in _steps(raw, "normalizer"):
        require(step.get("type") == "NFC", "normalizer", show(step), "null or NFC: others may make a text endless")
    for step in _steps(raw, "pre_tokenizer"):
        size = len(str(step.get("pattern")))
        require(size <= MAX_PATTERN, "pre_tokenizer", f"a pattern of {size} characters", f"at most {MAX_PATTERN}")
    few = f"ByteLevel, or TemplateProcessing: the text once, at most {MAX_PARTS} pieces, {MAX_PARTS} ids a token"
    for step in _steps(raw, "post_processor"):
        require(step.get("type") == "ByteLevel" or _adds_few(step), "post_processor", show(step), few)
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        text = raw["model"].get(name)
        require(not text, f"model.{name}", show(text), "null or an empty text")
    added = raw.get("added_tokens")
    contents = [token.get("content") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    vocabulary = raw["model"].get("vocab")
    for key, texts in (("added_tokens", contents), ("model.vocab", vocabulary if isinstance(vocabulary, dict) else ())):
        longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
        require(longest <= MAX_ENTRY, key, f"an entry of {longest} characters", f"at most {MAX_ENTRY}")
    total = sum(len(text) for text in contents if isinstance(text, str))
    require(total <= MAX_ADDED, "added_tokens", f"{total} characters", f"at most {MAX_ADDED} of all entries together")


def _steps(raw: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The parts of a Sequence, or the only one; of null none. What is no object is one without a type."""
    part = raw.get(key)
    inner = part.get(PARTS[key]) if isinstance(part, dict) and part.get("type") == "Sequence" else part
    parts = inner if isinstance(inner, list) else [] if inner is None else [inner]
    return [step if isinstance(step, dict) else {} for step in parts]


def _adds_few(step: Mapping[str, Any]) -> bool:
    """Whether a post-processor is a TemplateProcessing that leaves a text as long as it is, but for a few tokens."""
    single, special = step.get("single"), step.get("special_tokens")
    if step.get("type") != "TemplateProcessing" or not isinstance(single, list) or not isinstance(special, dict):
        return False
    ids = [token.get("ids") if isinstance(token, dict) else None for token in special.values()]
    texts = [piece for piece in single if isinstance(piece, dict) and "Sequence" in piece]
    is_few = all(isinstance(each, list) and len(each) <= MAX_PARTS for each in ids)
    return is_few and len(texts) == 1 and len(single) <= MAX_PARTS


def _byte_alphabet() -> dict[str, int]:
    """Letter -> byte of byte-level BPE: printable Latin-1 stands for itself, the rest follows from U+0100 on.

    Source: GPT-2's bytes_to_unicode.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF_LETTER: Mapping[str, int] = _byte_alphabet()
