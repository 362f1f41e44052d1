"""Plan to launches."""
