"""The coordinator: rounds, scheduling, text, and the API that users call. No torch."""
