"""What `lfm2np generate` shows: text as it comes, bars, a table of several requests, figures, one JSON object."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.checkpoint.text.replies import opens_reasoning, parse_reply
from lfm2np.checkpoint.text.tokenizer import Tokenizer
from lfm2np.commands.cli.shared.requests import Job
from lfm2np.commands.cli.shared.terminal import entry, progress_bar, terminal_text
from lfm2np.engine.outputs import CompletionOutput, RequestOutput
from lfm2np.engine.sampling.logprobs import TokenLogprobs
from lfm2np.values import Progress

FORMAT_VERSION = 1  # of the JSON object: commands/schemas/generate.schema.json
Outputs = Mapping[str, RequestOutput]  # by request id, as far as they have come


# --- while it goes


class Display(Protocol):
    def draw(self, outputs: Outputs) -> None: ...

    def end(self) -> None: ...


class OneSample:
    """The only sample as it comes: its text, its ids without a tokenizer, or a line a token with log-probabilities."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._tokens = 0  # shown
        self._letters = 0
        self._line_is_open = False  # without a line end, which an error before any text does not need

    def draw(self, outputs: Outputs) -> None:
        for output in outputs.values():
            (sample,) = output.outputs
            if sample.error is None:
                self._draw(sample)
            elif not self._letters:
                self._line_is_open = False

    def _draw(self, sample: CompletionOutput) -> None:
        self._line_is_open = sample.logprobs is None
        if sample.logprobs is not None:
            for logprobs in sample.logprobs[self._tokens :]:
                print(terminal_text(logprobs_line(self._tokenizer, logprobs)), flush=True)
        else:
            text = written(sample)
            print(terminal_text(text[self._letters :]), end="", flush=True)
            self._letters = len(text)
        self._tokens = len(sample.token_ids)

    def end(self) -> None:
        if self._line_is_open:
            print()


class Screen:
    """One line a request on a terminal, redrawn as tokens come."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs[:20]
        self._drawn = False

    def draw(self, outputs: Outputs) -> None:
        self.end()
        for job in self._jobs:
            output = outputs.get(job.request_id)
            text = "" if output is None else written(output.outputs[0])
            print(terminal_text(f"{one_line(job.shown)[:36]:<38}{one_line(text)[-40:]}"), flush=True)
        self._drawn = True

    def end(self) -> None:
        if self._drawn:
            sys.stdout.write(f"\r\x1b[{len(self._jobs)}A\x1b[J")
        self._drawn = False


class Watch:
    """What a person sees of a run while it goes: a bar until the first token, then the tokens, or a bar of them.

    first_steps  those until the first token, about; most_tokens  of all requests
    """

    def __init__(self, display: Display | None, first_steps: int, most_tokens: int, name: str = "generating") -> None:
        self._display, self._first_steps, self._most_tokens, self._name = display, first_steps, most_tokens, name
        self._layers = 0
        self._prompt_bar: Progress | None = None  # until the first token
        self._bar: Progress | None = None  # of the tokens
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Watch:
        self._prompt_bar = self._stack.enter_context(progress_bar("prompt"))
        return self

    def layer(self, done: int, total: int) -> None:
        """One layer of a step more; so many a step."""
        if self._prompt_bar:
            self._layers += 1
            self._prompt_bar(self._layers, max(self._layers, total * self._first_steps))

    def tokens(self, count: int, outputs: Outputs) -> None:
        if self._prompt_bar and outputs:
            self._stack.close()
            self._prompt_bar = None
            if self._display is None or not sys.stdout.isatty():
                self._bar = self._stack.enter_context(progress_bar(self._name))
        if self._display and outputs:
            self._display.draw(outputs)
        if self._bar:
            self._bar(count, self._most_tokens)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()
        if self._display and kind is None:
            self._display.end()


# --- when it is done


def print_outputs(jobs: Sequence[Job], outputs: Outputs, tokenizer: Tokenizer | None) -> None:
    """A line a sample, and under it a line a token if it has log-probabilities, and a line a call."""
    for job in jobs:
        for sample in outputs[job.request_id].outputs:
            ending = f"  [{sample.error}]" if sample.error else ""
            print(terminal_text(f"{one_line(job.shown)[:36]:<38}{one_line(written(sample))}{ending}"))
            for logprobs in sample.logprobs or ():
                print(terminal_text(logprobs_line(tokenizer, logprobs)))
            print_calls(job, sample, tokenizer)


def print_calls(job: Job, sample: CompletionOutput, tokenizer: Tokenizer | None) -> None:
    if tokenizer is not None:
        reply = parse_reply(sample.token_ids, tokenizer, in_reasoning=opens_reasoning(job.ids, tokenizer))
        for call in reply.tool_calls:
            print(terminal_text(f"call: {call.name} {call.arguments_json}"))


def logprobs_line(tokenizer: Tokenizer | None, chosen: TokenLogprobs) -> str:
    """One generated token a line: id, entry, log-probability, then the most likely ones."""
    top = "  ".join(f"{entry(tokenizer, i)} {logprob:.4f}" for i, logprob in chosen.top)
    line = f"{chosen.token_id:>7}  {entry(tokenizer, chosen.token_id):<20} {chosen.logprob:>10.4f}"
    return f"{line}  {top}".rstrip()


def print_summary(summary: Mapping[str, Any], numerics: str) -> None:
    rows = [
        ("requests, generated tokens", f"{summary['requests']}, {summary['generated_tokens']}"),
        ("steps (one request at a time)", f"{summary['steps']} ({summary['steps_one_by_one']})"),
        ("tokens per step", summary["tokens_per_step"]),
        ("padding saved over padded steps", summary["padding_avoided"]),
        ("padding saved over a static batch", summary["static_batch_padding"]),
    ]
    if summary["preemptions"]:
        rows.append(("preemptions, tokens computed twice", f"{summary['preemptions']}, {summary['recomputed_tokens']}"))
    if summary["speculative"]:
        rows += speculative_rows(summary["speculative"])
    if summary["sequential_seconds"] is not None:
        rows.append(("arithmetic (sequential, no cache)", f"{numerics} ({summary['sequential_numerics']})"))
        rows.append(("seconds (sequential, no cache)", f"{summary['seconds']} ({summary['sequential_seconds']})"))
        rows.append(("speed-up over sequential", summary["speed_up"]))
    print()
    for name, value in rows:
        print(f"{name:<38}{value}")
    if summary["proved"]:
        print("verified: every token and every logit equals sequential generation, bit for bit")


def speculative_rows(drafts: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The acceptance rate of each place, the first draft's first."""
    pairs = zip(drafts["accepted_at"], drafts["proposed_at"], strict=True)
    rows = [
        ("drafts proposed, accepted", f"{drafts['proposed']}, {drafts['accepted']}"),
        ("accepted by position", " ".join(f"{accepted / proposed:.0%}" for accepted, proposed in pairs) or "-"),
        ("mean accepted length", drafts["mean_accepted_length"]),
        ("request steps saved", drafts["steps_saved"]),
    ]
    if drafts["failures"]:
        rows.append(("requests whose drafter failed", drafts["failures"]))
    return rows


def as_json(model: LoadedModel, jobs: Sequence[Job], outputs: Outputs, summary: Mapping[str, Any]) -> dict[str, Any]:
    """The object that --json prints, whatever the number of prompts: commands/schemas/generate.schema.json."""
    rows = [dataclasses.asdict(dataclasses.replace(outputs[job.request_id], prompt=job.prompt)) for job in jobs]
    head = {"format_version": FORMAT_VERSION, "model": str(model.path), "numerics": model.numerics.name}
    return {**head, "outputs": rows, "summary": summary}


def written(sample: CompletionOutput) -> str:
    return ",".join(map(str, sample.token_ids)) if sample.text is None else sample.text


def one_line(text: str) -> str:
    return " ".join(text.split())
