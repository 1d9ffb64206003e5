"""`infonce.torch.KeyQueue` beside a list of the keys that it was called with. Over ranks:
test_torch_ranks.py."""

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.utils.checkpoint import checkpoint  # noqa: E402

import infonce.torch as it  # noqa: E402

pytestmark = pytest.mark.extras
WIDTH = 4


def batch(number: int, rows: int, dtype: Any = None) -> tuple[Any, Any]:
    """Unit keys and ids, which no other batch has."""
    generator = torch.Generator().manual_seed(number)
    keys = torch.nn.functional.normalize(torch.randn(rows, WIDTH, generator=generator))
    return keys.to(dtype or torch.float32), 100 * number + torch.arange(rows)


def filled(size: int = 10, calls: int = 3, **options: Any) -> Any:
    """A queue after calls with three rows each."""
    queue = it.KeyQueue(size, WIDTH).to(**options)
    for number in range(calls):
        queue(*batch(number, 3))
    return queue


@pytest.mark.parametrize("sizes", [[3, 3, 3, 3, 3, 3], [2, 9, 1, 30, 4, 10, 0, 3], [10, 10, 11]])
@pytest.mark.parametrize("size", [0, 1, 10])
def test_batch_and_then_the_queue(size: int, sizes: list[int]) -> None:
    """Also of batches that are larger than the queue."""
    queue = it.KeyQueue(size, WIDTH)
    stored = batch(0, 0)
    for number, rows in enumerate(sizes):
        new = batch(number, rows)
        stored = tuple(torch.cat(z) for z in zip(new, stored, strict=True))
        for got, want in zip(queue(*new), stored, strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
        stored = tuple(z[:size] for z in stored)
        assert queue.filled == len(stored[0])


def test_what_a_call_stores() -> None:
    """Also a call without gradients, but none in evaluation mode."""
    queue = filled(calls=1)
    with torch.no_grad():
        queue(*batch(1, 3))
    with torch.inference_mode():
        queue(*batch(2, 3))
    assert queue.filled == 9
    kept = queue.keys.clone()
    queue.eval()
    assert len(queue(*batch(3, 3))[0]) == 12
    assert torch.equal(queue.keys, kept)
    queue.train()
    queue(*batch(3, 3))
    assert torch.equal(queue.keys[:3], batch(3, 3)[0])


def test_calls_without_ids() -> None:
    queue = it.KeyQueue(10, WIDTH)
    for number in range(2):
        keys, ids = queue(batch(number, 3)[0])
        assert ids is None
    assert torch.equal(keys, torch.cat([batch(1, 3)[0], batch(0, 3)[0]]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype: Any) -> None:
    """The queue has its own dtype, and what it returns has that of the batch."""
    queue = filled().to(dtype)
    assert (queue.keys.dtype, queue.ids.dtype) == (dtype, torch.int64)
    assert torch.equal(queue.keys[:3], batch(2, 3)[0].to(dtype))
    for of_batch in (torch.float32, dtype):
        key, ids = batch(7, 3, of_batch)
        keys, _ = queue(key, ids)
        assert keys.dtype == of_batch
        assert torch.equal(keys[:3], key)
    assert queue.keys.dtype == dtype


def test_autocast() -> None:
    """A linear layer's keys have 16 bits, and the queue has 32."""
    queue, linear = it.KeyQueue(10, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        for number in range(3):
            key = linear(batch(number, 3)[0])
            keys, _ = queue(key)
            loss = it.info_nce_loss(key, keys, scale=5.0, normalize=True)
    assert (keys.dtype, queue.keys.dtype, loss.dtype) == (
        torch.bfloat16, torch.float32, torch.float32,
    )  # fmt: skip
    loss.backward()
    assert linear.weight.grad.abs().max() > 0


def reloaded(queue: Any) -> Any:
    file = io.BytesIO()
    torch.save(queue.state_dict(), file)
    file.seek(0)
    other = it.KeyQueue(queue.size, WIDTH)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


def from_earlier_checkpoint(queue: Any) -> Any:
    """Of a module that has the queue. `counts` was a dict, `_extra_state`."""
    state = {f"part.{name}": z for name, z in queue.state_dict().items() if name != "counts"}
    state["part._extra_state"] = {"filled": queue.filled, "has_ids": True}
    whole = torch.nn.ModuleDict({"part": it.KeyQueue(queue.size, WIDTH)})
    whole.load_state_dict(state)
    assert "part._extra_state" in state
    return whole["part"]


def from_safetensors(queue: Any) -> Any:
    tensors = pytest.importorskip("safetensors.torch")
    other = it.KeyQueue(queue.size, WIDTH)
    other.load_state_dict(tensors.load(tensors.save(queue.state_dict())))
    return other


def with_copied_buffers(queue: Any) -> Any:
    """As an average of a model's weights is made; also of a copy that has stored keys itself."""
    other = copy.deepcopy(filled(queue.size, 2))
    for mine, its in zip(other.buffers(), queue.buffers(), strict=True):
        mine.copy_(its)
    return other


def pickled(queue: Any) -> Any:
    return pickle.loads(pickle.dumps(queue))


def assigned(queue: Any) -> Any:
    with torch.device("meta"):
        other = it.KeyQueue(queue.size, WIDTH)
    other.load_state_dict(queue.state_dict(), assign=True)
    return copy.deepcopy(other)


def on_meta(queue: Any) -> Any:
    with torch.device("meta"):
        other = it.KeyQueue(queue.size, WIDTH)
    other = other.to_empty(device="cpu")
    assert other.filled == 0
    other.load_state_dict(queue.state_dict())
    return other


@pytest.mark.parametrize("size", [4, 20])
@pytest.mark.parametrize(
    "again",
    [reloaded, copy.deepcopy, pickled, on_meta, assigned, with_copied_buffers, from_safetensors,
     from_earlier_checkpoint],
)  # fmt: skip
def test_a_queue_goes_on(again: Any, size: int) -> None:
    queue = filled(size)
    other = again(queue)
    for number in (5, 6):
        for got, want in zip(other(*batch(number, 3)), queue(*batch(number, 3)), strict=True):
            assert torch.equal(got, want)
    assert other.filled == queue.filled
    with pytest.raises(ValueError, match="ids: expected"):
        again(queue)(batch(0, 3)[0])


@pytest.mark.parametrize("with_ids", [True, False])
def test_compiled(with_ids: bool) -> None:
    """One graph while the queue grows, whatever its length, and one for a full queue."""
    from torch._dynamo.backends.debugging import aot_eager

    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    def step(queue: Any, query: Any, key: Any, ids: Any) -> Any:
        keys, all_ids = queue(key, ids)
        pair = None if ids is None else (ids, all_ids)
        return it.info_nce_loss(query, keys, scale=5.0, ids=pair)

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    queues = it.KeyQueue(40, WIDTH), it.KeyQueue(40, WIDTH)
    for number in range(20):
        key, ids = batch(number, 3)
        rows = [batch(90 + number, 3)[0].requires_grad_(), key.requires_grad_()]
        losses = [
            run(queue, *rows, ids if with_ids else None)
            for run, queue in zip((compiled, step), queues, strict=True)
        ]
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*(torch.autograd.grad(loss, rows) for loss in losses))
        torch.testing.assert_close(*(queue.keys for queue in queues), rtol=0, atol=0)
        torch.testing.assert_close(*(queue.ids for queue in queues), rtol=0, atol=0)
        assert queues[0].filled == queues[1].filled == min(40, 3 * number + 3)
    assert len(graphs) == 3  # the first call has the empty queue, whose length is a constant


def test_a_compiled_queue_that_is_loaded() -> None:
    torch.compiler.reset()
    queue = it.KeyQueue(40, WIDTH)
    compiled = torch.compile(queue, fullgraph=True, backend="aot_eager")
    for number in range(3):
        compiled(*batch(number, 3))
    queue.load_state_dict(filled(40, 2).state_dict())
    assert len(compiled(*batch(5, 3))[0]) == 9
    assert queue.filled == 9


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_would_store_keys_twice(use_reentrant: bool) -> None:
    """In evaluation mode, in which nothing is stored, the call may be computed again."""
    queue, encoder, (key, ids) = filled(), torch.nn.Linear(WIDTH, WIDTH), batch(7, 3)
    gradients = []

    def loss(z: Any) -> Any:
        query = encoder(z)
        return it.info_nce_loss(query, queue(key, ids)[0], scale=5.0, normalize=True)

    def step() -> Any:
        z = key.clone().requires_grad_()
        return checkpoint(loss, z, use_reentrant=use_reentrant).backward()

    with pytest.raises(RuntimeError, match=r"KeyQueue: expected a call outside of torch\.utils\.c"):
        step()
    queue.eval()
    for run in (step, lambda: loss(key).backward()):
        encoder.zero_grad()
        run()
        gradients.append(encoder.weight.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch sees no GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_gpu() -> None:
    queues = it.KeyQueue(7, WIDTH), it.KeyQueue(7, WIDTH).cuda()
    for number in range(4):
        new = batch(number, 3)
        on_gpu = [z.cuda() for z in new]
        try:
            torch.cuda.set_sync_debug_mode("error")
            got = queues[1](*on_gpu)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for value, want in zip(got, queues[0](*new), strict=True):
            assert torch.equal(value.cpu(), want)
    with pytest.raises(ValueError, match=r"key: expected a tensor on cuda:0, .* got cpu"):
        queues[1](*new)


def test_gradient_caching() -> None:
    """The queue stores each key once."""
    encoders = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    queue = filled()

    def loss(query: Any, key: Any) -> Any:
        return it.info_nce_loss(query, queue(key, batch(7, 6)[1])[0], scale=5.0, normalize=True)

    it.grad_cache(encoders, [batch(7, 6)[0], batch(8, 6)[0]], loss, chunk=2)
    assert torch.equal(queue.ids, torch.cat([batch(7, 6)[1], batch(2, 3)[1], batch(1, 1)[1]]))
    assert all(encoder.weight.grad.abs().max() > 0 for encoder in encoders)


def test_errors_name_the_argument() -> None:
    for name, arguments in {
        r"size: expected an integer of at least 0, got int -1": (-1, 4),
        r"size: expected an integer of at least 0, got float 2\.0": (2.0, 4),
        r"features: expected an integer of at least 1, got int 0": (2, 0),
    }.items():
        with pytest.raises(ValueError, match=name):
            it.KeyQueue(*arguments)
    (key, ids), queue = batch(9, 3), filled()
    before = queue.keys.clone()
    wrong: dict[str, tuple[Any, ...]] = {
        r"key: expected a tensor of floats, got ndarray of shape \(3, 4\)": (key.numpy(), ids),
        r"key: expected a tensor of floats, got Tensor of shape \(3,\) and dtype .*64": (ids, ids),
        r"key: expected shape \(B, 4\), got \(3, 2\)": (key[:, :2], ids),
        r"key: expected shape \(B, 4\), got \(4,\)": (key[0], ids),
        r"key: expected a tensor on cpu, as the queue is, got meta": (key.to("meta"), ids),
        r"ids: expected ids as in the calls before, got None": (key,),
        r"ids: expected a tensor of integers, not of uint64, got ndarray": (key, np.arange(3)),
        r"ids: .* not of uint64, got Tensor .*float32": (key, key[:, 0]),
        r"ids: .* not of uint64, got Tensor .* torch\.uint64": (key, ids.to(torch.uint64)),
        r"ids: .* shape \(3,\) on cpu, as key has, got \(2,\) on cpu": (key, ids[:2]),
        r"ids: .* shape \(3,\) on cpu, as key has, got \(3, 1\) on cpu": (key, ids[:, None]),
        r"ids: .* shape \(3,\) on cpu, as key has, got \(3,\) on meta": (key, ids.to("meta")),
    }
    for message, given in wrong.items():
        with pytest.raises((TypeError, ValueError), match=message):
            queue(*given)
    assert torch.equal(queue.keys, before)
    queue = it.KeyQueue(10, WIDTH)
    queue(key)
    with pytest.raises(ValueError, match=r"ids: expected None as in the calls before, got Tensor"):
        queue(key, ids)
    with pytest.raises(RuntimeError, match="size mismatch for keys"):
        it.KeyQueue(9, WIDTH).load_state_dict(queue.state_dict())
    with pytest.raises(
        RuntimeError, match=r"KeyQueue: expected a call outside of nn\.DataParallel"
    ):
        queue._replicate_for_data_parallel()(key)
    with pytest.raises((TypeError, RuntimeError), match="group: expected"):
        it.KeyQueue(9, WIDTH, "world")(key)
