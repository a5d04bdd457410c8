"""How activations are multiplied by weights: the ways, the rule that chooses one, and what BLAS this process has."""
