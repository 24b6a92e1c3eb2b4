"""DFlash drafts (arXiv:2602.06036): checkpoints, the network, and what runs it."""
