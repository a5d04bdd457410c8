"""Tokenizers whose GGUF tables are held against their tokenizer.json, and texts to hold them by."""

from __future__ import annotations

import json
from pathlib import Path

from blocks_drawn import quantised_tensors
from builders import tiny_config
from gguf_file import STRING, Key, gguf_bytes, model_keys
from quantise import tokenizer_keys
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from lfm2np.checkpoint.config_json import load_config
from lfm2np.truth.config import ModelConfig

FIXTURES = Path(__file__).parents[1] / "fixtures"
TRAINED = FIXTURES / "trained"
UNUSED = 5
LFM2_SPLIT = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
PATTERNS = ("lfm2", "gpt-2")
SPECIALS = ("<|pad|>", "<|startoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<tool>", "née → call")
ODD = (
    "",
    " ",
    "   ",
    "a  b",
    "a \n b",
    "a\n\n\n  b\r\n\r\n c ",
    "\t\tdef f(x):\n\t\treturn x  \n\n",
    "It's I'VE we'll they'RE you'd I'm can'T 'sx 's 'S'S o'clock '\u017f ''s",
    "1 12 123 1234 12345 1,234.56 3\u00bd \u0663\u0664\u0665\u0666 \u2167 007",
    "abc123def 12ab !!! ?!\n\n -- --> (x)\r\n...",
    "na\u00efve caf\u00e9 e\u0301 \u4e2d\u6587\u5b57 \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22",
    "\U0001f642\u200d\U0001f680 \U0001f1e9\U0001f1ea",
    "\u00a0\u2003x\u3000y \u2028z\u0085w\x0b\x0c\x1f\x00\x7f",
    "\ufeff\ufffd\u200b",
    "<|im_start|>user\nhello<|im_end|>\n",
    "<|startoftext|><|startoftext|>x<|pad|>",
    "<|im_start |> <|unknown|> <tool> x<tool>y n\u00e9e \u2192 call [PAD299] [PAD7]",
    "a" * 300,
    " " * 70 + "\n" * 33,
)


def trained_keys(pre: str = "lfm2") -> dict[str, Key]:
    """All keys of the trained fixture, its tokenizer under the name of a pattern that it may not have."""
    config = load_config(TRAINED)
    return model_keys(config) | tokenizer_keys(TRAINED, config) | {"tokenizer.ggml.pre": (STRING, pre)}


def write_gguf(path: Path, keys: dict[str, Key]) -> Path:
    """With weights that nobody multiplies."""
    path.write_bytes(gguf_bytes(keys, quantised_tensors(load_config(TRAINED), "Q8_0")))
    return path


def pre_tokenizer(pattern: str) -> pre_tokenizers.PreTokenizer:
    if pattern == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Split(Regex(LFM2_SPLIT), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def config_of() -> ModelConfig:
    return tiny_config(
        vocab_size=700, hidden_size=32, intermediate_size=32, eos_token_id=3, max_position_embeddings=1024
    )


def write_directory(directory: Path, pattern: str) -> Path:
    """Merges of pieces as the pattern makes them, special and other added tokens, rows without an entry."""
    backend = Tokenizer(models.BPE(ignore_merges=False))
    backend.pre_tokenizer, backend.decoder = pre_tokenizer(pattern), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=650,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(ODD[:14] * 3, trainer)
    backend.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    bos = SPECIALS[1]
    template = {"single": f"{bos} $A", "pair": f"{bos} $A {bos}:1 $B:1"}
    backend.post_processor = processors.TemplateProcessing(**template, special_tokens=[(bos, 1)])
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": bos, "eos_token": SPECIALS[3], "pad_token": SPECIALS[0]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text((FIXTURES / "trained" / "chat_template.jinja").read_text())
    return directory


def raw_tokenizer(directory: Path) -> dict:
    return json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))


def keys_of(directory: Path) -> dict[str, Key]:
    return model_keys(config_of()) | tokenizer_keys(directory, config_of())


def write_file(path: Path, keys: dict[str, Key], dtype: str = "F32") -> Path:
    path.write_bytes(gguf_bytes(keys, quantised_tensors(config_of(), dtype)))
    return path
