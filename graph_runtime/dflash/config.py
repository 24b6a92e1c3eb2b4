"""What shapes a DFlash draft, whatever file format it came in; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from graph_runtime.rope_config import RopeScaling


@dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """Everything that shapes the draft's maths. Sizes are elements, positions or counts."""

    layout: str
    """The format it came in: "z-lab" (ModelOpt's too), "speculators" or "deepspec"."""
    hidden_size: int
    """H: width of the draft, of a fused row, and of the embedding and head it may share."""
    target_hidden_size: int
    """Ht: width of one tap."""
    intermediate_size: int
    n_layers: int
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
    block_size: int
    """B: slots of a block as the draft was trained, the pending token's included."""
    mask_token_id: int
    """What stands in the block where tokens are to be drafted. A text may hold it as a token."""
    sample_from_anchor: bool
    """Slot k drafts the token after its own position, slot 0 too; False: slot k drafts its own
    position's token, and slot 0, which holds the pending token, drafts nothing."""
    sliding_windows: tuple[int | None, ...]
    """One a layer: how many of the newest context positions a block sees; None is all. Measured
    from the end of context, alike for every slot of the block; the block itself is always seen."""
    causal: tuple[bool, ...]
    """One a layer: whether a slot sees no later slot of its block."""
    embedding_scale: float
    """What embedded tokens are multiplied by: sqrt(H) where the target is a Gemma."""
    final_softcap: float | None
    """Logits become cap * tanh(logits / cap), as the target's do; None: they stay."""

    @property
    def raw_row_width(self) -> int:
        """Elements of a raw row: taps side by side, in ascending order of layers."""
        return len(self.tap_layers) * self.target_hidden_size

    @property
    def first_draft_slot(self) -> int:
        """Return the slot of the block whose output is d1."""
        return 0 if self.sample_from_anchor else 1

    @property
    def sliding_window(self) -> int | None:
        """Return the window of the layers that have one; None: no layer has."""
        return next((window for window in self.sliding_windows if window is not None), None)

    @property
    def reach(self) -> int | None:
        """Return how many of the newest context positions any layer sees; None: all."""
        windows = [window for window in self.sliding_windows if window is not None]
        return max(windows) if len(windows) == len(self.sliding_windows) else None

    def max_draft_count(self, block_length: int) -> int:
        """Return the largest K that a block of `block_length` slots drafts."""
        return block_length - self.first_draft_slot
