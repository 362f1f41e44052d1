"""From plans to launches."""
