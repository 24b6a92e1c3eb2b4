"""The verifier: runs the target, decides which draft tokens stand, keeps the KV cache."""
