"""The demonstration's experiment, for the engines: a small ViT on scikit-learn's handwritten digits.

    explicit-dropout sweep experiments/digits.py --store build/digits --engine local
    explicit-dropout report experiments/digits.py --store build/digits

Cost: 45 short trainings, a minute or two on two cores. No table of the paper has these data.
"""

from explicit_dropout.lab.demonstration import experiment

__all__ = ["experiment"]
