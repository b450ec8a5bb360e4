"""Peak memory of a guide on a last layer of 1,000 classes and 512 inputs, by rows.

A draw is taken at weights of 0. It writes docs/tables/laplace_last_layer.md.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from common import TABLES, head, in_process, memory, versions

from numpyro_geom import RiemannianLaplace


def model(X: jax.Array, y: jax.Array) -> None:
    """Softmax regression."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([512, 1000]).to_event(2))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Categorical(logits=X[i] @ w / 512**0.5), obs=y[i])


def one(rows: int) -> dict[str, float]:
    """Seconds and MB of one draw."""
    X = jax.random.normal(jax.random.key(0), (rows, 512))
    y = jax.random.randint(jax.random.key(1), (rows,), 0, 1000)
    guide = RiemannianLaplace(model, "euclidean", batch_size=256)
    at = {"init_params": {"w": jnp.zeros((512, 1000))}, "max_steps": 0}
    params = guide.fit(jax.random.key(2), X, y, num_starts=1, **at)
    jax.block_until_ready(guide.sample_posterior(jax.random.key(3), params))
    return {"seconds": time.process_time(), "peak": memory("VmHWM")}


if len(sys.argv) > 1:
    print(json.dumps(one(int(sys.argv[1]))))
elif __name__ == "__main__":
    lines = head("rows", "MB of rows", "CPU s, fit and draw", "peak, MB")
    for rows in (2_000, 8_000, 32_000):
        found = in_process(__file__, rows)
        cells = found.get("failed") or "{seconds:.0f} | {peak:.0f}".format(**found)
        lines.append(f"| {rows:,} | {rows * 513 * 4 / 2**20:.0f} | {cells} |")
        print(lines[-1], flush=True)
    (TABLES / "laplace_last_layer.md").write_text("\n".join([*lines, "", versions(), ""]))
