"""The run folder: which files it has, how each is written and read, and when work goes on.

Several processes that divide one run meet here too.
Knows no models: it compares what a run says about its model with what it is told.
"""
