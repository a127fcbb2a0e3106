"""Published training-free compression methods, each written from its formulas: see `benchmarks/field.py`."""
