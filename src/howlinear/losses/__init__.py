"""What a model predicts: losses under named protocols, KL, paired differences, speed.

Sweeps that replace one block at a time share the layers before it.
Knows no run folders and fits no maps.
"""
