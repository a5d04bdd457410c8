"""What clients may send, field by field: OpenAI's names, and vLLM's where OpenAI has none.

What may change an answer and is not served is refused, so is a field that nobody knows: an answer to another question
than was asked would be no right one. Null stands for the default everywhere. Ranges that SamplingParams checks by
itself are repeated where a document of the protocol can say them.

Sources: OpenAI API reference, "Completions" and "Chat"; vLLM, vllm/entrypoints/openai/protocol.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic.config import JsonDict

from lfm2np.engine.sampling.params import MAX_SAMPLES, MAX_SEED, MAX_TOKEN_ID

MOST_TOP_LOGPROBS = 20  # OpenAI's, of a chat
MOST_TOKENS = 2**18  # no context and no vocabulary is larger
MOST_STOPS, MOST_BIASES, LONGEST_STOP = 16, 1024, 256
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Field(max_length=MOST_TOKENS, fail_fast=True)]
StopText = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Stops = Annotated[list[StopText], Field(max_length=MOST_STOPS, fail_fast=True)]
Prompt = str | list[int] | list[str] | list[list[int]]


WORDS: dict[type, str] = {str: "a text", int: "a token id", list: "a list of token ids"}


def checked_prompt(value: Any) -> Prompt:
    """ValueError for another form, at the first element: a list may be long, and of a union all kinds would be told."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("expected a text, its tokens, or a list of either that is not empty")
    for tokens in value if type(value[0]) is list else [value]:
        if type(tokens) is list and len(tokens) > MOST_TOKENS:
            raise ValueError(f"{len(tokens)} elements: expected at most {MOST_TOKENS}, the longest context")
    kind = type(value[0])
    for index, item in enumerate(value):
        if kind not in (str, int, list) or type(item) is not kind:
            known = (
                f"{WORDS[kind]}, as the first is one" if kind in WORDS else "a text, a token id, or a list of token ids"
            )
            raise ValueError(f"[{index}]: expected {known}")
        if kind is list and (not item or not all(type(token) is int for token in item)):
            raise ValueError(f"[{index}]: expected token ids, at least one")
    prompt: Prompt = value
    return prompt


def few_biases(value: Any) -> Any:
    """ValueError for so many that looking at each takes long."""
    if isinstance(value, dict) and len(value) > MOST_BIASES:
        raise ValueError(f"{len(value)} biases: expected at most {MOST_BIASES}")
    return value


IDS: JsonDict = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
PROMPT_SCHEMA: JsonDict = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        IDS,
        {"type": "array", "minItems": 1, "items": IDS},
    ]
}


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class Sampled(Body):
    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(few_biases)] = Field(
        None, description="Biases by token id, in decimal.", max_length=MOST_BIASES
    )
    min_tokens: int | None = Field(None, ge=0)
    allowed_token_ids: TokenIds | None = None
    banned_token_ids: TokenIds | None = None
    stop_token_ids: TokenIds | None = None
    stop: StopText | Stops | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="Without one the noise hangs on the answer's id.")
    prompt_logprobs: int | None = Field(None, ge=0, description="At most what the server allows, as logprobs.")
    profile: Literal["vllm", "transformers"] | None = Field(
        None, description="Whose order of penalties, masks and filters is followed."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="The lower the earlier; of one policy.")
    cache_salt: str | None = Field(None, description="Prefixes are shared by requests of the same salt only.")
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: TextFormat | None = None
    user: str | None = Field(None, description="Has no effect.")
    store: bool | None = Field(None, description="Has no effect.")
    metadata: dict[str, str] | None = Field(None, description="Has no effect.")
    service_tier: str | None = Field(None, description="Has no effect.")


class CompletionBody(Sampled):
    prompt: Any = Field(
        description="A text, its tokens, or a list of either; each is answered by itself.",
        json_schema_extra=PROMPT_SCHEMA,
    )
    max_tokens: int | None = Field(None, ge=0, description="16 if it is not told; 0 to score the prompt alone.")
    logprobs: int | None = Field(None, ge=0, description="So many most likely tokens, and the chosen one.")
    echo: bool | None = Field(
        None, description="The prompt, as its tokens spell it, comes before the text; so do its log-probabilities."
    )
    best_of: int | None = Field(None, ge=1, description="As many as n.")
    suffix: None = None
    add_special_tokens: bool | None = Field(None, description="Whether a text gets its BOS; it does if not told.")

    @field_validator("prompt", mode="before")
    @classmethod
    def check_prompt(cls, value: Any) -> Prompt:
        return checked_prompt(value)


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None
    tool_call_id: str | None = Field(None, description="Has no effect.")
    refusal: None = None
    annotations: list[str] | None = Field(None, max_length=0)
    audio: None = None
    function_call: None = None
    tool_calls: None = None


class ChatBody(Sampled):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=1, description="What the context and the cache have room for, if not told.")
    max_completion_tokens: int | None = Field(None, ge=1, description="Another name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    tools: list[str] | None = Field(None, max_length=0)
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: TokenIds
