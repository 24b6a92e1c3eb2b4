"""What the checkpoints of all drafts share: embeddings, vocabularies, keys of config.json."""
