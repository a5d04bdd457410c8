"""How arguments are read: a mistake in them is one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from lfm2np.checkpoint.config_json import READINGS
from lfm2np.errors import RequestError, WorkerError
from lfm2np.oracle.engines.target import TargetError

EXIT_CODES = """exit codes of check, fuzz, locate, rollouts, vectors and vet, which judge:
  0    right: every difference is within what the number format explains; the claim is accepted; done
  1    wrong
  2    no verdict: what is judged was not reported, or too little of it
  3    could not run: arguments, checkpoint, engine, memory, or a file or output that can't be read or written

exit codes of the others:
  0    done; a server that was interrupted has completed its requests
  1    a proof or a replay found a difference, standard output can't be written, or memory ran out
  2    the arguments or the request cannot be met (unknown option, id outside the vocabulary, a port in use, an
       option's FILE that can't be written)
  3    config, weights or tokenizer are missing, corrupt or not LFM2, or a trace can't be read
  4    a value is not finite, or a product could not be computed exactly

130  interrupted"""
OF_VERDICTS = "exit codes: 0 right, 1 wrong, 2 no verdict, 3 could not run, 130 interrupted"
OF_OTHERS = "exit codes: 0 done, 1 to 4 failed (see lfm2np --help), 130 interrupted"

KINDS = {"N": int, "K": int, "P": int, "S": float, "T": float, "R": float}  # of values, by their letter in the help
WIDTH = 110  # of help texts
MOST_TIME = 1e6  # of seconds or minutes
LIKE = 0.7  # of difflib: from here on a word may be meant
Command = Callable[[argparse.Namespace], None]
MODEL_HELP = "checkpoint directory, or a GGUF file (default: the trained fixture)"
ROPE_HELP = (
    f'{" or ".join(READINGS)}: an LFM3\'s partial rotation that config.json labels "default", as it was trained or as '
    "transformers computes it"
)
TOKENIZER_HELP = "directory with another tokenizer.json and chat template"


def discard_output() -> None:
    """Nothing more can be written, nor flushed when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str, code: int) -> int:
    with contextlib.suppress(OSError):
        print(f"lfm2np: {one_line(message)}", file=sys.stderr, flush=True)
    return code


def one_line(message: str) -> str:
    """A message as a terminal may show it: a template, a server or a file name may hold control characters."""
    return "".join(c if c.isprintable() else f"<U+{ord(c):04X}>" for c in " ".join(message.split()))


def meant(word: str, known: Iterable[str]) -> str:
    """; did you mean ...? with the known word that is most like it, if one is."""
    by_letters = {name.lstrip("-"): name for name in known}
    near = difflib.get_close_matches(word.lstrip("-"), by_letters, 1, LIKE)
    return f"; did you mean {by_letters[near[0]]}?" if near else ""


class Help(argparse.RawDescriptionHelpFormatter):
    """As wide as the terminal, at most WIDTH; the usage leaves the options to the list below it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        words = [self._words(action) for action in actions if not action.option_strings]
        return super()._format_usage(" ".join(["%(prog)s [options]", *words]), actions, groups, prefix)

    def _words(self, action: argparse.Action) -> str:
        return self._format_args(action, self._get_default_metavar_for_positional(action))


class Once(argparse._StoreAction):
    """An option whose first value would be lost if it were given twice."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, option: str | None = None) -> None:
        if option in parser.given:
            raise argparse.ArgumentError(self, "given twice")
        parser.given.update(self.option_strings)
        super().__call__(parser, namespace, value, option)


class OneLineParser(argparse.ArgumentParser):
    usage_exit_code = RequestError.exit_code

    def __init__(self, **more: Any) -> None:
        super().__init__(**more, allow_abbrev=False)
        self.given: set[str] = set()
        for name in (None, "store"):
            self.register("action", name, Once)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.given.clear()
        return super().parse_known_args(args, namespace)

    def parse_args(
        self, args: Any = None, namespace: Any = None
    ) -> Any:  # as argparse's, but the command that is run refuses its unknown options, with the one that was meant
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = command_parser(self, parsed)
            options = [word for action in parser._actions for word in action.option_strings]
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{meant(unknown[0].partition('=')[0], options)}")
        refuse_overwriting(command_parser(self, parsed), parsed)
        return parsed

    def error(self, message: str) -> NoReturn:
        if choice := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message, re.DOTALL):
            message += meant(choice[1], re.findall(r"[\w.-]+", choice[2]))
        raise SystemExit(fail(f"{message} (see {self.prog} --help)", self.usage_exit_code))


def command_parser(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> argparse.ArgumentParser:
    """That of the command that is run, and of its command (make or verify) if it has some."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return command_parser(action.choices[getattr(parsed, action.dest)], parsed)
    return parser


def option(name: str) -> str:
    """As the command line spells it: --max-num-seqs of max_num_seqs."""
    return f"--{name.replace('_', '-')}"


def add_modes(parser: argparse.ArgumentParser, modes: Mapping[str, Sequence[str]]) -> None:
    """Options that a mode of the command does not use, by the words that say so: see `refuse_unused`."""
    unused = {words: {name: parser.get_default(name) for name in names} for words, names in modes.items()}
    parser.set_defaults(unused=unused)


def refuse_unused(arguments: argparse.Namespace, *modes: str) -> None:
    """RequestError that names the first option that is given though one of these modes does not use it."""
    for words in modes:
        for name, default in arguments.unused[words].items():
            if getattr(arguments, name) != default:
                raise RequestError(f"{option(name)}: {words}")


def require_at_least(arguments: argparse.Namespace, **least: int) -> None:
    """RequestError for an option that is there and smaller."""
    for name, smallest in least.items():
        value = getattr(arguments, name)
        if value is not None and value < smallest:
            raise RequestError(f"{option(name)} {value}: expected at least {smallest}")


def require_times(arguments: argparse.Namespace, *names: str) -> None:
    """RequestError for a time that is there and not a number above 0 that clocks can hold."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not 0 < value <= MOST_TIME:
            raise RequestError(f"{option(name)} {value}: expected more than 0 and at most {MOST_TIME:g}")


def to_write(text: str) -> str:
    """The `type` of an option for a file that is written: refused before hours of work if that can't be."""
    path = Path(text)
    try:
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text}: a directory, expected a file")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text}: {path.parent}: no such directory")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise argparse.ArgumentTypeError(f"{text}: can't be written")
        if not path.exists():  # root has access to all, and yet /proc takes no file
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as problem:
        raise argparse.ArgumentTypeError(f"{text}: can't be written: {problem.strerror}") from None
    return text


def to_extend(text: str) -> str:
    """The same for a file whose content is read and kept, so that it may be an input, too."""
    return to_write(text)


def refuse_overwriting(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Ends where an output would take the place of a file that another argument names."""
    files = []
    for action in parser._actions:
        value = getattr(parsed, action.dest, None)
        paths = [Path(str(name)) for name in (value if isinstance(value, list | tuple) else [value]) if is_file(name)]
        if action.type in (None, to_write, to_extend):  # no text of a prompt
            files += [(action, path) for path in paths]
    for output, path in files:
        others = [other_path for other, other_path in files if other.dest != output.dest]
        if output.type is to_write and any(map(path.samefile, others)):
            parser.error(f"argument {'/'.join(output.option_strings)}: {path} is another argument's file")


def is_file(name: Any) -> bool:
    """Whether a value of an argument, whatever it is, names a file."""
    return isinstance(name, str | Path) and os.path.isfile(name)  # noqa: PTH113 - Path's raises for a name too long


def add(parser: argparse._ActionsContainer, words: str, text: str, **more: Any) -> None:
    """An option as its help shows it: "--port N" takes a whole number, "--timeout S" a float, "--output DIR" a text;
    "--quick" is a switch, and "TARGET" an argument without a name."""
    *names, last = words.split()
    if last.startswith("-"):
        names.append(last)
        more |= {} if "choices" in more else {"action": "store_true"}
    else:
        names = names or [last.lower()]
        more = {"metavar": last, "type": KINDS.get(last), **more}
    parser.add_argument(*names, help=text, **more)


def add_model(parser: argparse._ActionsContainer, text: str = MODEL_HELP, **more: Any) -> None:
    """--model, and how its config.json is read where there are two readings."""
    add(parser, "--model DIR", text, **more)
    add(parser, "--rope READING", ROPE_HELP, choices=READINGS, **({"default": READINGS[0]} | more))


Commands: TypeAlias = "argparse._SubParsersAction[OneLineParser]"


def add_command(
    commands: Commands,
    name: str,
    run: Command,
    text: str,
    example: str,
    model: bool = True,
    tokenizer: bool = False,
    is_verdict: bool = False,
) -> OneLineParser:
    """A new command of the program, with --json and, unless it says otherwise, --model. Returns its parser.

    is_verdict  exit codes 1 and 2 are verdicts on an engine; what keeps the command from judging it is 3
    """
    parser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=f"example:\n  {example}\n\n{OF_VERDICTS if is_verdict else OF_OTHERS}",
        formatter_class=Help,
    )
    if is_verdict:
        parser.usage_exit_code = TargetError.exit_code
    parser.set_defaults(run=judging(run) if is_verdict else run, is_verdict=is_verdict)
    if model:
        add_model(parser)
    if tokenizer:
        add(parser, "--tokenizer DIR", TOKENIZER_HELP)
    add(parser, "--json", "print one JSON object")
    return parser


def judging(run: Command) -> Command:
    """The command; TargetError (3) for what can't be met, and for a lost worker, which says nothing of the engine."""

    def run_or_target_error(arguments: argparse.Namespace) -> None:
        try:
            run(arguments)
        except (RequestError, WorkerError) as error:
            raise TargetError(str(error)) from None

    return run_or_target_error
