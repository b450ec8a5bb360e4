"""Links from pages of the API to the documentation of NumPyro, JAX, ArviZ and xarray.

The addresses stand here, because a build must need no network: an inventory would be fetched.
"""

from __future__ import annotations

import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig

JAX = "https://docs.jax.dev/en/latest/_autosummary/{}.html"
NUMPYRO = "https://num.pyro.ai/en/stable/"
WHERE = {
    # of ArviZ 0.2x, because 1.x has none
    "arviz.InferenceData": "https://python.arviz.org/en/v0.22.0/api/generated/{}.html",
    "jax.Array": JAX,
    "jax.jit": JAX,
    "jax.jvp": JAX,
    "jax.sharding.Mesh": "https://docs.jax.dev/en/latest/jax.sharding.html#{}",
    "jax.tree.map": JAX,
    "jax.vmap": JAX,
    "numpy.ndarray": "https://numpy.org/doc/stable/reference/generated/{}.html",
    "numpyro.factor": f"{NUMPYRO}primitives.html#numpyro.primitives.factor",
    "numpyro.infer.MCMC": f"{NUMPYRO}mcmc.html#numpyro.infer.mcmc.MCMC",
    "numpyro.infer.NUTS": f"{NUMPYRO}mcmc.html#numpyro.infer.hmc.NUTS",
    "numpyro.infer.init_to_uniform": (
        f"{NUMPYRO}utilities.html#numpyro.infer.initialization.init_to_uniform"
    ),
    "numpyro.infer.log_likelihood": f"{NUMPYRO}utilities.html#numpyro.infer.util.log_likelihood",
    "xarray.DataTree": "https://docs.xarray.dev/en/stable/generated/{}.html",
}
CODE = re.compile(r"<code>([\w.]+)</code>(?!</a>)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Called by mkdocs when it has read its settings: names in signatures become links."""
    for name, address in WHERE.items():
        config.plugins["autorefs"].register_url(name, address.format(name))
    return config


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Called for each page: names in docstrings become links."""

    def linked(match: re.Match[str]) -> str:
        if match[1] not in WHERE:
            return match[0]
        return f'<a href="{WHERE[match[1]].format(match[1])}">{match[0]}</a>'

    return CODE.sub(linked, html) if page.file.src_uri.startswith("reference/") else html
