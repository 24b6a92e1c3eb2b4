"""The drafter: proposes tokens."""
