"""Checkpoints of every odd shape of LFM3, which several tests compute."""

from __future__ import annotations

from lfm2np.suite.strategies.tiny_models import TinyModel

MODELS = {
    "all kinds of layers": TinyModel(lfm3=True, layers="cSAc", head_dim=8),
    "window of one": TinyModel(lfm3=True, layers="cASc", heads=4, kv_heads=2, head_dim=8, window=1, taps=7),
    "biases": TinyModel(lfm3=True, layers="AcS", attention_bias=True, conv_bias=True),
    "windows only, no norms behind": TinyModel(lfm3=True, layers="SSS", window=5, sandwich=False),
    "window beyond the prompt, no gate": TinyModel(lfm3=True, layers="AcS", gated=False, head_dim=8, window=50, taps=9),
    "no window, untied, two taps": TinyModel(lfm3=True, layers="ccA", taps=2, tied=False),
    "odd heads, a quarter rotated": TinyModel(lfm3=True, layers="SA", heads=3, kv_heads=3, head_dim=8, rotated=0.25),
    "wide": TinyModel(
        lfm3=True,
        layers="ccAcScAcS",
        heads=4,
        kv_heads=2,
        head_dim=48,
        hidden_size=64,
        feed_forward=96,
        taps=7,
        window=16,
    ),
}
