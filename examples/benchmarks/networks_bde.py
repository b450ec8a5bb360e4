"""The rival `bde`, in an interpreter that has it: python networks_bde.py FILE SEED WARMUP STEPS."""

from __future__ import annotations

import json
import sys
import time

import jax
import numpy as np
from bde import BdeRegressor
from bde.loss import GaussianNLL

file, seed, warmup, steps = sys.argv[1], *map(int, sys.argv[2:])
rows = np.load(file)
sampling = {"warmup_steps": warmup, "n_samples": steps, "n_thinning": 10}
training = {"epochs": 1200, "validation_split": 0.15, "patience": 20, "lr": 1e-3}
rival = BdeRegressor(4, [16] * 4, seed, GaussianNLL(), **training, **sampling, weight_decay=1e-4)
rival.fit(rows["X"], rows["y"])
jax.block_until_ready(rival.positions_eT_)
seconds = time.process_time()
mean, scale = np.moveaxis(np.asarray(rival.predict(rows["X_test"], raw=True), float), -1, 0)
np.savez(file, mean=mean, scale=np.logaddexp(0, scale) + 1e-6)
print(json.dumps({"seconds": seconds}))
