"""One of two processes whose devices share a batch: ``python processes.py RANK PORT``."""

import sys

import jax

rank, port = map(int, sys.argv[1:])
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)

import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import infonce  # noqa: E402
import infonce.jax as ij  # noqa: E402

MESH = Mesh(np.array(jax.devices()), "data")
ROWS = NamedSharding(MESH, PartitionSpec("data"))
Z = np.random.default_rng(0).standard_normal((2, 6 * len(jax.devices()), 5))

for loss in ("clip", "nt_xent", "gte"):
    features = list(Z[: len(infonce.spec.LOSSES[loss].arguments)])
    over = ij.sharded(getattr(ij, f"{loss}_loss"), MESH, "data")
    step = jax.jit(jax.value_and_grad(lambda z, scale, loss=over: loss(*z, scale=scale), (0, 1)))
    put = [jax.make_array_from_callback(z.shape, ROWS, z.__getitem__) for z in features]
    value, (grads, scale_gradient) = step(put, 2.0)
    want = getattr(infonce, f"{loss}_loss_and_grad")(*features, scale=2.0)
    assert abs(float(value) - want.loss) < 1e-12 * want.loss, loss
    assert abs(float(scale_gradient) - want.grads.scale) < 1e-12 * abs(want.loss), loss
    for gradient, wanted in zip(grads, want.grads, strict=False):
        for shard in gradient.addressable_shards:
            error = np.abs(np.asarray(shard.data) - wanted[shard.index]).max()
            assert error < 1e-12 * np.abs(wanted).max(), loss
print("equal")
