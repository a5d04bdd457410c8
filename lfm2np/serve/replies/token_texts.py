"""Tokens as texts: what each adds to an answer, where, and how it is called by itself."""

from __future__ import annotations

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.checkpoint.tokenizer import TextStream


class TokenTexts:
    """Of one sequence, token after token.

    length  characters that the tokens so far complete
    """

    def __init__(self, model: LoadedModel, as_ids: bool) -> None:
        self._model, self._as_ids = model, as_ids
        self._stream: TextStream | None = model.tokenizer.stream() if model.has_tokenizer else None
        self.length = 0

    def push(self, token_id: int) -> int:
        """Where this token's text begins: characters before it."""
        start = self.length
        if self._stream is not None:
            self.length += len(self._stream.push(token_id))
        return start

    def end(self) -> None:
        """Of a text: another goes on behind it."""
        if self._stream is not None:
            self.length += len(self._stream.finish())
            self._stream = self._model.tokenizer.stream()

    def name(self, token_id: int) -> str:
        return token_name(self._model, token_id, self._as_ids)


def token_name(model: LoadedModel, token_id: int, as_id: bool = False) -> str:
    """A token as a text of its own: "token_id:7" if asked for, or where it has none; no two tokens share one.

    Bytes that are no whole characters are told as OpenAI's completions do: "bytes:\\\\xe2\\\\x82".
    """
    if as_id or not model.has_tokenizer:
        return f"token_id:{token_id}"
    spelled = model.tokenizer.token_bytes(token_id)
    if not spelled:
        return model.tokenizer.token(token_id) or f"token_id:{token_id}"
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def token_bytes(model: LoadedModel, token_id: int) -> list[int] | None:
    """What it adds to a text; None for a token that adds nothing."""
    spelled = model.tokenizer.token_bytes(token_id) if model.has_tokenizer else b""
    return list(spelled) or None
