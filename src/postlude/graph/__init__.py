"""From a model to chains and back: capture, tidy, match, splice."""
