"""How fast, beside what: this engine, the bare matrix products, and transformers, each in a process of its own."""
