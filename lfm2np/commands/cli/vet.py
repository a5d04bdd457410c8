"""`lfm2np vet TARGET --candidate NAME=PATH ...`: which checkpoint answers there?"""

from __future__ import annotations

import argparse

from lfm2np.commands.cli.shared import work
from lfm2np.commands.cli.shared.parser import Commands, add, add_command, require_at_least, require_times, to_extend
from lfm2np.commands.cli.shared.terminal import add_report, progress_bar, progress_bars, read_file, show_report
from lfm2np.engine.loading import load
from lfm2np.errors import RequestError
from lfm2np.oracle.vet.vetting import ALPHA, JUDGING, MAX_TOKENS, TOKENS, vetted

EXAMPLE = """lfm2np vet http://127.0.0.1:8000 --candidate bf16=LFM2-350M --candidate q4=LFM2-350M-Q4_K_M.gguf
  lfm2np vet https://api.example.com --chat --name lfm2-350m --candidate bf16=LFM2-350M --candidate mine=./tuned \\
      --sampling temperature=1 --sampling "temperature=1 top_k=40" --save answers.jsonl
  lfm2np vet answers.jsonl --candidate bf16=LFM2-350M --candidate q8=LFM2-350M-Q8_0.gguf"""


def run_vet(arguments: argparse.Namespace) -> None:
    """Prints the verdict. ProofError (1) if it is not the claim, InconclusiveError (2) if that can't be said.

    TargetError (3) for an engine that does not answer.
    """
    require_at_least(arguments, max_tokens=1, tokens=1, seed=0, at_once=1)
    require_times(arguments, "timeout")
    pairs = [text.partition("=")[::2] for text in arguments.candidate]
    paths = dict(pairs)
    if len(paths) < len(pairs) or not all(name and path for name, path in pairs):
        raise RequestError(f"--candidate {', '.join(arguments.candidate)}: expected NAME=PATH, each name once")
    questions = None if arguments.questions is None else read_file(arguments.questions).splitlines()
    candidates = {}
    for name, path in paths.items():
        with progress_bar(f"loading {name}") as show:
            candidates[name] = load(path, "exact", show)
    names = ("chat", "max_tokens", "tokens", "alpha", "seed", "name", "timeout", "at_once", "save")
    options = {name: getattr(arguments, name) for name in names}
    arguments.save = None  # answers, not what is computed
    with work.place_of(arguments, None) as place, progress_bars(JUDGING) as shown:
        report = vetted(
            arguments.target,
            candidates,
            arguments.sampling or (),
            questions=questions,
            place=place,
            progress=shown,
            **options,
        )
    show_report(arguments, report)


def add_vet(commands: Commands) -> None:
    text = "tell which checkpoint answers behind an API, from sampled answers, at a stated error"
    parser = add_command(commands, "vet", run_vet, text, EXAMPLE, False, is_verdict=True)
    add(parser, "TARGET", "an engine, as in lfm2np check, or FILE.jsonl; an API key is read from LFM2NP_API_KEY")
    candidate_help = "a directory or GGUF file, and its name in the report; may be repeated; the first is the claim"
    add(parser, "--candidate NAME=PATH", candidate_help, action="append", required=True)
    sampling_help = (
        'how to sample, such as "temperature=0.7 top_p=0.9" (temperature=1; of a file: as its requests say); repeated: '
        "other ways in which the provider may do it"
    )
    add(parser, "--sampling TEXT", sampling_help, action="append")
    add(parser, "--chat", "use /v1/chat/completions: the provider lays out the prompts")
    add(parser, "--questions FILE", "send these, one a line, instead of the open ones that come with it")
    add(parser, "--max-tokens N", f"tokens of a response ({MAX_TOKENS})", default=MAX_TOKENS)
    add(parser, "--tokens N", f"ends with the round in which so many tokens are judged ({TOKENS})", default=TOKENS)
    add(parser, "--alpha S", f"probability of rejecting what is true ({ALPHA:g})", default=ALPHA)
    add(parser, "--seed N", "seed of the questions' order (0)", default=0)
    add(parser, "--name NAME", "model name, for a server with more than one")
    add(parser, "--timeout S", "seconds for a response (120)", default=120.0)
    add(parser, "--at-once N", "most requests in flight together (as the engine reports)", type=int)
    add(parser, "--save FILE", "save requests and responses by rounds, and go on with what FILE has", type=to_extend)
    work.add_workers(parser)
    add_report(parser)
