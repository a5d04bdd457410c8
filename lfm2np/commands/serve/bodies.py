"""What clients may send, field by field: OpenAI's names, and vLLM's where OpenAI has none.

What may change a response and is not supported is refused, and so is an unknown field: a response to another request
than was sent would not be right. Null stands for the default everywhere. Ranges are checked by SamplingParams.

Sources: OpenAI API reference, "Completions" and "Chat"; vLLM, vllm/entrypoints/openai/protocol.py.
"""

from __future__ import annotations

import gc
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from lfm2np.commands.serve.settings import Refusal

MOST_TOKENS = 2**18  # no context and no vocabulary is larger
MOST_PROMPTS = MOST_MESSAGES = 2**12
MOST_TOP_LOGPROBS = 20  # OpenAI's, of a chat
MOST_OBJECTS = 2**10  # tools, or calls of a message

# Lists end at their first error: else a hostile one has a million.
TokenIds = Annotated[list[int], Field(max_length=MOST_TOKENS, fail_fast=True)]
Tokens = Annotated[list[int], Field(min_length=1, max_length=MOST_TOKENS, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
ListsOfTokens = Annotated[list[Tokens], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(max_length=MOST_OBJECTS, fail_fast=True)]  # as the client wrote them
StopText = Annotated[str, Field(min_length=1, max_length=256)]
StopTexts = Annotated[list[StopText], Field(max_length=16, fail_fast=True)]


def form_of_prompt(value: Any) -> str:
    """Which of its forms a prompt is read as, by its first element: errors are of that form alone."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else None
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "tokens"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Tokens, Tag("tokens")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[ListsOfTokens, Tag("lists")],
    Discriminator(form_of_prompt),
]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def require_known(cls, fields: Any) -> Any:
        """One error at the first unknown field, where extra="forbid" has one for each."""
        for name in fields if isinstance(fields, dict) else ():
            if name not in cls.model_fields:
                raise PydanticCustomError("unknown_field", "{name}: unknown field", {"name": name[:200]})
        return fields


class StreamOptions(Body):
    include_usage: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class Sampled(Body):
    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=1024)] | None = None  # by token id, in decimal
    min_tokens: int | None = None
    allowed_token_ids: TokenIds | None = None
    banned_token_ids: TokenIds | None = None
    stop_token_ids: TokenIds | None = None
    stop: StopText | StopTexts | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = None  # without one a response depends on its id
    prompt_logprobs: int | None = None
    profile: Literal["vllm", "transformers"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: TextFormat | None = None
    user: Any = None  # this and what follows has no effect
    store: Any = None
    metadata: Any = None
    service_tier: Any = None


class CompletionBody(Sampled):
    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0)  # 16 by default; 0 scores the prompt alone
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None  # as many as n
    suffix: None = None
    add_special_tokens: bool | None = None  # whether a text gets its BOS: true by default

    @property
    def prompts(self) -> list[Any]:
        """Each prompt by itself: a text, or its token ids."""
        is_one = form_of_prompt(self.prompt) in ("text", "tokens")
        return [self.prompt] if is_one else list(self.prompt)


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Objects | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of it
    tool_call_id: str | None = None
    refusal: None = None
    annotations: list[str] | None = Field(None, max_length=0)
    audio: None = None
    function_call: None = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


class Rendered(Body):
    """What the checkpoint's chat template makes a prompt of, besides messages."""

    tools: Objects | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(Sampled, Rendered):
    messages: Messages
    max_tokens: int | None = None  # by default what context and cache have room for
    max_completion_tokens: int | None = None  # another name of max_tokens
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None  # a reply may have several


class TokenizeBody(Rendered):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: TokenIds


B = TypeVar("B", bound=Body)


def parsed(content: bytes, kind: type[B]) -> B:
    """The body of a request; Refusal for what is not JSON, ValidationError for another form."""
    gc.disable()  # it would go through a body's hundred thousand lists again and again: a second instead of a tenth
    try:
        return kind.model_validate(from_json(content, allow_inf_nan=False))
    except ValidationError:
        raise
    except ValueError as problem:
        raise Refusal(400, f"the body: not JSON: {problem}") from None
    finally:
        gc.enable()
