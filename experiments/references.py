"""What classifiers without any network reach on the few images of few_images.py, for a sense of proportion.

    python experiments/references.py           # writes results/references.json, in a minute or two

Logistic regression, nearest neighbours and a support vector machine of scikit-learn on the very images, splits and
wrong labels of few_images_again.py. The setting of each is chosen as λ is: by the mean accuracy on the validation
images of all seeds. `python experiments/results.py` shows the numbers beside the tables.
"""

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from pages.classifiers import FOUND
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import SVC

from explicit_dropout.lab.data import Dataset, Split, load
from explicit_dropout.lab.experiment import module_of

HERE = Path(__file__).parent
AGAIN = module_of(HERE / "few_images_again.py")
CLASSIFIERS: Mapping[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
    "logistic regression": (lambda c: LogisticRegression(C=c, max_iter=5000), (1e-3, 1e-2, 1e-1, 1.0)),
    "k nearest neighbours": (lambda k: KNeighborsClassifier(k), (1, 3, 5, 9, 15)),
    "support vector machine, RBF kernel": (lambda c: SVC(C=c), (0.1, 0.3, 1.0, 3.0, 10.0)),
}
"""How to make each, and the settings that are tried."""


def pixels(split: Split) -> tuple[np.ndarray, np.ndarray]:
    x, y = split.batch(torch.arange(len(split)))
    return x.flatten(1).numpy(), y.numpy()


def scores(make: Callable[[Any], Any], setting: Any, data: Dataset) -> tuple[float, float]:
    """Accuracy on validation and test images."""
    fitted = make(setting).fit(*pixels(data.train))
    return float(fitted.score(*pixels(data.validation))), float(fitted.score(*pixels(data.test)))


def classified(share: float) -> list[dict[str, Any]]:
    datasets = [load(replace(AGAIN.FIRST.DATA, label_noise=share, split=seed)) for seed in AGAIN.SEEDS]
    rows = []
    for name, (make, settings) in CLASSIFIERS.items():
        tried = {setting: [scores(make, setting, data) for data in datasets] for setting in settings}
        chosen = max(settings, key=lambda setting: np.mean([validation for validation, _ in tried[setting]]))
        validation, test = zip(*tried[chosen], strict=True)
        rows.append({"classifier": name, "setting": chosen, "validation": validation, "test": test})
    return rows


def main() -> None:
    result = {
        "command": "python experiments/references.py",
        "environment": {"python": platform.python_version(), "scikit-learn": sklearn.__version__},
        "seeds": list(AGAIN.SEEDS),
        "shares": {f"{share:g}": classified(share) for share in sorted(AGAIN.FIRST.SHARES)},
    }
    (HERE.parent / FOUND).write_text(json.dumps(result, indent=1) + "\n")
    for share, rows in result["shares"].items():
        for row in rows:
            print(f"{float(share):4.0%} wrong labels, {row['classifier']}: {100 * np.mean(row['test']):.2f} %")


if __name__ == "__main__":
    main()
