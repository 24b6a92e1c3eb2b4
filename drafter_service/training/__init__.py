"""Training of drafts on the target's own text: rollouts, EAGLE-3, DFlash, evaluation."""
