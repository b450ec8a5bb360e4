"""The residual network of examples/cifar.py: its size, its convolution, its factors."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax, random
from numpyro import handlers
from scripts import load_script

pytest.importorskip("flax")


@pytest.fixture(scope="module")
def cifar() -> Any:
    return load_script("cifar")


def weights(cifar: Any) -> dict[str, jax.ShapeDtypeStruct]:
    images = jnp.zeros((1, 32, 32, 3))
    tree = jax.eval_shape(cifar.ResNet20().init, random.key(0), images)["params"]
    return {f"net/{layer}.{k}": x for layer, leaves in tree.items() for k, x in leaves.items()}


def test_parameter_counts_of_the_paper(cifar: Any) -> None:
    sites = weights(cifar)
    assert sum(math.prod(x.shape) for x in sites.values()) == 274_042

    def model() -> None:
        for name, x in sites.items():
            numpyro.sample(name, dist.Normal(0, 1).expand(x.shape).to_event(len(x.shape)))

    def expanded(**settings: Any) -> int:
        new = handlers.reparam(model, config=partial(cifar.factors, **settings))
        traced = handlers.trace(handlers.seed(new, random.key(0)))
        found = jax.eval_shape(
            lambda: {n: x["value"] for n, x in traced.get_trace().items() if x["type"] == "sample"}
        )
        return sum(math.prod(x.shape) for x in found.values())

    assert expanded() == 383_098
    assert expanded(number=2) == 492_154
    assert [expanded(rank=1 / 8), expanded(rank=1 / 4)] == [303_610, 330_874]
    assert jax.tree.structure(cifar.nested(sites)).num_leaves == len(sites)


@pytest.mark.parametrize(("size", "stride"), [(3, 1), (3, 2), (1, 2)])
def test_the_convolution(cifar: Any, size: int, stride: int) -> None:
    x = random.normal(random.key(0), (2, 8, 8, 3))
    kernel = random.normal(random.key(1), (size, size, 3, 5))
    expected = lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        [(size // 2, size // 2)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    np.testing.assert_allclose(cifar.convolve(x, kernel, stride), expected, atol=1e-5)


def test_images_are_shifted_by_up_to_four_pixels(cifar: Any) -> None:
    images = jnp.zeros((200, 16, 16, 1)).at[:, 8, 8].set(1.0)
    moved = np.asarray(cifar.shifted_and_mirrored(random.key(0), images))
    rows, columns = np.nonzero(moved[..., 0])[1:]
    assert len(rows) == 200
    assert set(rows - 8) == set(range(-4, 5))
    # a mirrored column c is 15 - c
    assert set(columns) == set(range(4, 13)) | set(range(3, 12))
