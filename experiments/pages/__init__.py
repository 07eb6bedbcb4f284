"""The pages of results, made from results/ by `python experiments/results.py`."""
