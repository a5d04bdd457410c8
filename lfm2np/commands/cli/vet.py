"""`lfm2np vet URL --candidate NAME=DIR ...`: which checkpoint answers there?"""

from __future__ import annotations

import argparse
import contextlib
import sys

from lfm2np.commands.cli.shared import work
from lfm2np.commands.cli.shared.parser import Commands, add, add_command, require_folder
from lfm2np.commands.cli.shared.requests import read_lines
from lfm2np.commands.cli.shared.terminal import progress_bar, progress_bars, read_file, show_report
from lfm2np.engine.loading import Model, load
from lfm2np.engine.work.place import Place
from lfm2np.errors import RequestError
from lfm2np.oracle.report.as_text import section_text
from lfm2np.oracle.vet.api import (
    ALPHA,
    CLAIMED_SAMPLING,
    MAX_TOKENS,
    PLANNED,
    all_hypotheses,
    candidates_of,
    reply_file,
    run,
)
from lfm2np.oracle.vet.asking import Provider
from lfm2np.oracle.vet.hypotheses import Hypotheses
from lfm2np.oracle.vet.questions import Question, question_from_json
from lfm2np.oracle.vet.token_plan import Plan
from lfm2np.oracle.vet.vet_report import plan_section, report_of
from lfm2np.oracle.vet.vetting import SCORING, Bounds, Vetted
from lfm2np.values import require_count

EXIT_CODES = """exit codes:
  0    the claimed candidate is accepted: all others are rejected
  1    it is not the claim: another candidate, another prompt layout, or none of these
  2    undecided after the tokens that were allowed
  3    the test could not run
  130  interrupted; with --save the same command goes on"""
EXAMPLE = """lfm2np vet https://api.example.com --name lfm2-350m --candidate bf16=LFM2-350M \\
      --candidate q8=LFM2-350M-Q8_0.gguf --candidate q4=LFM2-350M-Q4_K_M.gguf --candidate kv8=LFM2-350M,kv=q8_0
  lfm2np vet --from answers.jsonl --candidate bf16=LFM2-350M --candidate q4=LFM2-350M-Q4_0.gguf
  lfm2np vet http://127.0.0.1:8080 --candidate bf16=LFM2-350M --candidate mine=./tuned --system "Be brief." \\
      --sampling "temperature=0.7 min_p=0.05" --sampling temperature=1 --save answers.jsonl"""


def run_vet(arguments: argparse.Namespace) -> None:
    """Prints the verdict. ProofError (1) if it is not the claim, InconclusiveError (2) if that can't be said.

    TargetError (3) for a provider that does not answer.
    """
    with contextlib.ExitStack() as stack:
        result = vet(arguments, stack)
    show_report(arguments, report_of(result))


def vet(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> Vetted:
    if (arguments.url is None) == (arguments.from_file is None):
        raise RequestError("expected either URL or --from FILE")
    require_folder(arguments, "html")
    max_tokens = require_count("--max-tokens", arguments.max_tokens, 1, None)
    bounds = Bounds(
        require_count("--tokens", arguments.tokens, 1, None),
        arguments.cost,
        arguments.prompt_price,
        arguments.answer_price,
    )
    if bounds.cost is not None and not bounds.prompt_price and not bounds.answer_price:
        raise RequestError("--cost goes with --prompt-price or --answer-price")
    questions = None if arguments.questions is None else questions_of(arguments)
    recorded = reply_file(arguments.from_file, arguments.save)

    def load_named(name: str, path: str) -> Model:
        with progress_bar(f"loading {name}") as show:
            return load(path, "exact", show, arguments.weights)

    hypotheses = all_hypotheses(
        candidates_of(arguments.candidate or (), load_named),
        arguments.claim,
        arguments.sampling or (CLAIMED_SAMPLING,),
        arguments.system,
        arguments.template or (),
        arguments.inserted_system or (),
    )
    provider = None
    if arguments.url is not None:
        provider = Provider(
            arguments.url,
            hypotheses.samplings[0],
            max_tokens,
            arguments.name,
            not arguments.completions,
            not arguments.no_logprobs,
            arguments.timeout,
            require_count("--at-once", arguments.at_once, 1, 256),
        )
        stack.callback(provider.close)

    def announce(plan: Plan) -> None:
        text = section_text(plan_section(hypotheses, plan, bounds, arguments.alpha))
        print(text + "\n", file=sys.stderr, flush=True)

    with progress_bars(SCORING) as shown:
        return run(
            hypotheses,
            bounds,
            provider,
            recorded,
            questions=questions,
            system=arguments.system,
            chat=not arguments.completions,
            max_tokens=max_tokens,
            alpha=arguments.alpha,
            logprobs=not arguments.no_logprobs,
            seed=require_count("--seed", arguments.seed, 0, None),
            keep=arguments.save is not None,
            num_planned=require_count("--planned", arguments.planned, 1, None),
            places=places_of(hypotheses, arguments, stack),
            progress=shown,
            announce=announce,
        )


def places_of(hypotheses: Hypotheses, arguments: argparse.Namespace, stack: contextlib.ExitStack) -> list[Place]:
    """By candidate: the same processes or cluster for those of one checkpoint."""
    options = argparse.Namespace(**{**vars(arguments), "save": None})  # which keeps answers, not what is computed
    places, by_model = [], dict[int, Place]()
    for candidate in hypotheses.candidates:
        model = candidate.model
        assert isinstance(model, Model)
        if id(model) not in by_model:
            by_model[id(model)] = stack.enter_context(work.place_of(options, model))
        places.append(by_model[id(model)])
    return places


def questions_of(arguments: argparse.Namespace) -> list[Question]:
    source = arguments.questions
    return read_lines(
        read_file(source), source, lambda raw, name: question_from_json(dict(raw), f"line {name}", arguments.system)
    )


def add_vet(commands: Commands) -> None:
    text = "tell which checkpoint answers behind an API, from sampled answers, at a stated error"
    parser = add_command(commands, "vet", run_vet, text, EXAMPLE, False, exit_codes=EXIT_CODES, is_verdict=True)
    add(parser, "URL", "http(s)://HOST[:PORT][/PATH] of an OpenAI API; its key is read from LFM2NP_API_KEY", nargs="?")
    add(parser, "--from FILE", "judge the answers in FILE instead, one JSON object a line", dest="from_file")
    candidate_help = (
        "NAME=DIR or NAME=FILE.gguf, with ,kv=q8_0 or ,kv=q4_0 behind it for a coarser cache; may be repeated; the "
        "first is the claim"
    )
    add(parser, "--candidate C", candidate_help, action="append", required=True)
    add(parser, "--claim NAME", "the candidate that is claimed (the first)")
    sampling_help = (
        f'how to sample, such as "temperature=0.7 top_p=0.9" ({CLAIMED_SAMPLING}); repeated: other ways in which the '
        "provider may do it"
    )
    add(parser, "--sampling TEXT", sampling_help, action="append")
    system_help = "system message of every question; that the provider leaves it out is then a hypothesis"
    add(parser, "--system TEXT", system_help)
    add(parser, "--inserted-system TEXT", "hypothesis: the provider inserts this system message", action="append")
    add(parser, "--template FILE", "hypothesis: the chat template in FILE is used", action="append")
    add(parser, "--questions FILE", "ask these, one JSON object a line: messages or prompt (open questions)")
    add(parser, "--completions", "use /v1/completions, not /v1/chat/completions")
    add(parser, "--no-logprobs", "neither request nor use log-probabilities")
    add(parser, "--max-tokens N", f"of an answer ({MAX_TOKENS})", default=MAX_TOKENS)
    add(parser, "--tokens N", "most answer tokens to pay for (4000)", default=4000)
    add(parser, "--cost S", "most to pay, by the prices below", type=float)
    add(parser, "--prompt-price S", "of a million prompt tokens", default=0.0)
    add(parser, "--answer-price S", "of a million answer tokens", default=0.0)
    add(parser, "--alpha S", f"probability of rejecting what is true ({ALPHA:g})", default=ALPHA)
    add(parser, "--planned N", f"answers that the plan samples from the claim ({PLANNED})", default=PLANNED)
    add(parser, "--seed N", "seed of questions and plan (0)", default=0)
    add(parser, "--name NAME", "model name, for a server with more than one")
    add(parser, "--timeout S", "seconds for an answer (120)", default=120.0)
    add(parser, "--at-once N", "requests in flight together (4)", default=4)
    add(parser, "--save FILE", "keep answers as they come, and use those in FILE first")
    add(
        parser,
        "--weights",
        "resident in memory, or streamed (resident)",
        choices=("resident", "streamed"),
        default="resident",
    )
    work.add_executor_options(parser)
    add(parser, "--html FILE", "write an HTML report")
