"""What commands that take a model and a prompt share: their options, and what these give."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence

from lfm2np.arithmetic import NAMES, TRUTH
from lfm2np.checkpoint.loaded import WEIGHTS
from lfm2np.commands.cli.shared.parser import add
from lfm2np.commands.cli.shared.terminal import parse_ids, progress_bar, read_file
from lfm2np.engine.loading import Model, load
from lfm2np.errors import RequestError

LOADED = ("numerics", "weights", "tokenizer", "rope")  # options that say how, as far as a command has them


def load_model(arguments: argparse.Namespace) -> Model:
    """The model of --model, in exact arithmetic unless the command has an option for another."""
    given = vars(arguments)
    with progress_bar("loading") as show:
        return load(given.get("model"), progress=show, **{name: given[name] for name in LOADED if name in given})


def prompt_ids(model: Model, arguments: argparse.Namespace) -> list[int]:
    """Of the only prompt."""
    require_chat(arguments)
    ((ids, _, _),) = prompts(model, arguments)
    return model.prompt_ids(ids)


def prompts(model: Model, arguments: argparse.Namespace) -> Iterator[tuple[list[int], str | None, str]]:
    """Ids, the text that they are of if it is a plain prompt, and what is shown of it."""
    for text in each(arguments.prompt):
        yield model.prompt_ids(text), text, text
    for text in each(arguments.chat):
        yield model.tokenizer.encode_chat(messages_of(text, arguments.system)), None, text
    if arguments.prompt_file is not None:
        text = read_file(arguments.prompt_file)
        yield model.prompt_ids(text), text, text
    if arguments.prompt_ids is not None:
        yield parse_ids(arguments.prompt_ids, "--prompt-ids"), None, arguments.prompt_ids.strip()


def each(given: str | Sequence[str] | None) -> Sequence[str]:
    """Of an option that may be there once, or, if `many`, several times."""
    return (given,) if isinstance(given, str) else given or ()


def require_chat(arguments: argparse.Namespace) -> None:
    if arguments.system is not None and arguments.chat is None:
        raise RequestError("--system goes with --chat")


def messages_of(text: str, system: str | None) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": text}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def completion_ids(model: Model, arguments: argparse.Namespace) -> list[int]:
    """The tokens of --completion or --completion-ids, none without either."""
    if arguments.completion_ids is not None:
        return model.prompt_ids(parse_ids(arguments.completion_ids, "--completion-ids"))
    return model.tokenizer.encode_more(arguments.completion) if arguments.completion is not None else []


def named(model: Model) -> dict[str, str]:
    """The first fields of the JSON object of a command that computes with a model."""
    return {"model": str(model.path), "numerics": model.numerics.name}


def text_argument(word: str) -> str:
    """An argument as UTF-8, whatever the locale took its bytes for. Not for file names, which the locale must read."""
    try:
        return os.fsencode(word).decode()
    except UnicodeError:  # not UTF-8: what needs text names the place
        return word


def add_prompt_options(parser: argparse.ArgumentParser, many: bool = False) -> argparse._MutuallyExclusiveGroup:
    """`many` lets --prompt and --chat be repeated, and adds --requests. Returns the group that one is taken of."""
    action, again = ("append", "; may be repeated") if many else ("store", "")
    group = parser.add_mutually_exclusive_group(required=True)
    add(group, "--prompt TEXT", "plain text; the BOS is added" + again, type=text_argument, action=action)
    add(group, "--prompt-file FILE", "the same from a file, - for standard input")
    chat_help = "user message, rendered by the checkpoint's chat template" + again
    add(group, "--chat TEXT", chat_help, type=text_argument, action=action)
    if many:
        add(group, "--requests FILE", "one JSON object a line: prompt or prompt_token_ids, ...")
    add(group, "--prompt-ids IDS", "token ids separated by commas, used as they are")
    add(parser, "--system TEXT", "system message before --chat", type=text_argument)
    return group


def add_weights_option(parser: argparse.ArgumentParser) -> None:
    text = "resident in memory, or streamed: kept as stored, converted for each product, slow but small (resident)"
    add(parser, "--weights", text, choices=WEIGHTS, default="resident")


def add_arithmetic_options(parser: argparse.ArgumentParser) -> None:
    alone = (
        "arithmetic of lfm2np itself (exact); integers is the definition that exact has to equal, for one sequence at "
        "a time. The number format of another engine is --format of check, --number-format of the property suite"
    )
    add(parser, "--numerics", alone, choices=(*NAMES, TRUTH), default="exact")
    add_weights_option(parser)
