"""The HTTP dialects: one value for each kind of server, and the list that all others read.

A new dialect is a new value and its place in this list. dialect.py says what belongs to it, and has what they share.

vLLM 0.32.0, mlx-lm 0.32.2 and llama.cpp were tried on real servers (fixtures/engines/results.jsonl). SGLang's form is
that of its documentation, tried only on servers of our own.
"""

from lfm2np.oracle.engines.dialects.dialect import Dialect
from lfm2np.oracle.engines.dialects.llama_cpp import LLAMA_CPP
from lfm2np.oracle.engines.dialects.openai import CHAT, TEXT, VLLM
from lfm2np.oracle.engines.dialects.sglang import SGLANG

DIALECTS: tuple[Dialect, ...] = (VLLM, SGLANG, LLAMA_CPP, TEXT)  # in the order in which a server is probed
CHATS: tuple[Dialect, ...] = (CHAT,)  # where chats are wanted: the server lays out the prompts
