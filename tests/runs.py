"""One random run of the engine, for the tests of the engine and of speculation."""

import random

import numpy as np

from lfm2np import Engine, SamplingParams
from lfm2np.engine.loading import Model
from lfm2np.engine.outputs import RequestOutput
from lfm2np.engine.sampling.choice import request_seed
from lfm2np.engine.sequential import first_difference
from lfm2np.suite.audit import AuditedEngine
from scheduler import POLICIES, check

BLOCK_SIZES = (1, 2, 3, 5, 16, 64)
LONGEST_PROMPT, MOST_TOKENS = 40, 12


class Run:
    """One random run: requests, arrivals and sizes from a seed; every output is kept with its logits.

    `options` are those of Engine. Its blocks are counted after each step, and read if it is audited.
    """

    def __init__(self, model: Model, seed: int, is_audited: bool = True, **options: object) -> None:
        self.model, self.choice = model, random.Random(seed)
        self.rows: dict[str, list[np.ndarray]] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self.requests = self.draw_requests()
        block_size = self.choice.choice(BLOCK_SIZES)
        least = -(-(LONGEST_PROMPT + MOST_TOKENS) // block_size)
        chosen: dict[str, object] = {
            "block_size": block_size,
            "num_blocks": self.choice.choice([least, least + self.choice.randint(0, 40), 300]),
            "max_num_seqs": self.choice.choice([1, 2, 3, 8, 64]),
            "max_num_batched_tokens": self.choice.choice([1, 2, 3, 7, 16, 64, 500]),
            "policy": self.choice.choice(sorted(POLICIES)),
            "prefix_caching": self.choice.random() < 0.7,
        }
        engine = AuditedEngine if is_audited else Engine
        self.engine = engine(model, on_logits=self.keep, **(chosen | options))  # type: ignore[arg-type]

    def keep(self, name: str, position: int, row: np.ndarray, token: int) -> None:
        self.rows.setdefault(name, []).append(np.array(row))

    def draw_requests(self) -> dict[str, tuple[int, list[int], SamplingParams]]:
        vocabulary, choice = self.model.config.vocab_size, self.choice
        common = [choice.randrange(vocabulary) for _ in range(20)]
        requests = {}
        for index in range(choice.choice([3, 8, 12])):
            length = choice.randint(1, LONGEST_PROMPT)
            suffix = [choice.randrange(vocabulary) for _ in range(length)]
            requests[f"q{index}"] = (
                choice.randint(0, 60),
                (common[: choice.randint(0, length)] + suffix)[:length],
                self.draw_params(),
            )
        return requests

    def draw_params(self) -> SamplingParams:
        choice = self.choice
        greedy = choice.random() < 0.4
        return SamplingParams(
            n=1 if greedy else choice.choice([1, 1, 3]),
            temperature=0.0 if greedy else choice.choice([0.5, 1.0, 3.0]),
            top_k=choice.choice([0, 5]),
            top_p=choice.choice([1.0, 0.8]),
            min_p=choice.choice([0.0, 0.1]),
            repetition_penalty=choice.choice([1.0, 1.2]),
            max_tokens=choice.randint(1, MOST_TOKENS),
            seed=choice.choice([None, 3]),
            profile=choice.choice(["vllm", "transformers"]),
            prompt_logprobs=choice.choice([None, None, 1]),
            ignore_eos=choice.random() < 0.5,
        )

    def go(self, abort_rate: float = 0.04) -> None:
        left = sorted(self.requests.items(), key=lambda item: item[1][0])
        step, alive = 0, []
        while left or self.engine.has_unfinished:
            while left and left[0][1][0] <= step:
                name, (_, ids, params) = left.pop(0)
                self.engine.add_request(name, ids, params, priority=self.choice.randint(0, 2))
                alive.append(name)
            for output in self.engine.step():
                self.outputs[output.request_id] = output
                if output.finished:
                    alive.remove(output.request_id)
            check(self.engine.scheduler)
            if alive and self.choice.random() < abort_rate:
                name = alive.pop(self.choice.randrange(len(alive)))
                self.outputs[name] = self.engine.abort(name)
            step += 1

    def require_equal_to_the_reference(self) -> None:
        for name, (_, ids, params) in self.requests.items():
            seed = request_seed(params, 0, name)
            for sample in self.outputs[name].outputs:
                sample_name = name if sample.index == 0 else f"{name}#{sample.index}"
                rows = self.rows.get(sample_name, [])
                assert len(rows) == len(sample.token_ids)
                assert first_difference(self.model, ids, params, seed, sample.index, sample.token_ids, rows) is None, (
                    sample_name
                )
