"""One fault: the first cause that the report names is its. Two at once: what each breaks by itself.

What a fault is expected to break stands in its sentence in the catalogue; the tables say how the report puts it. The
engine is lfm2np's own in float64, so fine beside the declared float32 that the errors are the faults' alone.
"""

from __future__ import annotations

import contextlib
import html
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from engines import planted
from faults import Fault, by_name, inject

import lfm2np
from lfm2np.engine.loading import Model
from lfm2np.oracle.check import Checked, judged
from lfm2np.oracle.check_report import report_of
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import Trace, changed
from lfm2np.oracle.engines.target import Abilities
from lfm2np.oracle.judging import constants
from lfm2np.oracle.judging.scored import Known
from lfm2np.oracle.judging.verdict import Verdict
from lfm2np.oracle.report.as_html import as_html
from lfm2np.oracle.report.as_json import as_json
from lfm2np.oracle.report.as_junit import as_junit
from lfm2np.oracle.report.as_text import as_text
from lfm2np.oracle.sending import answered
from lfm2np.oracle.workloads import Writer, noted, rounds

pytestmark = [pytest.mark.rounding, pytest.mark.slow]  # the noise of the declared format

TORTURE = Path(__file__).parents[2] / "fixtures" / "torture" / "minimal_config"
CASES = ("short-prompts", "borders", "neighbours", "slot-reuse", "prefixes", "families")
LONGEST, NEW = 60, 3  # tokens of a prompt, and new ones: what a fault needs to show, and little more
MOST_ROUNDS = {"neighbours": 3, "slot-reuse": 6}  # of a case: the others say the same again
KNOWN = Known()


@cache
def model() -> Model:
    return lfm2np.load(TORTURE)


@cache
def plan() -> list[Trace]:
    kept, counts = [], Counter[str]()
    for batch in rounds(Writer(model().config, None, 4), CASES):
        case = batch.requests[0].case
        counts[case] += 1
        requests = [
            changed(request, max_tokens=NEW) for request in batch.requests if len(request.prompt_token_ids) <= LONGEST
        ]
        if requests and counts[case] <= MOST_ROUNDS.get(case, counts[case]):
            kept.append(Trace(tuple(requests)))
    return noted(kept)


@cache
def checked(*faults: str | Fault) -> Checked:
    """What comes of the engine with these faults. Their edits are of different functions: each replaces one whole."""
    all_edits = [(by_name(fault) if isinstance(fault, str) else fault).edits for fault in faults]
    places = [edit.where for edits in all_edits for edit in edits]
    assert len(set(places)) == len(places)
    with contextlib.ExitStack() as injected:
        for fault in faults:
            injected.enter_context(inject(fault))
        target = PythonTarget("engines:small_steps", TORTURE)
        pairs = [pair for round_ in plan() for pair in answered(target, round_, None)]
    with pytest.MonkeyPatch.context() as patch:
        if len(faults) > 1:  # a single fault shows that no constant is named in its place
            patch.setattr(constants, "MOST_PRODUCTS", 0)
        result = judged(model(), Abilities("faulty"), "float32", pairs, known=KNOWN)
    assert result.total.verdict is Verdict.BUG
    return result


EMBEDDED = "segment.entry.token_ids], np.int64)"
IDS_OF_SIX_BITS = planted("lfm2np.engine.step:forward", EMBEDDED, f"{EMBEDDED} % 64")
FIRST: dict[str | Fault, tuple[str, str]] = {
    # what the first cause says, and points to
    "positions-stop-at-40": ("wrong from position ", "state, positions, or the border"),
    "rotation-backwards": ("wrong from position ", "attention or rotation of positions"),
    "feed-forward-residual-missing": ("wrong everywhere", "or a wrong operator"),
    IDS_OF_SIX_BITS: ("wrong once a token id is 64 or more", "rows of the embedding or the head"),
}


@pytest.mark.parametrize("fault", FIRST, ids=lambda case: case if isinstance(case, str) else case.name)
def test_the_first_cause_of_one_fault_is_its_own(fault: str | Fault) -> None:
    words, suspect = FIRST[fault]
    total = checked(fault).total
    first = total.causes[0]
    assert first.where.startswith(words) and suspect in first.suspect, total.causes
    assert total.reasons[0] == first.line and len(total.causes) <= 3


BESIDE, LATER, WARM = "only beside other requests", "later in a batch", "were asked before"
PAIRS = (  # of faults, with what each breaks
    {"state-dropped-after-the-prompt": "decode", "left-padding-enters-the-convolution": BESIDE},
    {"prompt-logprobs-off-by-one": "at the prompts' own tokens", "prefix-hit-without-its-state": WARM},
    {"convolution-crosses-requests": LATER, "checkpoint-taken-before-the-chunk": WARM},
    {
        "state-zeroed-when-the-batch-is-repacked": LATER,
        "one-token-prompt-reads-the-previous-tenants-state": "prompts of fewer than 2 tokens",
    },
)


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_of_two_faults_both_are_named(pair: dict[str, str]) -> None:
    causes = checked(*pair).total.causes
    wrong = {cause.line: cause.where.partition(", right ")[0] for cause in causes}
    one, other = ([line for line, where in wrong.items() if words in where] for words in pair.values())
    assert len({*one, *other}) == 2 and len(one) == len(other) == 1, causes
    assert not any("wrong everywhere" in line for line in wrong)


def test_the_published_pipeline_is_described_in_every_form_of_the_report() -> None:
    """The state is lost between prefill and decode, and beside others only the first of a batch is right in prefill."""
    result = checked("state-dropped-after-the-prompt", "convolution-crosses-requests")
    expected = [
        "certain: wrong in decode, right in prefill, alone or first of a batch: what prefill leaves behind is not what "
        "decode expects",
        "certain: also wrong by itself: later in a batch: requests of a batch read or write each other's rows, blocks "
        "or slots, or are preempted and resumed wrongly",
    ]
    shown = report_of(result)
    report = as_json(shown)["figures"]
    forms = [html.unescape(form(shown)) for form in (as_text, as_html, as_junit)]
    for line in expected:
        assert line in result.total.reasons and line in report["suspects"] and all(line in form for form in forms)
    assert result.total.reasons[0] == shown.findings[0].words == expected[0]
    assert report["causes"][0]["sure"] == "certain" and report["causes"][0]["chance"] < 1e-9
    assert "wrong everywhere" not in forms[0]
