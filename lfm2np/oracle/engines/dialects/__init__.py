"""The HTTP dialects: one file for each kind of server, one value in it, and the list that all others read.

A new dialect is a new file and a line here. dialect.py says what belongs to it; openai.py and dialect.py hold what
several share.

vLLM 0.32.0, mlx-lm 0.32.2 and llama.cpp were tried on real servers (fixtures/engines/results.jsonl). SGLang's form is
that of its documentation, tried only on servers of our own.
"""

from lfm2np.oracle.engines.dialects.chat import CHAT
from lfm2np.oracle.engines.dialects.dialect import Dialect
from lfm2np.oracle.engines.dialects.llama_cpp import LLAMA_CPP
from lfm2np.oracle.engines.dialects.sglang import SGLANG
from lfm2np.oracle.engines.dialects.text import TEXT
from lfm2np.oracle.engines.dialects.vllm import VLLM

DIALECTS: tuple[Dialect, ...] = (VLLM, SGLANG, LLAMA_CPP, TEXT)  # in the order in which a server is probed
CHATS: tuple[Dialect, ...] = (CHAT,)  # where chats are wanted: the server lays out the prompts
