"""Models, texts and everything that touches a model: load, find blocks, tap, swap, resume.

A model is changed only inside a `with`, and every trick that patches a forward lives here.
No measurements: `forward.run_rows` hands rows to a callback.
"""
