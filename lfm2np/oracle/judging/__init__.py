"""From what an engine said to judged positions: each token held against the exact network, by the noise of a format.

formats.py has the formats, eight_bits.py what numbers they round to, inputs.py what the inputs of each product are
rounded to; emulate.py engines of a format that could be; noise.py what they err by at each token of a sequence;
routes.py the experts that tokens went to; verdict.py the verdict on one position, and how likely so many are. scored.py
has truth and noise of what was said, position.py one token under them, answer.py those of one answer, rerouted.py what
near ties of an untold route explain; judge.py puts it together. The rest of oracle/, conformance/, fuzz/ and cli/ may
import it; of oracle/ it imports targets/ only, whose records it judges.
"""
