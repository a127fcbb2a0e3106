"""A smaller model under a budget: prices of options, a plan, the refit in closed form.

Works on a run's model in memory.
Writing a checkpoint is what `export` does.
"""
