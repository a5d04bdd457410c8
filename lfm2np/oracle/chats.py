"""`check URL --cases chats`: a server's chats, whole and streamed, against the checkpoint's template and the reference
parser.

A prompt is compared by its number of tokens, and by its ids where the server gives them. What a client gets of a reply
is compared with the parse of the tokens that the server generated; where it gives none, with that of the reference's
greedy tokens, as far as the declared format can't tie. docs/engine/19-chats.md says what is right.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.checkpoint.text.replies import CONTROL, END_THINK, THINK, Message, ReplyStream, join, opens_reasoning
from lfm2np.checkpoint.text.tokenizer import Tokenizer
from lfm2np.engine.llm import LLM
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.uncached import common_prefix
from lfm2np.errors import RequestError, TokenizerError
from lfm2np.oracle.engines.dialects.dialect import OTHER, value_at
from lfm2np.oracle.engines.dialects.openai import model_field
from lfm2np.oracle.engines.http_client import BadReply, HttpError, TimedOut
from lfm2np.oracle.engines.http_target import HttpTarget, stream_error
from lfm2np.oracle.engines.records import Answer, greedy
from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.scored import Known
from lfm2np.oracle.judging.verdict import LIMIT, Position, Verdict
from lfm2np.oracle.report.report import OPEN, RIGHT, WRONG, Case, Finding, Report, plural
from lfm2np.values import Progress, show

Fields = dict[str, Any]
CASE = "chats"  # of --cases
CASES = json.loads((Path(__file__).parent / "chats.json").read_text(encoding="utf-8"))
MAX_TOKENS = 64
KINDS = ("tools", "streams")  # without an answer of each there is no verdict
IDS = ("logprobs", "return_token_ids")  # llama.cpp refuses the first beside tools in a stream
UNNAMED = "not what the template gives"
IDS_OF_CALLS = ("id", "tool_call_id")
STREAM: Fields = {"stream": True, "stream_options": {"include_usage": True}}
VERDICTS = {
    Verdict.EXACT: (RIGHT, "Every prompt is the template's, and clients get what the replies say."),
    Verdict.INCONCLUSIVE: (
        OPEN,
        "Chats were refused, or a reply differs where the format can't tell two apart.",
    ),
    Verdict.BUG: (WRONG, "A prompt is not the template's, or a client gets something else than the reply says."),
}


class Chat:
    """One of CASES, and what is right of it."""

    def __init__(self, case: Fields, model: LoadedModel, format_name: str, known: Known) -> None:
        self.name, self.messages = case["name"], case["messages"]
        self.tools = [CASES["tools"][name] for name in case.get("tools", ())] or None
        self.max_tokens = case.get("max_tokens", MAX_TOKENS)
        self._model, self._format_name, self._known, self.tokenizer = model, format_name, known, model.tokenizer

    @cached_property
    def ids(self) -> list[int]:
        """Of the prompt."""
        return self.tokenizer.encode_chat(self.messages, self.tools)

    @cached_property
    def reference(self) -> tuple[list[int], bool]:
        """The reference's reply, and whether an engine of the format has to generate the same."""
        params = SamplingParams(temperature=0.0, max_tokens=self.max_tokens)
        ids = list(LLM(self._model).generate([self.ids], params)[0].outputs[0].token_ids)
        return ids, all(each.margin_ratio > LIMIT for each in self.positions(ids))

    def positions(self, reply: Sequence[int]) -> list[Position]:
        request, answer = greedy(self.name, self.ids, len(reply)), Answer(token_ids=tuple(reply))
        return judge(self._model, self._format_name, [(request, answer)], known=self._known)

    def parsed(self, reply: Sequence[int]) -> tuple[Message, str]:
        """What a client has to get of it, and the finish_reason."""
        stream = ReplyStream(self.tokenizer, opens_reasoning(self.ids, self.tokenizer), calls=self.tools is not None)
        message = join([stream.feed(reply), stream.finish()])
        if len(reply) >= self.max_tokens and reply[-1] not in self._model.config.eos_token_ids:
            return message, "length"
        return message, "tool_calls" if message.tool_calls else "stop"

    def wrong_prompts(self) -> Iterator[tuple[str, list[int]]]:
        """What a server may do wrong, and its prompt then."""
        yield "the BOS is there twice", [*self.ids[:1], *self.ids]
        yield "the BOS is missing", self.ids[1:]
        uncalled = [{**each, "content": each["content"] or "", "tool_calls": None} for each in self.messages]
        nulls = [
            {**tool, "function": {"name": "", "description": None, **tool["function"]}} for tool in self.tools or ()
        ]
        for words, messages, tools in (
            ("the tools are missing", self.messages, None),
            ("descriptions that tools lack are null", self.messages, nulls or None),  # vLLM 0.32
            ("the history's calls are missing", uncalled, self.tools),
            ("the tools' responses are missing", [e for e in self.messages if e["role"] != "tool"], self.tools),
            ("the system message is missing", [e for e in self.messages if e["role"] != "system"], self.tools),
            ("the history is missing", self.messages[-1:], self.tools),
        ):
            with contextlib.suppress(RequestError, TokenizerError):  # the template wants it
                yield words, self.tokenizer.encode_chat(messages, tools)
        text = self.tokenizer.render_chat(self.messages, self.tools)
        for kept in [each["content"] for each in self.messages if THINK in (each["content"] or "")]:
            dropped = kept.partition(END_THINK)[2]
            yield "past thinking is kept", self.tokenizer.encode(text.replace(dropped, kept))
            yield "past thinking is dropped", self.tokenizer.encode(text.replace(kept, dropped))


class Chats:
    """What was seen of a server's chats. A response is named by its case, and "streamed" if it was.

    findings, unsure  what is wrong, by its words; what would not be if the reply were another that may tie
    refused           response -> why there was none
    sources           by what prompts and replies were compared
    expected          what clients have to get
    kinds             of KINDS, those that a response is of
    """

    def __init__(self, model: LoadedModel, target: HttpTarget, format_name: str, progress: Progress) -> None:
        """Sends CASES. TargetError if there is no server, or none that knows chats."""
        self._target, self.engine = target, target.probe().engine
        self.findings, self.unsure = dict[str, Finding](), dict[str, Finding]()
        self.judged, self.refused = list[str](), dict[str, str]()
        self.sources, self.expected, self.kinds = set[str](), list[Message](), dict[str, list[str]]()
        self._call_ids = dict[str, list[str]]()  # by what was requested, those that the server gave
        self._causes = dict[str, list[str]]()  # by chat, of prompts whose count is wrong
        known = Known()
        for done, case in enumerate(CASES["chats"]):
            progress(done, len(CASES["chats"]))
            chat = Chat(case, model, format_name, known)
            for name, streaming in ((chat.name, {}), (f"{chat.name}, streamed", STREAM)):
                self.kinds[name] = [kind for kind, is_so in zip(KINDS, (chat.tools, streaming), strict=True) if is_so]
                self._judge(chat, name, streaming)
        self._name_cause()

    def _judge(self, chat: Chat, name: str, streaming: Fields) -> None:
        self._name = name
        try:
            fields = {"messages": self._messages(chat, streaming), **streaming}
            response = self._response(chat, fields)
            self._compare(chat, response, self._is_right(chat, response, bool(streaming)), fields)
        except (HttpError, TokenizerError) as problem:  # the template may not take such a chat
            if isinstance(problem, TimedOut) and not self.judged:  # nor would the other chats be answered
                raise TargetError(f"{name}: {problem}") from None
            if not isinstance(problem, BadReply) or (problem.status or 500) < 500:
                self.refused[name] = str(problem)
                return
            self._report("error", str(problem))
        except (RequestError, *OTHER) as problem:
            self._report("error", f"a response of another form: {type(problem).__name__}: {problem}")
        self.judged.append(name)

    def _report(self, kind: str, words: str, is_sure: bool = True, **evidence: Any) -> None:
        values = "".join(f"; {name} {show(value)}" for name, value in evidence.items())
        new = Finding(kind, f"{words}{values}", self._name, {**evidence, "chats": []})
        (self.findings if is_sure else self.unsure).setdefault(words, new).evidence["chats"].append(self._name)

    def _messages(self, chat: Chat, streaming: Fields) -> list[Fields]:
        """As a client has them: calls of the history have the ids that the server gave them in the round before, unless
        the template writes ids."""
        given = dict[str, str]()
        for index, message in enumerate(chat.messages):
            ids = self._call_ids.get(json.dumps({"messages": chat.messages[:index], **streaming}), ())
            given |= zip((call["id"] for call in message.get("tool_calls") or ()), ids, strict=False)

        def renamed(fields: Fields) -> Fields:
            return {name: given.get(value, value) if name in IDS_OF_CALLS else value for name, value in fields.items()}

        messages: list[Fields] = json.loads(json.dumps(chat.messages), object_hook=renamed)
        return messages if chat.tokenizer.encode_chat(messages, chat.tools) == chat.ids else chat.messages

    def _response(self, chat: Chat, fields: Fields) -> Fields:
        """In one piece, even if it was streamed."""
        request = greedy(chat.name, chat.ids, chat.max_tokens, message="")
        body = {**self._target.body(request), **fields}
        body |= {"tools": chat.tools} if chat.tools else {}
        with contextlib.suppress(BadReply):
            return self._sent(body)
        return self._sent({name: value for name, value in body.items() if name not in IDS})

    def _sent(self, body: Fields) -> Fields:
        dialect, client = self._target.spoken().dialect, self._target.client
        if "stream" not in body:
            return client.post(dialect.path, body)
        events = client.post_and_leave(dialect.path, body, lambda some: stream_error(some) is not None)
        if (why := stream_error(events)) is not None:
            raise BadReply(f"the stream ended in an error: {why}")
        whole = dialect.joined(events)
        whole["choices"][0]["message"] = whole["choices"][0]["delta"]
        return whole

    def _is_right(self, chat: Chat, response: Fields, is_streamed: bool) -> bool:
        """Whether the prompt is, as far as it can be seen. Ids say more than their number; one finding is enough."""
        in_choice = value_at(response, ("choices", 0, "prompt_token_ids"))
        given = {"ids in the response": response.get("prompt_token_ids") or in_choice}
        body = {"messages": chat.messages, "tools": chat.tools} | model_field(self._target.spoken().extras)
        for url, field in () if is_streamed else (("/tokenize", "tokens"), ("/apply-template", "prompt")):
            with contextlib.suppress(HttpError):
                given[url] = self._target.client.post(url, body).get(field)
        given["usage"] = value_at(response, ("usage", "prompt_tokens"))
        is_seen = False
        for source, value in given.items():
            got = chat.tokenizer.encode(value) if isinstance(value, str) else value  # perhaps without its BOS
            right: Any = len(chat.ids) if source == "usage" else chat.ids
            if got and isinstance(got, type(right)):
                self.sources.add(f"prompts by {source}")
                if got != right and source == "usage" and is_seen:
                    self._report("usage", "usage: another number than the prompt's tokens", expected=right, got=got)
                elif got != right:
                    causes = [words for words, ids in chat.wrong_prompts() if got in (ids, len(ids))]
                    count = got if source == "usage" else len(got)
                    evidence = {"expected": f"{len(chat.ids)} tokens", "got": f"{count} tokens"}
                    if source == "usage":  # one count may have many causes: see _name_cause
                        self._causes[chat.name] = [w for w in self._causes.get(chat.name, causes) if w in causes]
                        causes = []
                    else:
                        evidence |= differing(right, got, chat.tokenizer)
                    self._report("prompt", f"prompt: {next(iter(causes), UNNAMED)}, by {source}", True, **evidence)
                    return False
                is_seen = True
        return True

    def _name_cause(self) -> None:
        """Of prompts that are seen by their counts alone: one that explains all the wrong ones."""
        first, *others = self._causes.values() or [[]]
        for words in first:
            if all(words in causes for causes in others):
                counted = f"prompt: {UNNAMED}, by usage"
                named = self.findings[counted].words.replace(UNNAMED, words if others else f"perhaps {words}", 1)
                self.findings[counted] = replace(self.findings[counted], words=named)
                return

    def _compare(self, chat: Chat, response: Fields, is_prompt_right: bool, fields: Fields) -> None:
        read = self._target.spoken().dialect.read(response, greedy(chat.name, chat.ids, chat.max_tokens))
        ids: list[int] = read.get("token_ids") or []
        has_ids = bool(ids) and read.get("new_tokens") in (None, len(ids), len(ids) + 1)  # perhaps without the last
        self.sources.add("replies by their own ids" if has_ids else "replies by the reference's")
        if has_ids and is_prompt_right and any(each.is_wrong for each in chat.positions(ids)):
            words = "reply: other tokens than the model's (without --cases chats: why)"
            self._report("tokens", words, expected=chat.reference[0], got=ids)
        counted, is_cut = read.get("new_tokens"), read.get("finish_reason") == "length"
        is_odd = is_cut and counted not in (len(ids), chat.max_tokens)  # the ids may lack parts of a character
        if ids and counted is not None and (counted < len(ids) or is_odd):
            self._report("usage", "usage: another number than the reply's tokens", expected=len(ids), got=counted)
        reply, is_sure = (ids, True) if has_ids else chat.reference
        expected, reason = chat.parsed(reply)
        self.expected.append(expected)
        is_read = expected.unfinished or not expected.unparsed  # what is no list of calls is disputed
        choice = response["choices"][0]
        content, thought = choice["message"].get("content") or "", expected.reasoning or ""
        reasoning = choice["message"].get("reasoning_content") or choice["message"].get("reasoning") or ""
        called = choice["message"].get("tool_calls") or ()
        calls = [self._call(each["function"]) for each in called]
        names = [each.get("id") for each in called]
        past = {call["id"] for message in fields["messages"] for call in message.get("tool_calls") or ()}
        if len({name for name in names if isinstance(name, str) and name}) < len(names):
            self._report("tool_calls", "calls without an id of their own", got=names)
        elif past.intersection(names):
            self._report("tool_calls", "calls with ids that calls of the history have", got=names)
        else:
            self._call_ids[json.dumps(fields)] = names
        if (types := [each.get("type") for each in called]) != ["function"] * len(types):
            self._report("tool_calls", "calls without type 'function'", got=types)
        leaked = [marker for marker in (THINK, *CONTROL) if marker in content and marker not in expected.content]
        if leaked:
            kind, words = ("thinking", "thinking kept") if leaked[0] == THINK else ("markup", "markup leaked")
            self._report(kind, f"{words} in content", is_read, expected=expected.content, got=content)
        rightly = [[call.name, dict(call.arguments)] for call in expected.tool_calls]
        for kind, right, got in (
            ("content", expected.content.strip(), expected.content.strip() if leaked else content.strip()),
            ("tool_calls", rightly, calls),
            ("reasoning", thought.strip(), thought.strip() if THINK in leaked else reasoning.strip()),
            ("finish_reason", reason, choice.get("finish_reason")),
        ):
            is_same = json.dumps(right, sort_keys=True) == json.dumps(got, sort_keys=True)  # 1 is neither true nor 1.0
            if not is_same and (has_ids or is_prompt_right):  # else it is not known what the model writes
                self._report(kind, f"another {kind}", is_sure and is_read, expected=right, got=got)

    def _call(self, function: Fields) -> list[Any]:
        """Its name and arguments, whatever form these have."""
        name, arguments = function["name"], function["arguments"]
        with contextlib.suppress(TypeError, ValueError):
            return [name, json.loads(arguments)]
        if isinstance(arguments, str):
            words = "arguments as text that is no JSON, or pieces without their call's index"
            self._report("arguments", words, got=arguments)
        else:
            self._report("arguments", "arguments not as text of JSON", expected=json.dumps(arguments), got=arguments)
        return [name, arguments]


def differing(right: list[int], got: list[int], tokenizer: Tokenizer) -> dict[str, str]:
    """Where they begin to differ, and the texts of both from there to where they end in the same way."""
    first = common_prefix(right, got)
    last = common_prefix(right[first:][::-1], got[first:][::-1])
    missing, extra = (tokenizer.decode(ids[first : len(ids) - last], skip_special_tokens=False) for ids in (right, got))
    return {"at": f"token {first}", "missing": missing, "extra": extra}


def report_of(chats: Chats, format_name: str) -> Report:
    answered = {kind for name in chats.judged for kind in chats.kinds[name]}
    unanswered: dict[str, Finding] = {}
    for name, why in chats.refused.items():
        for kind in chats.kinds[name]:
            if kind not in answered and kind not in unanswered:
                words = f"every request of this kind was refused: {why}"
                unanswered[kind] = Finding("refused", f"{kind}: {words}", name, {"chats": list(chats.refused)})
    is_open = bool(chats.unsure or unanswered or not chats.judged)
    verdict = Verdict.BUG if chats.findings else Verdict.INCONCLUSIVE if is_open else Verdict.EXACT
    sources = f"{plural(len(chats.judged), 'response')}: {'; '.join(sorted(chats.sources))}"
    reasons = [*chats.findings.values(), *chats.unsure.values(), *unanswered.values()]
    wrong = {name: each.words for each in chats.findings.values() for name in each.evidence["chats"]}
    unsure = {name: each.words for each in chats.unsure.values() for name in each.evidence["chats"]} | chats.refused
    seen = {
        "a tool call": any(message.tool_calls for message in chats.expected),
        "two calls": any(len(message.tool_calls) > 1 for message in chats.expected),
        "text beside a call": any(message.content and message.tool_calls for message in chats.expected),
        "reasoning": any(message.reasoning is not None for message in chats.expected),
        "an argument that is true or false": any(
            type(value) is bool
            for message in chats.expected
            for call in message.tool_calls
            for value in call.arguments.values()
        ),
    }
    return Report(
        command="check",
        verdict=str(verdict),
        exit_code=VERDICTS[verdict][0],
        means=VERDICTS[verdict][1],
        findings=[replace(each, words=f"{each.words} ({len(each.evidence['chats'])} in all)") for each in reasons],
        facts={"engine": chats.engine, "format": format_name, "compared": sources},
        not_tested=[
            *(f"{name}: {why}" for name, why in chats.refused.items()),
            *(f"{words}: no reply of this model has one" for words in seen if not (seen[words] or unanswered)),
            "blanks at the ends of content and reasoning, which are disputed",
        ],
        figures={"judged": chats.judged, "refused": chats.refused, "wrong": wrong},
        cases=[Case("chat", name, wrong.get(name), unsure.get(name)) for name in (*chats.judged, *chats.refused)],
    )
