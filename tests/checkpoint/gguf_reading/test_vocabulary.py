"""The tokenizer of a GGUF's own tables is that of the tokenizer.json that they were made of; damaged ones are named."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from blocks_drawn import quantised_tensors
from gguf_file import BOOL, F32, STRING, U32, gguf_bytes
from hypothesis import example, given
from hypothesis import strategies as st
from quantise import LFM2_IN_OTHER_WORDS
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Tokenizers
from vocabularies import (
    ADDED,
    LFM2_SPLIT,
    ODD,
    PATTERNS,
    TRAINED,
    UNUSED,
    config_of,
    keys_of,
    raw_tokenizer,
    trained_keys,
    write_directory,
    write_file,
    write_gguf,
)

import lfm2np
from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.files import read_tokenizer
from lfm2np.checkpoint.gguf.container import open_container
from lfm2np.checkpoint.gguf.vocabulary import tokenizer_json
from lfm2np.checkpoint.text.tokenizer import load_tokenizer
from lfm2np.commands.cli.program import main
from lfm2np.errors import RequestError, TokenizerError

pytestmark = pytest.mark.slow

TABLES = "tokenizer.ggml."
LETTERS = "'sStTdDmMlLvVeErRK\u017f\u212aaZ190\u0664\u00bd\u4e2d\u0301 \t\n\r\x0b\u2003!-.<|>"
AROUND_SPLITS = st.text(st.sampled_from(LETTERS))


# --- the same tokenizer


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_tables_make_the_tokenizer_that_they_were_made_of(pattern: str, tmp_path: Path) -> None:
    """The same tokenizer.json: so ids and texts are the same, which a few odd texts show."""
    directory, config = write_directory(tmp_path / "hf", pattern), config_of()
    path = write_file(tmp_path / "x.gguf", keys_of(directory))
    expected = raw_tokenizer(directory)
    actual = json.loads(Tokenizers.from_str(tokenizer_json(open_container(path), config)).to_str())
    for key in ("merges", "ignore_merges", "byte_fallback", "fuse_unk", "dropout", "unk_token"):
        assert actual["model"][key] == expected["model"][key], key
    added = {token["content"] for token in expected["added_tokens"]}  # stand in the vocabulary, too, or do not
    vocabularies = [raw["model"]["vocab"].items() for raw in (actual, expected)]
    rest = [{text: token_id for text, token_id in items if text not in added} for items in vocabularies]
    assert rest[0] == rest[1]
    for key in ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder"):
        assert actual[key] == expected[key], key
    theirs, ours = load_tokenizer(directory, config), read_tokenizer(path, config)
    for text in ODD:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids and ours.encode_more(text) == theirs.encode_more(text)
        assert ours.decode(ids) == theirs.decode(ids)
    for token_id in range(config.vocab_size):
        assert ours.token(token_id) == theirs.token(token_id)
        assert ours.token_bytes(token_id) == theirs.token_bytes(token_id)
    assert ours.token(config.vocab_size - 1) is None  # a row without an entry
    for text in ADDED:
        (token_id,) = ours.encode_more(text)
        assert ours.decode([token_id]) == text  # which is not special
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "12 + 34\n\n it's?"}]
    assert ours.encode_chat(messages) == theirs.encode_chat(messages)
    assert ours.chat.special_tokens == theirs.chat.special_tokens
    assert ours.chat.template == theirs.chat.template is not None


# --- the pattern


@given(text=AROUND_SPLITS)
@example("a \n \r b")
@example("\n\n\n \t x'\u017fs'LL'ves")
def test_the_pattern_of_the_larger_vocabulary_splits_alike(text: str) -> None:
    ours, other = (
        pre_tokenizers.Split(Regex(words), behavior="isolated") for words in (LFM2_SPLIT, LFM2_IN_OTHER_WORDS)
    )
    assert ours.pre_tokenize_str(text) == other.pre_tokenize_str(text)


# --- which tokenizer is taken


def other_entry(directory: Path) -> Path:
    """The fixture's tokenizer in a new directory, with one merge less."""
    raw = raw_tokenizer(TRAINED)
    raw["model"]["merges"].remove(["h", "a"])
    raw["model"]["merges"] = [merge for merge in raw["model"]["merges"] if "ha" not in merge[0] + merge[1]]
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    return directory


def test_a_named_directory_wins_then_what_lies_beside_then_the_tables(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", trained_keys())
    text = "hat"
    model = lfm2np.load(path)
    assert model.has_tokenizer and model.tokenizer.encode(text) == lfm2np.load().tokenizer.encode(text)
    named = lfm2np.load(path, tokenizer=other_entry(tmp_path / "other"))
    assert named.tokenizer.encode(text) != model.tokenizer.encode(text)
    template = model.tokenizer.chat.template
    assert template is not None and named.tokenizer.chat.template == template  # the directory has none
    assert named.tokenizer.chat.source == f"{path}: tokenizer.chat_template"
    other_entry(tmp_path)
    assert lfm2np.load(path).tokenizer.encode(text) == named.tokenizer.encode(text)
    assert lfm2np.load(path, tokenizer=str(TRAINED)).tokenizer.encode(text) == model.tokenizer.encode(text)
    assert lfm2np.load(tokenizer=tmp_path).tokenizer.encode(text) == named.tokenizer.encode(text)
    (tmp_path / "chat_template.jinja").write_text("beside")
    assert lfm2np.load(path).tokenizer.chat.template == "beside"
    (tmp_path / "empty").mkdir()
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json, expected the directory of a tokenizer"):
        lfm2np.load(tokenizer=tmp_path / "empty")
    with pytest.raises(TokenizerError, match=r"gone/tokenizer\.json: does not exist"):
        read_tokenizer(path, load_config(TRAINED), tmp_path / "gone")


def test_a_directory_with_a_template_leads_around_a_damaged_one_in_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", trained_keys() | {"tokenizer.chat_template": (U32, 3)})
    named = lfm2np.load(path, tokenizer=TRAINED).tokenizer
    assert named.chat == lfm2np.load().tokenizer.chat
    for place in (None, other_entry(tmp_path / "other")):  # which has none
        with pytest.raises(TokenizerError, match=r"chat_template: 3 \(uint32\), expected a string"):
            assert lfm2np.load(path, tokenizer=place).tokenizer


@pytest.mark.parametrize(("pattern", "adds"), [("lfm2", True), ("gpt-2", False)])
def test_without_a_word_on_it_the_pattern_says_whether_a_bos_is_added(pattern: str, adds: bool, tmp_path: Path) -> None:
    """As llama.cpp has it."""
    keys = trained_keys(pattern)
    for said in (None, False, True):
        key = {} if said is None else {f"{TABLES}add_bos_token": (BOOL, said)}
        path = write_gguf(tmp_path / "x.gguf", {k: v for k, v in keys.items() if "add_bos" not in k} | key)
        actual = json.loads(tokenizer_json(open_container(path), load_config(TRAINED)))
        assert (actual["post_processor"] is not None) == (adds if said is None else said)


def test_a_file_that_says_it_has_no_tables_has_no_tokenizer(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", trained_keys() | {f"{TABLES}model": (STRING, "none")})
    model = lfm2np.load(path)
    assert not model.has_tokenizer and model.generate([1, 2], max_tokens=1).text is None
    with pytest.raises(TokenizerError, match=r"no tables of a tokenizer in it and no tokenizer\.json beside it"):
        model.tokenizer.encode("a")
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        lfm2np.LLM(model).generate([[1, 2]], lfm2np.SamplingParams(stop="a"))
    other_entry(tmp_path)
    assert lfm2np.load(path).has_tokenizer


def test_commands_take_text_by_the_tables_or_by_a_named_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path / "x.gguf", trained_keys())
    command = ["score", "--model", str(path), "--prompt", "hat", "--completion", "hat", "--json"]
    lengths = []
    for more in ([], ["--tokenizer", str(other_entry(tmp_path / "other"))]):
        assert main([*command, *more]) == 0
        lengths.append(len(json.loads(capsys.readouterr().out)["token_ids"]))
    assert lengths[0] < lengths[1]
    assert main([*command, "--tokenizer", str(tmp_path)]) == TokenizerError.exit_code
    assert capsys.readouterr().err.count("\n") == 1


# --- damage

TOKENS, KINDS, MERGES = f"{TABLES}tokens", f"{TABLES}token_type", f"{TABLES}merges"


def changed(key: str, index: int | None, value: object) -> dict:
    """The fixture's keys with one entry of an array, or its length, another."""
    keys = trained_keys()
    kind, inner, values = keys[key]
    values = list(values)
    if index is None:
        values = values[: len(values) + value] if value < 0 else values + values[-1:] * value
    else:
        values[index] = value
    return keys | {key: (kind, inner, values)}


DAMAGED = {
    "a token less": (changed(TOKENS, None, -1), r"tokens: 511 entries, expected 512, the rows of the embedding"),
    "a token more": (changed(TOKENS, None, 1), r"tokens: 513 entries, expected 512, the rows of the embedding"),
    "a type less": (changed(KINDS, None, -1), r"token_type: 511 entries, expected 512, as tokenizer\.ggml\.tokens has"),
    "a text twice": (changed(TOKENS, 40, "c"), r"tokens\[[0-9]+\]: 'c' as for id [0-9]+, expected one id a text"),
    "an empty text": (changed(TOKENS, 40, ""), r"tokens\[40\]: '', expected text in UTF-8"),
    "no UTF-8": (changed(TOKENS, 40, b"\xff"), r"tokens\[40\]: '\\udcff', expected text in UTF-8"),
    "a type of bytes": (changed(KINDS, 40, 6), r"token_type\[40\]: 6, expected one of 1, 3, 4, 5"),
    "a merge of three": (changed(MERGES, 3, "a b c"), r"merges\[3\]: 'a b c', expected two pieces of .* no 'b c'"),
    "a merge of one": (changed(MERGES, 3, "ab"), r"merges\[3\]: 'ab', expected two pieces of .* no ''"),
    "an unknown piece": (changed(MERGES, 3, "zq q"), r"merges\[3\]: 'zq q', expected two pieces of .* has no 'zq'"),
    "an unknown result": (changed(MERGES, 3, "q q"), r"merges\[3\]: 'q q', expected two pieces of .* has no 'qq'"),
    "a merge twice": (changed(MERGES, 3, "- >"), r"merges\[3\]: '- >' as merges\[0\], expected each merge once"),
    "a BOS without an entry": (changed(KINDS, 1, UNUSED), r"bos_token_id: 1, a row without an entry, expected an id"),
    "another model": ({f"{TABLES}model": (STRING, "llama")}, r"model: 'llama' .*, expected 'gpt2', byte-level BPE"),
    "another pattern": (
        {f"{TABLES}pre": (STRING, "qwen2")},
        r"pre: 'qwen2' .*, expected one of lfm2, gpt-2",
    ),
    "no pattern": ({f"{TABLES}pre": None}, r"pre: absent, expected a key of type string"),
    "no merges": ({MERGES: None}, r"merges: absent, expected a key of type array of string"),
    "types as floats": ({KINDS: (9, F32, [1.0] * 512)}, r"token_type: .* \(array of float32\), .* array of int32"),
    "an end added": (
        {f"{TABLES}add_eos_token": (BOOL, True)},
        r"add_eos_token: True .*, expected False",
    ),
    "a number for a bool": ({f"{TABLES}add_bos_token": (U32, 1)}, r"add_bos_token: 1 \(uint32\), expected a bool"),
    "no BOS to add": ({f"{TABLES}bos_token_id": None}, r"bos_token_id: absent, expected an id, as prompts begin"),
    "a template of bytes": ({"tokenizer.chat_template": (STRING, b"\xff")}, r"chat_template: .* a string of UTF-8"),
}


@pytest.fixture(scope="module")
def body() -> dict:
    return quantised_tensors(load_config(TRAINED), "Q8_0")


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_table_is_named(name: str, body: dict, tmp_path: Path) -> None:
    change, message = DAMAGED[name]
    keys = {key: value for key, value in (trained_keys() | change).items() if value is not None}
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes(keys, body))
    with pytest.raises(TokenizerError, match=rf"^{path}: tokenizer\.(ggml\.)?{message}.*\Z"):
        lfm2np.checkpoint.files.read_tokenizer(path, lfm2np.checkpoint.files.read_config(path))


PIECES = st.one_of(st.sampled_from(["a", "<|pad|>", "a b", " ", "\u0120", "ha", "q q", "- >", ""]), st.text(max_size=4))


@given(
    key=st.sampled_from([TOKENS, KINDS, MERGES]),
    index=st.integers(0, 241),
    piece=PIECES,
    number=st.integers(-(2**31), 2**31 - 1),
    add_bos=st.sampled_from([None, True, False]),
)
def test_any_damage_is_named_or_does_no_harm(
    key: str, index: int, piece: str, number: int, add_bos: bool | None
) -> None:
    """Whatever is accepted tokenises, and decodes to what it was given."""
    keys = changed(key, index, number % 9 if key == KINDS and number > 0 else number if key == KINDS else piece)
    if add_bos is not None:
        keys[f"{TABLES}add_bos_token"] = (BOOL, add_bos)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        path.write_bytes(gguf_bytes(keys, {}))
        config = load_config(TRAINED)
        try:
            tokenizer = read_tokenizer(path, config)
        except TokenizerError as problem:
            assert str(problem).startswith(f"{path}: tokenizer.ggml.") and "\n" not in str(problem)
            return
    ids = tokenizer.encode("the red ha -> 12")
    assert all(0 <= token_id < config.vocab_size for token_id in ids)
    assert tokenizer.chat.template is not None
