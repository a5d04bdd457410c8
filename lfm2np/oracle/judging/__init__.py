"""From what an engine said to judged positions: each token held against the exact network, by the noise of a format.

emulate.py has the formats, and engines of one that could be; noise.py what they err by at each token of a sequence;
routes.py the experts that tokens went to; verdict.py the verdict on one position, and how likely so many are. scored.py
has truth and noise of what was said, position.py one token under them, answer.py those of one answer, rerouted.py what
near ties of an untold route explain; judge.py puts it together. The rest of oracle/, conformance/, fuzz/ and cli/ may
import it; of oracle/ it imports targets/ only, whose records it judges.
"""
