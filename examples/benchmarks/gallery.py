"""Figures of pages, from the tables in docs/tables that other scripts have written, or small runs.

    python examples/benchmarks/gallery.py [NAME ...]

Writes docs/figures/gallery_*.png, transparent and in grey ink, for light and dark pages.
"""

from __future__ import annotations

import re
import sys

import jax
import jax.numpy as jnp
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import DOCS, TABLES, chains, logistic
from jax.flatten_util import ravel_pytree
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from numpyro.infer.util import log_density

from numpyro_geom import SGHMC, SGRLD

GREY, COLOURS = "#808080", ("#e07b39", "#5c7cfa", "#808080", "#15aabf")
STYLE = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), GREY),
    **dict.fromkeys(("xtick.color", "ytick.color"), GREY),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": mpl.cycler(color=COLOURS),
    "legend.frameon": False,
    "savefig.transparent": True,
}
Rows = list[dict[str, str]]


def table(name: str) -> Rows:
    """Rows of the first table of a file by the names of columns; a second one alike is "name 2"."""
    text = (TABLES / f"{name}.md").read_text()
    lines = re.search(r"(^\|.*\n)+", text, re.M)[0].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    head = [f"{x} 2" if x in head[:k] else x for k, x in enumerate(head)]
    return [dict(zip(head, row, strict=True)) for row in rows]


def number(cell: str) -> float:
    """The first number of a cell; NaN where there is none."""
    found = re.search(r"-?\d[\d,]*\.?\d*", cell)
    return float(found[0].replace(",", "")) if found else float("nan")


def mnist(ax: plt.Axes) -> None:
    """Negative log-likelihood by method and prior."""
    rows = table("mnist")
    columns = {"gaussian": "NLL", "horseshoe": "NLL 2"}
    rows.sort(key=lambda row: -min(x for x in map(number, map(row.get, columns.values())) if x > 0))
    for prior, column in columns.items():
        shown = [row for row in rows if number(row[column]) > 0]
        names = [row["method"] for row in shown]
        ax.plot([number(row[column]) for row in shown], names, "o", label=f"{prior} prior")
    ax.set(xscale="log", xlabel="negative log-likelihood of test images")
    ax.legend()


def uci(ax: plt.Axes) -> None:
    """Data sets on which a method wins and loses against MAP."""
    rows = [row for row in table("uci_standing") if "/" in row["MNLL"]]
    standing = [[int(x) for x in row["MNLL"].split("/")] for row in rows]
    names = [row["method"] for row in rows]
    ax.barh(names, [wins for wins, _, _ in standing], label="wins")
    ax.barh(names, [-losses for _, _, losses in standing], label="losses")
    ax.set(xlabel="data sets, against MAP in likelihood")
    ax.axvline(0, color=GREY, linewidth=0.8)
    ax.legend()


def networks(ax: plt.Axes) -> None:
    """Time of a step over that of a step written by hand."""
    rows = [row for row in table("networks") if "by hand" not in row["network, sampler"]]
    ax.barh(
        [row["network, sampler"] for row in rows], [number(row["over by hand 2"]) for row in rows]
    )
    ax.axvline(1, color=GREY, linewidth=0.8)
    ax.set(xlabel="time per step over one written by hand")


def digits(ax: plt.Axes) -> None:
    """Negative log-likelihood of dense networks by method."""
    rows = [row for row in table("digits_network") if row["network"] == "dense"][::-1]
    ax.barh([row["method"] for row in rows], [number(row["NLL"]) for row in rows])
    ax.set(xlabel="negative log-likelihood of test digits")


def progress(ax: plt.Axes) -> None:
    """Means of four chains as their draws come in."""
    X = jax.random.normal(jax.random.key(0), (20_000, 3))
    y = dist.Bernoulli(logits=X @ jnp.array([1.0, -1.0, 0.0])).sample(jax.random.key(1))
    mcmc = chains(SGHMC(logistic, batch_size=64), 200, 1000)
    mcmc.run(jax.random.key(2), X, y)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["w"][..., 0])
    number = np.arange(1, draws.shape[1] + 1)
    for k, chain in enumerate(draws, 1):
        ax.plot(np.cumsum(chain) / number, label=f"chain {k}")
    share = float(effective_sample_size(draws)) / draws.size
    error = 2 * draws.std() / np.sqrt(share * number)
    band = {"color": GREY, "alpha": 0.2, "label": "two standard errors"}
    ax.fill_between(number, draws.mean() - error, draws.mean() + error, **band)
    ax.set(xlabel="draws so far, after warm-up", ylabel="mean of w[0]", xlim=(0, number[-1]))
    ax.set_ylim(draws.mean() - 2 * draws.std(), draws.mean() + 2 * draws.std())
    ax.legend()


def blocks(ax: plt.Axes) -> None:
    """Entries of a Hessian: schools in districts, each with an intercept and a slope."""
    districts = jnp.repeat(jnp.arange(4), 5)
    school = jnp.tile(jnp.arange(20), 10)
    x, y = jax.random.normal(jax.random.key(0), (2, 200))

    def model():
        mu = numpyro.sample("a", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("districts", 4):
            district = numpyro.sample("b", dist.Normal(mu[0], 1))
        with numpyro.plate("schools", 20):
            level = numpyro.sample("c", dist.Normal(district[districts], 1))
            slope = numpyro.sample("d", dist.Normal(mu[1], 1))
        scale = jnp.exp(mu[2])
        numpyro.sample("y", dist.Normal(level[school] + slope[school] * x, scale), obs=y)

    sizes = {"a": 3, "b": 4, "c": 20, "d": 20}
    start = {name: jax.random.normal(jax.random.key(k), (n,)) for k, (name, n) in
             enumerate(sizes.items())}  # fmt: skip
    flat, unravel = ravel_pytree(start)
    H = jax.hessian(lambda z: -log_density(model, (), {}, unravel(z))[0])(flat)
    own = np.arange(20)
    order = np.concatenate([np.arange(7), np.stack([7 + own, 27 + own], 1).ravel()])
    there = np.where(np.abs(H[order][:, order]) > 1e-6, 1.0, np.nan)
    ax.imshow(there, cmap=mpl.colors.ListedColormap([COLOURS[1]]))
    for end in (2.5, 6.5):
        ax.axhline(end, color=GREY, linewidth=0.5)
        ax.axvline(end, color=GREY, linewidth=0.5)
    ticks = [1, 4.5, 26.5]
    ax.set_xticks(ticks, ["", "", ""])
    ax.set_yticks(ticks, ["shared", "districts", "schools"])
    ax.set(xlabel="entries of the Hessian that are not zero")


def energy(ax: plt.Axes) -> None:
    """Energy along the steps of some draws of a Gaussian with the condition number 100."""
    sds = jnp.linspace(1, 10, 10)
    friction, num_steps = 0.1, 120
    kernels = {
        "SGRLD": (SGRLD, {"step_size": 0.2}, num_steps),
        "SGHMC": (SGHMC, {"step_size": 0.6, "friction": friction}, 17),
    }
    for (name, (kind, settings, every)), color in zip(kernels.items(), COLOURS, strict=False):
        kernel = kind(potential_fn=lambda z: jnp.sum((z / sds) ** 2) / 2, num_steps=1, **settings)
        mcmc = MCMC(kernel, num_warmup=0, num_samples=2 * num_steps, progress_bar=False)
        mcmc.run(jax.random.key(5), init_params=sds, extra_fields=("potential_energy",))
        U = np.asarray(mcmc.get_extra_fields()["potential_energy"])
        kept = np.arange(every - 1, len(U), every)
        ax.plot(U, color=color, linewidth=0.8, label=f"{name}: a draw every {every} steps")
        ax.plot(kept, U[kept], "o", color=color)
    ax.axhline(len(sds) / 2, color=GREY, linewidth=0.8, linestyle="--", label="mean of the target")
    ax.set(xlabel="step", ylabel="energy U (nats)", ylim=(0, None))
    ax.legend(fontsize=8)


def main(names: list[str]) -> None:
    figures = (mnist, uci, networks, digits)
    for draw in (*figures, progress, blocks, energy):
        if names and draw.__name__ not in names:
            continue
        with mpl.rc_context(STYLE):
            figure, ax = plt.subplots(figsize=(5.6, 3.6), constrained_layout=True)
            draw(ax)
            path = DOCS / "figures" / f"gallery_{draw.__name__}.png"
            figure.savefig(path, dpi=120, metadata={"Software": None})
            plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1:])
