"""Benches on the rooms below: presets and bench files, the run itself, tuning, and the diagnosis of a machine."""
