"""The study: at which price, format, size and batch predicted gradients pay, and where they fail."""
