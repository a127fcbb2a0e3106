"""From maps to checkpoints that load: `hf` (any family), `narrow` and `nemotron_nas` (stock engines)."""
