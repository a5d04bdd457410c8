"""The two models of the page, and what they say about a run: its token ids, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lfm2np.engine.loading import Model, load
from lfm2np.errors import Lfm2npError, RequestError
from lfm2np.teaching.drawings.demo import Paper, hand_model, paper
from lfm2np.teaching.drawings.runs.recorded import texts
from lfm2np.teaching.lab.settings import NAMES, Problems, Settings, examine
from lfm2np.values import show

START = "<start>"


@dataclass(frozen=True, eq=False)
class Chosen:
    """One of the models. Without words it has a tokenizer."""

    model: Model
    words: Sequence[str]
    texts: Mapping[int, str]  # of every token


@dataclass(frozen=True, eq=False)
class Models:
    """What is made once, and the same for every run."""

    by_name: Mapping[str, Chosen]
    paper: Paper


def load_models() -> Models:
    trained = load()
    by_hand, words, _ = hand_model()
    return Models({"trained": chosen(trained, ()), "paper": chosen(by_hand, words)}, paper())


def chosen(model: Model, words: Sequence[str]) -> Chosen:
    return Chosen(model, words, texts(model, words, range(model.config.vocab_size)))


def understand(query: Sequence[tuple[str, str]], models: Models) -> Settings:
    """The run of a link, which fits. Problems with all that is wrong of it, by its words and by the models."""
    settings, problems = examine(query)
    if "" in problems:
        raise Problems(problems)
    fitting = fitting_problems(settings, models)
    if problems.keys() & {"block-size", "model"} or any(name.startswith(("tokens-", "prompt-")) for name in problems):
        fitting.pop("blocks", None)
    if "model" in problems:
        fitting = {}
    all_of_them = {**fitting, **problems}
    if all_of_them:
        raise Problems(all_of_them)
    return settings


def fitting_problems(settings: Settings, models: Models) -> dict[str, str]:
    """What the model's words, its context and the pool have against a run."""
    problems: dict[str, str] = {}
    model = models.by_name[settings.model].model
    context, needed, largest = model.config.max_position_embeddings, 0, 0
    for index, asked in enumerate(settings.requests):
        try:
            length = len(token_ids(asked.prompt, models.by_name[settings.model])) + asked.max_tokens
        except Lfm2npError as problem:
            problems[f"prompt-{index}"] = str(problem)
            continue
        if length > context:
            problems[f"prompt-{index}"] = (
                f"The prompt has {length - asked.max_tokens} tokens and may get {asked.max_tokens} more, expected at "
                f"most {context} together."
            )
        elif (blocks := -(-(length - 1) // settings.block_size)) > needed:  # the last token is never computed
            needed, largest = blocks, index
    if needed > settings.num_blocks:
        problems["blocks"] = (
            f"{settings.num_blocks} blocks of {settings.block_size} tokens: request {NAMES[largest]} alone needs "
            f"{needed}."
        )
    return problems


def token_ids(prompt: str, of: Chosen) -> list[int]:
    """Of text by the tokenizer; of words by their numbers, `<start>` first. RequestError for an unknown word."""
    if not of.words:
        return list(of.model.prompt_ids(prompt))
    words = prompt.split()
    words = words if words[:1] == [START] else [START, *words]
    for word in words:
        if word not in of.words:
            raise RequestError(f"{show(word)}: no word of the paper model, expected {' '.join(of.words)}.")
    return [of.words.index(word) for word in words]


def all_token_ids(settings: Settings, models: Models) -> dict[str, list[int]]:
    of = models.by_name[settings.model]
    return {NAMES[index]: token_ids(asked.prompt, of) for index, asked in enumerate(settings.requests)}
