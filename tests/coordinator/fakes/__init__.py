"""Verifiers and drafters without models: a target that is a hash, and peers that misbehave."""
