"""The run folder: its files, reading and writing each, belonging to a model and a text, resuming.

Also how work is carried out: several processes, batch size, progress, free memory and disk.
Knows no models: it compares descriptions and fingerprints. `folder` and `room` need no torch.
"""
