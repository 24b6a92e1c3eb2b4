"""What shapes an EAGLE-3 draft, whatever file format it came in; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from graph_runtime.rope_config import RopeScaling


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Everything that shapes the draft's maths. Sizes are elements, positions or counts."""

    layout: str
    """The format it came in: "safeailab", "specforge", "speculators", "modelopt" or "deepspec"."""
    hidden_size: int
    """H: width of the draft, of a fused row and of the recurrent feature."""
    target_hidden_size: int
    """Ht: width of one tap."""
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    """V: the target's ids, which the embedding takes and drafts are made of."""
    draft_vocab_size: int
    """Vd: rows of the head that are used; at most V."""
    tap_layers: tuple[int, ...]
    """0-based layer outputs of the target, ascending, whatever numbering the file has."""
    rope: RopeScaling
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    """Slots, its own included, that a slot attends to; None is all."""
    use_aux_hidden_state: bool
    """False: no fc. The feature is the target's last layer output after the target's final norm."""
    target_norm_eps: float
    """Epsilon of the target's final norm; the draft's own where it does not read that norm."""
    hidden_norm: bool
    """Whether the layer norms the feature before attention; False only without taps (ModelOpt)."""
    norm_before_residual: bool
    """The layer's residual is the normed feature instead of the feature."""
    norm_before_fc: bool
    """One RMSNorm over the concatenated taps before fc."""
    fc_norm: bool
    """One RMSNorm a tap before fc (EAGLE-3.1)."""
    post_norm_feedback: bool
    """The next chain step is fed norm(h) instead of h (EAGLE-3.1)."""

    @property
    def raw_row_width(self) -> int:
        """Elements of a raw row: taps side by side, in ascending order of layers."""
        return len(self.tap_layers) * self.target_hidden_size
