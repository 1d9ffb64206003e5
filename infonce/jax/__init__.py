"""infonce for JAX: the losses as differentiable functions, inside and outside of `jit`.

>>> import infonce.jax
>>> def loss(params, batch):
...     image, text = encode(params, batch)
...     return infonce.jax.clip_loss(image, text, scale=jnp.exp(params["log_scale"]))
>>> step = jax.jit(jax.value_and_grad(loss))

Each loss is one call out of the compiled program, on the program's own buffers: on a CPU as NumPy
arrays, on a GPU as CuPy arrays and on the program's stream. Nothing is copied and nothing waits for
the device. Under `grad` the same call computes the loss, and the gradients of the arguments that
are differentiated.

With ``axis_name="data"``, inside `jax.shard_map` or `jax.pmap`, a loss is the loss of the rows of
all devices of the axis; `sharded` makes such a loss of global arrays.
"""

from typing import TYPE_CHECKING

from .._names import extra, make_getattr

with extra("jax"):
    from .functions import (
        clip_loss,
        distill_loss,
        gte_loss,
        info_nce_loss,
        lit_loss,
        nt_xent_loss,
        siglip_loss,
        sup_con_loss,
    )
    from .sharded import sharded

__all__ = [
    "clip_loss",
    "distill_loss",
    "gte_loss",
    "info_nce_loss",
    "lit_loss",
    "nt_xent_loss",
    "sharded",
    "siglip_loss",
    "sup_con_loss",
]

if not TYPE_CHECKING:
    __getattr__ = make_getattr(__name__, __all__)
