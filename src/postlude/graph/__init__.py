"""Model to chains and back: capture, tidy, match, splice."""
