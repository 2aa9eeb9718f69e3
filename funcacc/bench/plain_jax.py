"""The step written by hand in JAX, for an MLP and a GPT; needs jax and optax only.

Run as a script by an interpreter of its own environment, with the protocol of worker.py:
``plain_jax.py SHAPE COUNT``, where SHAPE is a JSON object: `rows` and `widths` of an MLP, or
`rows`, `context`, `layers`, `heads`, `width` and `words` of a GPT.
"""

import functools
import itertools
import json
import resource
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

LR = 1e-3


def mlp(shape: dict[str, Any], count: int) -> tuple[Any, Any, Any, Any]:
    """Parameters, logits, inputs and labels of an MLP with tanh."""
    widths, rows = shape["widths"], shape["rows"]
    params = [_linear(i, a, b) for i, (a, b) in enumerate(itertools.pairwise(widths))]

    def logits(params: Any, x: Any) -> Any:
        for layer in params[:-1]:
            x = jnp.tanh(_apply(layer, x))
        return _apply(params[-1], x)

    x = jax.random.normal(jax.random.key(1), (count, rows, widths[0]))
    y = jax.random.randint(jax.random.key(2), (count, rows), 0, widths[-1])
    return params, logits, x, y


def gpt(shape: dict[str, Any], count: int) -> tuple[Any, Any, Any, Any]:
    """Those of the demo's GPT: pre-norm, tied head, no dropout."""
    width, heads, time_ = shape["width"], shape["heads"], shape["context"]

    def norm() -> dict[str, Any]:
        return {"g": jnp.ones(width), "b": jnp.zeros(width)}

    def block(i: int) -> dict[str, Any]:
        return {
            "norm1": norm(),
            "qkv": _linear(4 * i, width, 3 * width),
            "out": _linear(4 * i + 1, width, width),
            "norm2": norm(),
            "up": _linear(4 * i + 2, width, 4 * width),
            "down": _linear(4 * i + 3, 4 * width, width),
        }

    params = {
        "tokens": 0.02 * jax.random.normal(jax.random.key(98), (shape["words"], width)),
        "positions": 0.02 * jax.random.normal(jax.random.key(99), (time_, width)),
        "blocks": [block(i) for i in range(shape["layers"])],
        "norm": norm(),
    }

    def normed(p: Any, x: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return p["g"] * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) + p["b"]

    def attention(p: Any, x: Any) -> Any:
        split = (len(x), time_, heads, -1)
        q, k, v = (part.reshape(split) for part in jnp.split(_apply(p["qkv"], x), 3, -1))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return _apply(p["out"], mixed.reshape(x.shape))

    def logits(params: Any, x: Any) -> Any:
        h = params["tokens"][x] + params["positions"]
        for p in params["blocks"]:
            h = h + attention(p, normed(p["norm1"], h))
            up = jax.nn.gelu(_apply(p["up"], normed(p["norm2"], h)), approximate=False)
            h = h + _apply(p["down"], up)
        return normed(params["norm"], h) @ params["tokens"].T

    x, y = jax.random.randint(
        jax.random.key(1), (2, count, shape["rows"], time_), 0, shape["words"]
    )
    return params, logits, x, y


def _linear(i: int, a: int, b: int) -> dict[str, Any]:
    return {"w": a**-0.5 * jax.random.normal(jax.random.key(i), (a, b)), "b": jnp.zeros(b)}


def _apply(layer: Any, x: Any) -> Any:
    return x @ layer["w"] + layer["b"]


def stepping(logits: Any, opt: Any) -> Any:
    """The compiled step; parameters and optimizer state are donated."""

    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        def one(carry: Any, batch: Any) -> Any:
            found = jax.value_and_grad(loss_fn)(params, *batch)
            return jax.tree.map(jnp.add, carry, found), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        (loss, grads), _ = jax.lax.scan(one, (jnp.zeros(()), zeros), (x, y))
        grads = jax.tree.map(lambda g: g / len(x), grads)
        updates, state = opt.update(grads, state, params)
        return loss / len(x), optax.apply_updates(params, updates), state

    return step


def main() -> None:
    """Answer requests until the input ends."""
    shape, count = json.loads(sys.argv[1]), int(sys.argv[2])
    params, logits, x, y = (mlp if "widths" in shape else gpt)(shape, count)
    opt = optax.inject_hyperparams(optax.adamw)(LR, weight_decay=0.01)
    state, step = opt.init(params), stepping(logits, opt)
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        if request["do"] == "steps":
            host = 0.0
            start = time.perf_counter()
            for _ in range(request["count"]):
                called = time.perf_counter()
                _, params, state = step(params, state, x, y)
                host += time.perf_counter() - called
            jax.block_until_ready(params)
            seconds = time.perf_counter() - start
            answer = {"steps": request["count"], "seconds": seconds, "host": host}
        elif request["do"] == "schedule":
            for i in range(request["count"]):
                state.hyperparams["learning_rate"] = jnp.float32(LR / (1 + i))
                short = i == request["count"] - 1 and count > 1
                xs, ys = (x[:-1], y[:-1]) if short else (x, y)
                _, params, state = step(params, state, xs, ys)
            answer = {"programs": step._cache_size()}
        elif request["do"] == "figures":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            answer = {"peak_bytes": peak, "version": jax.__version__, "parts": {}}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
