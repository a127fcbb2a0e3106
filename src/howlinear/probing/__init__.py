"""What the residual of a block's map is made of: one module for each kind of probe.

Probes read bounded, seeded samples of rows.
Nothing here changes a model or a run's maps.
"""
