"""EAGLE-3 drafts (Li et al., arXiv:2503.01840): checkpoints, the network, and what runs it."""
