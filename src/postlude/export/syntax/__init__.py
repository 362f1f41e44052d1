"""Python's syntax trees: parsed and written with their comments, analysed, specialised, inlined."""
