"""The suite for parsers of LFM2's replies, whole and streaming, without a model: see --tool-parser."""
